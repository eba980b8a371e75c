//! Workers: all of them, and the drain of one.

use super::api::{AdminApi, AdminError, DONE, not_found};
use crate::fleet::WorkerStatus;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Serialize;
use triptych_core::WorkerId;

/// All workers.
#[derive(Debug, Serialize)]
pub(super) struct Workers {
    workers: Vec<WorkerStatus>,
}

pub(super) async fn list(State(api): State<AdminApi>) -> Json<Workers> {
    Json(Workers { workers: api.orchestrator.fleet.statuses() })
}

pub(super) async fn drain(state: State<AdminApi>, id: Path<String>) -> Result<StatusCode, AdminError> {
    hold(&state, &id, true)
}

pub(super) async fn resume(state: State<AdminApi>, id: Path<String>) -> Result<StatusCode, AdminError> {
    hold(&state, &id, false)
}

fn hold(api: &AdminApi, id: &str, is_held: bool) -> Result<StatusCode, AdminError> {
    let fleet = &api.orchestrator.fleet;
    if !fleet.hold(&WorkerId::new(id), is_held) {
        let known: Vec<_> = fleet.statuses().into_iter().map(|worker| worker.id).collect();
        return Err(not_found(format!("there is no worker {id:?}; there are {}", known.join(", "))));
    }
    tracing::info!(worker = id, is_held, "an operator drains a worker, or gives it work again");
    Ok(DONE)
}
