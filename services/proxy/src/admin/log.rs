//! The log's filter.

use super::api::{AdminApi, AdminError, body, not_found};
use crate::wire::{CallFailure, outgoing};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use serde::Deserialize;
use serde_json::json;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;
use triptych_proto::v1::worker_admin_client::WorkerAdminClient;
use triptych_runtime::telemetry::{self, TelemetryError};
use triptych_runtime::trace_context::REQUEST_TARGET;

/// Limit on a worker's answer.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);

/// The log's filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogFilter {
    filter: String,
}

/// Changes the filter of a worker.
pub(super) async fn of_worker(
    State(api): State<AdminApi>,
    Path(id): Path<String>,
    bytes: Bytes,
) -> Result<Json<serde_json::Value>, AdminError> {
    let LogFilter { filter } = body(&bytes)?;
    let worker = api.orchestrator.fleet.all_up().into_iter().find(|(worker, ..)| worker.to_string() == id);
    let Some((_, _, channel)) = worker else {
        return Err(not_found(format!("there is no worker {id:?} that is up")));
    };
    let request = outgoing(v1::SetLogFilterRequest { filter }, Instant::now() + WORKER_TIMEOUT);
    let answer = WorkerAdminClient::new(channel).set_log_filter(request).await;
    let answer = answer.map_err(|status| CallFailure::from(status).failure)?.into_inner();
    Ok(Json(json!({"filter": answer.filter})))
}

pub(super) async fn show() -> Json<serde_json::Value> {
    Json(json!({"filter": telemetry::log_filter()}))
}

/// Changes the filter. Lines of the request log are let through as they were.
pub(super) async fn change(
    State(api): State<AdminApi>,
    bytes: Bytes,
) -> Result<Json<serde_json::Value>, AdminError> {
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
    Ok(show().await)
}
