//! Admin endpoints of a worker: `/healthz` (and `/health`, vLLM's name), `/readyz` and `/metrics` over plain HTTP.

use crate::drain::Drain;
use crate::metrics::{CONTENT_TYPE, MetricsRegistry};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::net::TcpListener;

/// Readiness of the process: loaded, and not draining.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    loaded: Arc<AtomicBool>,
    drain: Drain,
}

impl Readiness {
    /// A process that is not loaded yet.
    pub fn new(drain: Drain) -> Self {
        Self { loaded: Arc::default(), drain }
    }

    /// Marks the process loaded.
    pub fn set_loaded(&self) {
        self.loaded.store(true, Ordering::Release);
        self.drain.set_ready();
    }

    /// True if the process accepts work.
    pub fn is_ready(&self) -> bool {
        self.loaded.load(Ordering::Acquire) && !self.drain.is_stopping()
    }
}

/// Routes of the admin endpoints.
pub fn router(readiness: Readiness, metrics: MetricsRegistry) -> Router {
    let ready = move || {
        let ready = readiness.is_ready();
        async move {
            if ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
        }
    };
    let text = move || {
        let text = metrics.encode();
        async move { ([(header::CONTENT_TYPE, CONTENT_TYPE)], text) }
    };
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/health", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(text))
}

/// Serves the routes as a background task of the drain, so that metrics can be read while the process drains.
pub fn spawn(listener: TcpListener, routes: Router, drain: &Drain) {
    let abort = drain.abort_token();
    drain.background().spawn(async move {
        if let Err(e) = axum::serve(listener, routes).with_graceful_shutdown(abort.cancelled_owned()).await {
            tracing::error!(error = %e, "admin server ended");
        }
    });
}
