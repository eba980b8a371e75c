//! Workers: all of them, the drain of one, and the role of one that holds both halves.

use super::api::{AdminApi, AdminError, DONE, body, not_found};
use crate::fleet::roles::ElasticRole;
use crate::fleet::{RoleError, WorkerStatus};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use triptych_core::{Failure, WorkerId};

/// All workers.
#[derive(Debug, Serialize)]
pub(super) struct Workers {
    /// The setting of `--roles`: `auto` or `fixed`.
    roles: &'static str,
    workers: Vec<WorkerStatus>,
}

pub(super) async fn list(State(api): State<AdminApi>) -> Json<Workers> {
    let fleet = &api.orchestrator.fleet;
    Json(Workers { roles: fleet.roles().as_str(), workers: fleet.statuses() })
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
        return Err(unknown(api, id));
    }
    tracing::info!(worker = id, is_held, "an operator drains a worker, or gives it work again");
    Ok(DONE)
}

/// A role for a worker: `both`, `encoder` or `pd`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Assignment {
    role: String,
}

/// Gives a worker that holds both halves a role: what it has ends there, what is new goes by the role.
pub(super) async fn assign(
    State(api): State<AdminApi>,
    Path(id): Path<String>,
    bytes: Bytes,
) -> Result<StatusCode, AdminError> {
    let Assignment { role } = body(&bytes)?;
    let role: ElasticRole = role.parse().map_err(|e| Failure::invalid(format!("role: {e}")))?;
    match api.orchestrator.fleet.assign(&WorkerId::new(id.as_str()), role) {
        Ok(()) => {
            tracing::info!(worker = id, role = role.as_str(), "an operator gives a worker a role");
            Ok(DONE)
        }
        Err(RoleError::Unknown) => Err(unknown(&api, &id)),
        Err(e) => Err(Failure::invalid(format!("{id}: {e}")).into()),
    }
}

fn unknown(api: &AdminApi, id: &str) -> AdminError {
    let known: Vec<_> = api.orchestrator.fleet.statuses().into_iter().map(|worker| worker.id).collect();
    not_found(format!("there is no worker {id:?}; there are {}", known.join(", ")))
}
