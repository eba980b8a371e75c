//! The log's filter.

use super::api::{AdminApi, AdminError, body};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::json;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::telemetry::{self, TelemetryError};
use triptych_runtime::trace_context::REQUEST_TARGET;

/// The log's filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogFilter {
    filter: String,
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
