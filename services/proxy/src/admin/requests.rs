//! Requests: those that run, one by its id, and the end of one.

use super::api::{AdminApi, AdminError, DONE, not_found};
use crate::running::{MAX_ENDED, RequestStatus};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Serialize;
use triptych_core::RequestId;

/// Requests that run.
#[derive(Debug, Serialize)]
pub(super) struct Running {
    requests: Vec<RequestStatus>,
}

pub(super) async fn list(State(api): State<AdminApi>) -> Json<Running> {
    Json(Running { requests: api.orchestrator.table.running() })
}

pub(super) async fn find(
    State(api): State<AdminApi>,
    Path(id): Path<String>,
) -> Result<Json<RequestStatus>, AdminError> {
    let found = RequestId::parse(&id).and_then(|id| api.orchestrator.table.find(id));
    let missing = || {
        not_found(format!("request {id:?} does not run here, nor is it of the last {MAX_ENDED} that ended"))
    };
    found.map(Json).ok_or_else(missing)
}

pub(super) async fn abort(
    State(api): State<AdminApi>,
    Path(id): Path<String>,
) -> Result<StatusCode, AdminError> {
    if !RequestId::parse(&id).is_some_and(|id| api.orchestrator.table.abort(id)) {
        return Err(not_found(format!("request {id:?} does not run here")));
    }
    tracing::info!(request_id = id, "an operator ended a request");
    Ok(DONE)
}
