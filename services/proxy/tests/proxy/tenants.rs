//! Tenants: authentication, quotas, and isolation of encoder outputs.

use crate::support::{Cluster, IMAGE, ask, client, question};
use serde_json::{Value, json};
use std::num::NonZeroU32;
use std::sync::Arc;
use tonic::{Code, Request};
use triptych_proto::v1;
use triptych_proxy::ProxyConfig;
use triptych_proxy::auth::{AuthConfig, Quota, keys};

const CHAT: &str = "/v1/chat/completions";

/// A cluster that two tenants have keys for.
struct Keyed {
    cluster: Cluster,
    a: String,
    b: String,
    _dir: tempfile::TempDir,
}

/// `lines` are further lines of the key file.
async fn keyed(lines: &str) -> Keyed {
    let (a, hash_a) = keys::generate();
    let (b, hash_b) = keys::generate();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, format!("key {hash_a} a\nkey {hash_b} b models=vl\n{lines}\n")).unwrap();
    let auth = AuthConfig { keys: Some(path), ..AuthConfig::default() };
    let cluster = Cluster::with(|config| config.auth = auth).await;
    Keyed { cluster, a, b, _dir: dir }
}

fn by(key: &str, request: v1::GenerateRequest) -> Request<v1::GenerateRequest> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

/// Reads an answer to its end over gRPC.
async fn asks(cluster: &Cluster, request: Request<v1::GenerateRequest>) -> Result<(), tonic::Status> {
    let mut stream = cluster.proxy.client().generate(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

async fn post(cluster: &Cluster, key: Option<&str>, body: &Value) -> (u16, Value) {
    let request = client().post(cluster.proxy.url(CHAT)).json(body);
    let request = key.into_iter().fold(request, |r, key| r.bearer_auth(key));
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn hi() -> Value {
    json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]})
}

#[tokio::test]
async fn http_and_grpc_refuse_requests_without_a_key() {
    let Keyed { cluster, a, .. } = &keyed("").await;
    for key in [None, Some("tk_wrong"), Some("")] {
        let (status, answer) = post(cluster, key, &hi()).await;
        assert_eq!((status, &answer["error"]["code"]), (401, &json!("invalid_api_key")), "{answer}");
        assert_eq!(answer["error"]["type"], "authentication_error");
    }
    let response = client().post(cluster.proxy.url(CHAT)).json(&hi()).send().await.unwrap();
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
    assert!(!response.headers().contains_key("retry-after"));
    assert_eq!(ask(&cluster.proxy, question(&[])).await.unwrap_err().code(), Code::Unauthenticated);
    let wrong = asks(cluster, by("tk_wrong", question(&[]))).await.unwrap_err();
    assert_eq!(wrong.code(), Code::Unauthenticated);
    assert!(cluster.proxy.client().list_models(v1::ListModelsRequest {}).await.is_err());
    assert_eq!(cluster.proxy.get("/v1/models").await.0, 401);
    assert_eq!(cluster.proxy.get("/v1/models/vl").await.0, 401);
    assert!(cluster.pd.requests().is_empty());
    // Probes and metrics need no key.
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(cluster.proxy.get(path).await.0, 200, "{path}");
    }
    assert_eq!(post(cluster, Some(a), &hi()).await.0, 200);
    asks(cluster, by(a, question(&[]))).await.unwrap();
    let refused =
        cluster.proxy.metric("triptych_requests_total{model=\"\",outcome=\"unauthenticated\"}").await;
    assert!(refused >= 5.0, "{refused}");
}

