//! Bytes as the body of an HTTP request, through the proxy's own routes, to workers that take no time: answered, or
//! refused with a reason in OpenAI's shape. Never the proxy's own fault, and nothing is left running.
#![no_main]

#[path = "../../../benches/src/proxy/workers.rs"]
mod workers;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use triptych_core::limits::Limits;
use triptych_ec::store::memory::MemoryStore;
use triptych_proxy::{Embedded, EmbeddedConfig};
use triptych_runtime::grpc::Dialer;
use triptych_runtime::{Drain, MetricsRegistry};

/// The first byte of an input chooses; the rest is the body.
const ROUTES: [(&str, &str); 6] = [
    ("/v1/chat/completions", "application/json"),
    ("/v1/completions", "application/json"),
    ("/v1/audio/transcriptions", "multipart/form-data; boundary=b"),
    ("/v1/audio/translations", "multipart/form-data; boundary=b"),
    ("/v1/chat/completions", "text/plain"),
    ("/v1/audio/transcriptions", "multipart/form-data"),
];
/// Room for outputs of the null encoder: one number each.
const STORE_BYTES: usize = 1 << 20;
const LONGEST_ANSWER: usize = 16 << 20;

/// A proxy and its two workers.
struct Cluster {
    runtime: Runtime,
    proxy: Embedded,
    routes: Router,
}

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let limits = Limits { max_request_time: Duration::from_secs(5), ..Limits::default() };
    let proxy = runtime.block_on(async {
        let config = EmbeddedConfig {
            encoders: vec![workers::encoder().await.expect("a port")],
            pds: vec![workers::pd().await.expect("a port")],
            dialer: Dialer::default(),
            store: Arc::new(MemoryStore::new(STORE_BYTES, &limits)),
            limits: limits.clone(),
            max_in_flight: 4,
            seed: Some(1),
        };
        let proxy = Embedded::start(config, Drain::new(), &MetricsRegistry::default()).expect("a proxy");
        while !proxy.is_ready() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy
    });
    let routes = proxy.http();
    Cluster { runtime, proxy, routes }
});

fuzz_target!(
    init: { LazyLock::force(&CLUSTER); },
    |data: &[u8]| {
        let Some((choice, body)) = data.split_first() else { return };
        let (route, kind) = ROUTES[usize::from(*choice) % ROUTES.len()];
        let request = Request::post(route).header(header::CONTENT_TYPE, kind);
        let request = request.body(Body::from(body.to_vec())).expect("a request");
        let Cluster { runtime, proxy, routes } = &*CLUSTER;
        let (status, answer) = runtime.block_on(async {
            let Ok(response) = routes.clone().oneshot(request).await;
            let status = response.status();
            (status, to_bytes(response.into_body(), LONGEST_ANSWER).await.expect("an answer that ends"))
        });
        assert!(status != StatusCode::INTERNAL_SERVER_ERROR, "{}", String::from_utf8_lossy(&answer));
        if !status.is_success() {
            let said: serde_json::Value = serde_json::from_slice(&answer).expect("an error in JSON");
            assert!(said["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{said}");
        }
        // The task that answered may still be giving back what it held.
        runtime.block_on(async {
            while proxy.n_running() > 0 {
                tokio::task::yield_now().await;
            }
        });
    }
);
