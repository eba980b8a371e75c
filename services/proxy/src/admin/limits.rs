//! Limits that may change while the proxy runs.

use super::api::{AdminApi, AdminError, body};
use crate::auth::Quota;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::time::Duration;
use triptych_core::Failure;

/// Largest number of requests at once that can be set.
const MAX_IN_FLIGHT: usize = 1 << 20;

/// The limits and how much of them is in use.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    /// Requests at once.
    max_in_flight: usize,
    /// Requests that run.
    in_flight: usize,
    /// Longest wait of an item to be encoded; 0: its deadline.
    encode_slo_ms: u64,
    /// Quota of tenants without one of their own; 0: no limit.
    tenant_requests_per_s: u32,
    tenant_item_kib_per_s: u32,
    tenant_encode_kib_per_s: u32,
    tenant_in_flight: u32,
    tenant_body_mib: u32,
}

/// A change: what is left out stays.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    max_in_flight: Option<usize>,
    encode_slo_ms: Option<u64>,
    tenant_requests_per_s: Option<u32>,
    tenant_item_kib_per_s: Option<u32>,
    tenant_encode_kib_per_s: Option<u32>,
    tenant_in_flight: Option<u32>,
    tenant_body_mib: Option<u32>,
}

impl Change {
    /// The quota after the change.
    fn quota(&self, now: Quota) -> Quota {
        let after = |change: Option<u32>, now| change.map_or(now, NonZeroU32::new);
        Quota {
            requests_per_s: after(self.tenant_requests_per_s, now.requests_per_s),
            item_kib_per_s: after(self.tenant_item_kib_per_s, now.item_kib_per_s),
            encode_kib_per_s: after(self.tenant_encode_kib_per_s, now.encode_kib_per_s),
            in_flight: after(self.tenant_in_flight, now.in_flight),
            body_mib: after(self.tenant_body_mib, now.body_mib),
        }
    }
}

pub(super) async fn show(State(api): State<AdminApi>) -> Json<Shown> {
    let number = |limit: Option<NonZeroU32>| limit.map_or(0, NonZeroU32::get);
    let (quota, slo) = (api.auth.quota(), api.orchestrator.fleet.encode_slo());
    Json(Shown {
        max_in_flight: api.admission.limit(),
        in_flight: api.admission.n_inside(),
        encode_slo_ms: slo.map_or(0, |slo| u64::try_from(slo.as_millis()).unwrap_or(u64::MAX)),
        tenant_requests_per_s: number(quota.requests_per_s),
        tenant_item_kib_per_s: number(quota.item_kib_per_s),
        tenant_encode_kib_per_s: number(quota.encode_kib_per_s),
        tenant_in_flight: number(quota.in_flight),
        tenant_body_mib: number(quota.body_mib),
    })
}

pub(super) async fn change(State(api): State<AdminApi>, bytes: Bytes) -> Result<Json<Shown>, AdminError> {
    let change: Change = body(&bytes)?;
    if let Some(n) = change.max_in_flight {
        if !(1..=MAX_IN_FLIGHT).contains(&n) {
            return Err(
                Failure::invalid(format!("max_in_flight is {n}, allowed is 1 to {MAX_IN_FLIGHT}")).into()
            );
        }
        api.admission.set_limit(n);
    }
    if let Some(ms) = change.encode_slo_ms {
        let slo = Some(Duration::from_millis(ms)).filter(|slo| !slo.is_zero());
        api.orchestrator.fleet.set_encode_slo(slo);
    }
    let (now, after) = (api.auth.quota(), change.quota(api.auth.quota()));
    if after != now {
        api.auth.set_quota(after);
    }
    tracing::info!(?change, "an operator changed limits");
    Ok(show(State(api)).await)
}
