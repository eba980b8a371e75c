//! The admin API: what an operator sees and changes of a proxy while it runs. JSON over HTTP, on the admin port alone.
//!
//! It serves whoever has the admin token; without one, callers on this machine if the port is on its loopback address
//! ([`access`]). What is changed holds for this proxy, until it ends. Contents of requests, keys and tokens are in no
//! answer; tenants are hashes, as in the request log.

pub mod access;
mod caches;
mod limits;
mod requests;
pub mod token;
mod workers;

use crate::admission::Admission;
use crate::auth::Auth;
use crate::cache::EncoderCache;
use crate::orchestrate::Orchestrator;
use access::Access;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router, middleware};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::sync::Arc;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::status::http_status_of;
use triptych_runtime::telemetry::{self, TelemetryError};
use triptych_runtime::trace_context::REQUEST_TARGET;

/// What it acts on. Cheap to clone.
#[derive(Clone)]
pub struct AdminApi {
    /// Requests and workers.
    pub orchestrator: Arc<Orchestrator>,
    /// Bound on requests in flight.
    pub admission: Admission,
    /// Quotas.
    pub auth: Auth,
    /// The store of encoder outputs.
    pub cache: EncoderCache,
}

/// The routes, for callers that `access` lets in.
pub fn routes(api: AdminApi, access: Access) -> Router {
    Router::new()
        .route("/admin/workers", get(workers::list))
        .route("/admin/workers/{id}/drain", post(workers::drain).delete(workers::resume))
        .route("/admin/requests", get(requests::list))
        .route("/admin/requests/{id}", get(requests::find).delete(requests::abort))
        .route("/admin/limits", get(limits::show).patch(limits::change))
        .route("/admin/caches/encoder/{key}", delete(caches::forget))
        .route("/admin/caches/reset", post(caches::reset))
        .route("/admin/log", get(log).put(set_log))
        .layer(middleware::from_fn_with_state(access, access::check))
        .with_state(api)
}

/// A failure as this API answers it.
#[derive(Debug)]
struct AdminError(Failure);

impl From<Failure> for AdminError {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let Self(failure) = self;
        let body = json!({"error": {"message": failure.message, "code": failure.class.as_str()}});
        (http_status_of(&failure), Json(body)).into_response()
    }
}

fn not_found(message: String) -> AdminError {
    Failure::new(FailureClass::NotFound, message).into()
}

/// A body of JSON, whatever its content type says, so that `curl -d` will do.
fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, AdminError> {
    serde_json::from_slice(bytes).map_err(|e| Failure::invalid(format!("the body: {e}")).into())
}

/// The log's filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogFilter {
    filter: String,
}

async fn log() -> Json<serde_json::Value> {
    Json(json!({"filter": telemetry::log_filter()}))
}

/// Changes the filter. Lines of the request log are let through as they were.
async fn set_log(State(api): State<AdminApi>, bytes: Bytes) -> Result<Json<serde_json::Value>, AdminError> {
    let LogFilter { filter } = body(&bytes)?;
    let whole = match api.orchestrator.request_log.is_on() {
        true => format!("{filter},{REQUEST_TARGET}=info"),
        false => filter,
    };
    telemetry::set_log_filter(&whole).map_err(|e| {
        let class = match e {
            TelemetryError::Filter { .. } => FailureClass::InvalidArgument,
            _ => FailureClass::Unavailable,
        };
        Failure::new(class, e.to_string())
    })?;
    tracing::info!(filter = whole, "an operator changed the log's filter");
    Ok(log().await)
}

/// An answer without content.
const DONE: StatusCode = StatusCode::NO_CONTENT;
