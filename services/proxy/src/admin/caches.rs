//! Caches: the removal of one encoder output, and the reset of a tenant's.
//!
//! A reset changes the tenant's keys, so that nothing that was cached before is found again, in the store, in workers'
//! caches and among prefixes; what is unfindable is evicted as anything that nobody asks for. It removes no bytes.

use super::api::{AdminApi, AdminError, DONE, body, not_found};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use triptych_core::{ContentKey, Failure};
use triptych_ec::error::chain;

pub(super) async fn forget(
    State(api): State<AdminApi>,
    Path(key): Path<String>,
) -> Result<StatusCode, AdminError> {
    let wrong = || Failure::invalid("a content key is 64 hex digits, as `triptych ec ls` prints them");
    let key = ContentKey::from_hex(&key).ok_or_else(wrong)?;
    match api.cache.delete(&key).await {
        Ok(true) => Ok(DONE),
        Ok(false) => Err(not_found(format!("the store has no output {key}"))),
        Err(e) => Err(Failure::unavailable(format!("the store: {}", chain(&e))).into()),
    }
}

/// A reset.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reset {
    /// The tenant; empty: requests without one.
    tenant: String,
    /// Name of the new generation; left out, a random one.
    generation: Option<String>,
}

/// The generation that was begun, for the other proxies.
#[derive(Debug, Serialize)]
pub(super) struct Begun {
    generation: String,
}

pub(super) async fn reset(State(api): State<AdminApi>, bytes: Bytes) -> Result<Json<Begun>, AdminError> {
    let Reset { tenant, generation } = body(&bytes)?;
    let generation = generation.unwrap_or_else(|| format!("{:016x}", rand::random::<u64>()));
    api.auth.reset_caches(&tenant, &generation)?;
    tracing::info!(generation, "an operator reset a tenant's caches");
    Ok(Json(Begun { generation }))
}