#[tokio::test]
async fn a_key_is_for_its_tenant_and_its_models() {
    let Keyed { cluster, a, b, .. } = &keyed("").await;
    let mut named = question(&[]);
    named.tenant = "b".into();
    assert_eq!(asks(cluster, by(a, named.clone())).await.unwrap_err().code(), Code::PermissionDenied);
    asks(cluster, by(b, named)).await.unwrap();
    let header = client().post(cluster.proxy.url(CHAT)).json(&hi()).bearer_auth(a);
    let response = header.header("x-triptych-tenant", "b").send().await.unwrap();
    assert_eq!(response.status(), 403);
    let speech = json!({"model": "asr", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(post(cluster, Some(b), &speech).await.0, 404);
    assert_eq!(post(cluster, Some(a), &speech).await.0, 200);
    let models = client().get(cluster.proxy.url("/v1/models")).bearer_auth(b).send().await.unwrap();
    let models: Value = models.json().await.unwrap();
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
    let one = client().get(cluster.proxy.url("/v1/models/asr")).bearer_auth(b).send().await.unwrap();
    assert_eq!(one.status(), 404);
    let mut list = Request::new(v1::ListModelsRequest {});
    list.metadata_mut().insert("authorization", format!("Bearer {b}").parse().unwrap());
    let list = cluster.proxy.client().list_models(list).await.unwrap().into_inner();
    assert_eq!(list.models.len(), 1);
}

#[tokio::test]
async fn tenants_share_no_output_and_cannot_name_anothers() {
    let Keyed { cluster, a, b, .. } = &keyed("").await;
    let sees = async |key: &str, image: &[u8]| asks(cluster, by(key, question(&[image]))).await.unwrap();
    sees(a, IMAGE).await;
    sees(a, IMAGE).await;
    assert_eq!(cluster.encoder.jobs().len(), 1);
    sees(b, IMAGE).await;
    assert_eq!(cluster.encoder.jobs().len(), 2, "the other tenant's is not found");
    let requests = cluster.pd.requests();
    let keys: Vec<_> = requests.iter().map(|r| r.items[0].key.clone()).collect();
    assert_eq!(keys[0], keys[1]);
    assert_ne!(keys[0], keys[2]);
    assert_ne!(requests[0].tenant, requests[2].tenant);
    // Another tenant's key sent as an item is just bytes.
    sees(b, &keys[0]).await;
    assert_eq!(cluster.encoder.jobs().len(), 3);
    let last = cluster.pd.requests().last().unwrap().items[0].key.clone();
    assert_ne!(last, keys[0]);
    // A client's own ids are not keys: they are ignored.
    let named = json!({"model": "vl", "messages": [{"role": "user", "content": [
        {"type": "image_url", "uuid": "one", "id": keys[0].to_vec(), "image_url": {"url": "data:image/png;base64,QUJD"}},
    ]}]});
    assert_eq!(post(cluster, Some(b), &named).await.0, 200);
    assert_eq!(cluster.encoder.jobs().len(), 4);
}

async fn limited(quota: Quota) -> Cluster {
    Cluster::with(|config: &mut ProxyConfig| config.auth.quota = quota).await
}

fn n(n: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(n)
}

fn of(tenant: &str, images: &[&[u8]]) -> v1::GenerateRequest {
    v1::GenerateRequest { tenant: tenant.into(), ..question(images) }
}

#[tokio::test]
async fn a_tenant_over_its_rate_gets_retry_after_and_others_are_served() {
    let cluster = limited(Quota { requests_per_s: n(1), ..Quota::default() }).await;
    ask(&cluster.proxy, of("a", &[])).await.unwrap();
    let status = ask(&cluster.proxy, of("a", &[])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let pause: u64 = status.metadata().get("retry-after-ms").unwrap().to_str().unwrap().parse().unwrap();
    assert!((1..=1000).contains(&pause), "{pause}");
    ask(&cluster.proxy, of("b", &[])).await.unwrap();
    let http = |tenant: &'static str| {
        client().post(cluster.proxy.url(CHAT)).json(&hi()).header("x-triptych-tenant", tenant).send()
    };
    assert_eq!(http("c").await.unwrap().status(), 200);
    let refused = http("c").await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"1".parse().unwrap()));
}

#[tokio::test]
async fn requests_at_once_and_bytes_in_memory_are_bounded_for_each_tenant() {
    let cluster = limited(Quota { in_flight: n(1), body_mib: n(1), ..Quota::default() }).await;
    cluster.pd.script([crate::fakes::GenerateStep::SendThenHold(vec![])]);
    let mut running = cluster.proxy.client().generate(of("a", &[])).await.unwrap().into_inner();
    crate::support::eventually("it is held", async || cluster.pd.requests().len() == 1).await;
    let status = ask(&cluster.proxy, of("a", &[])).await.unwrap_err();
    assert!(status.message().contains("1 requests at once"), "{status}");
    ask(&cluster.proxy, of("b", &[])).await.unwrap();
    cluster.pd.release(1);
    while running.message().await.unwrap().is_some() {}
    drop(running);
    crate::support::eventually("the permit is free", async || {
        ask(&cluster.proxy, of("a", &[])).await.is_ok()
    })
    .await;
    let large = vec![7; 2 << 20];
    let status = ask(&cluster.proxy, of("c", &[&large])).await.unwrap_err();
    assert!(status.message().contains("1 MiB in memory"), "{status}");
    let body = json!({"model": "vl", "messages": [{"role": "user", "content": "x".repeat(2 << 20)}]});
    let (status, answer) = cluster.proxy.post(CHAT, &body).await;
    assert_eq!((status, &answer["error"]["code"]), (429, &json!("overloaded")), "{answer}");
    ask(&cluster.proxy, of("c", &[b"small"])).await.unwrap();
}

#[tokio::test]
async fn with_keys_a_message_is_counted_while_it_arrives() {
    let Keyed { cluster, a, b, .. } = &keyed("tenant a body_mib=1").await;
    let large = vec![7; 3 << 20];
    let status = asks(cluster, by(a, question(&[&large]))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    asks(cluster, by(b, question(&[&large]))).await.unwrap();
    asks(cluster, by(a, question(&[b"small"]))).await.unwrap();
}

#[tokio::test]
async fn a_flood_of_new_images_is_limited_and_cached_ones_are_served() {
    let kib = u32::try_from(triptych_core::limits::Limits::default().max_body_bytes >> 10).unwrap();
    let cluster = limited(Quota { encode_kib_per_s: n(1), ..Quota::default() }).await;
    let known = b"the working set".to_vec();
    ask(&cluster.proxy, of("a", &[&known])).await.unwrap();
    let flood = |i: u8| vec![i; 8 << 20];
    let mut refused = 0;
    for i in 0..12 {
        match ask(&cluster.proxy, of("a", &[&flood(i)])).await {
            Ok(_) => {}
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                refused += 1;
            }
        }
    }
    assert!(refused >= 4, "a burst of {kib} KiB and no more: {refused} of 12 were refused");
    let before = cluster.encoder.jobs().len();
    ask(&cluster.proxy, of("a", &[&known])).await.unwrap();
    assert_eq!(cluster.encoder.jobs().len(), before, "what is in the caches costs nothing");
    ask(&cluster.proxy, of("b", &[&flood(99)])).await.unwrap();
}

#[tokio::test]
async fn one_tenants_flood_does_not_evict_anothers_outputs() {
    use triptych_ec::store::memory::MemoryStore;
    let limits = triptych_core::limits::Limits::default();
    // Room for a few dozen of the fakes' objects.
    let store: Arc<dyn triptych_ec::EcStore> = Arc::new(MemoryStore::new(16 << 10, &limits));
    let cluster =
        Cluster::over(store, |config| config.encodes.believed_for = std::time::Duration::ZERO).await;
    let working_set: Vec<_> = (0..4_u8).map(|i| vec![b'b', i]).collect();
    for image in &working_set {
        ask(&cluster.proxy, of("b", &[image])).await.unwrap();
    }
    for i in 0..200_u16 {
        ask(&cluster.proxy, of("a", &[&i.to_le_bytes()])).await.unwrap();
    }
    let before = cluster.encoder.jobs().len();
    for image in &working_set {
        ask(&cluster.proxy, of("b", &[image])).await.unwrap();
    }
    assert_eq!(cluster.encoder.jobs().len(), before, "all of them were hits");
    ask(&cluster.proxy, of("a", &[&0_u16.to_le_bytes()])).await.unwrap();
    assert_eq!(cluster.encoder.jobs().len(), before + 1, "the flood pushed out its own");
}

#[tokio::test]
async fn a_key_s_requests_are_not_more_urgent_than_it_allows() {
    let (key, hash) = keys::generate();
    let Keyed { cluster, a, .. } = &keyed(&format!("key {hash} slow priority=10")).await;
    for (key, asked, given) in [(&key, -100, 10), (&key, 0, 10), (&key, 20, 20), (a, -100, -100)] {
        let request = v1::GenerateRequest { priority: asked, ..question(&[]) };
        asks(cluster, by(key, request)).await.unwrap();
        assert_eq!(cluster.pd.requests().last().unwrap().priority, given);
    }
}
