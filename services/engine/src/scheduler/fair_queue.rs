//! Order of admission: the smaller priority, then the least served tenant, then the earliest request.
//!
//! Each tenant has a counter of the rows that were computed for it. A tenant that comes back, or comes for the
//! first time, starts no lower than the least of the present ones: being away earns nothing. A tenant that left
//! ahead of the others is remembered as long as it is ahead.

use crate::sequence::{QueueKey, Sequence};
use std::collections::{BTreeMap, HashMap, VecDeque};
use triptych_core::TenantId;

/// Service counters of the tenants.
#[derive(Debug, Default)]
pub(super) struct TenantShares {
    tenants: HashMap<TenantId, TenantShare>,
}

#[derive(Clone, Copy, Debug, Default)]
struct TenantShare {
    /// Rows computed, plus the virtual rows of the start.
    served: u64,
    /// Live sequences.
    n_live: usize,
}

impl TenantShares {
    /// Adds a sequence of the tenant.
    pub fn join(&mut self, tenant: TenantId) {
        let floor = self.floor().unwrap_or(0);
        let share = self.tenants.entry(tenant).or_default();
        if share.n_live == 0 {
            share.served = share.served.max(floor);
        }
        share.n_live += 1;
    }

    /// Removes a sequence of the tenant.
    pub fn leave(&mut self, tenant: &TenantId) {
        if let Some(share) = self.tenants.get_mut(tenant) {
            share.n_live = share.n_live.saturating_sub(1);
        }
        let floor = self.floor();
        self.tenants.retain(|_, share| share.n_live > 0 || floor.is_some_and(|floor| share.served > floor));
    }

    /// Charges the tenant for computed rows.
    pub fn charge(&mut self, tenant: &TenantId, n_rows: usize) {
        if let Some(share) = self.tenants.get_mut(tenant) {
            share.served += n_rows as u64;
        }
    }

    fn served(&self, tenant: &TenantId) -> u64 {
        self.tenants.get(tenant).map_or(0, |share| share.served)
    }

    /// Least service among present tenants; `None` when no tenant is present.
    fn floor(&self) -> Option<u64> {
        self.tenants.values().filter(|share| share.n_live > 0).map(|share| share.served).min()
    }
}

/// Waiting sequences by priority and tenant.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    lanes: BTreeMap<i32, HashMap<TenantId, VecDeque<QueueKey>>>,
}

impl FairQueue {
    /// All sequences that do not run.
    pub fn of(sequences: &BTreeMap<QueueKey, Sequence>) -> Self {
        let mut queue = Self::default();
        for (queue_key, sequence) in sequences.iter().filter(|(_, s)| s.device_kv().is_none()) {
            let lane = queue.lanes.entry(sequence.priority).or_default();
            lane.entry(sequence.tenant).or_default().push_back(*queue_key);
        }
        queue
    }

    /// Removes the next sequence to admit.
    pub fn pop(&mut self, shares: &TenantShares) -> Option<QueueKey> {
        let mut entry = self.lanes.first_entry()?;
        let lanes = entry.get_mut();
        let first = lanes.iter().min_by_key(|(tenant, lane)| (shares.served(tenant), lane.front().copied()));
        let tenant = first.map(|(tenant, _)| *tenant)?;
        let lane = lanes.get_mut(&tenant)?;
        let queue_key = lane.pop_front();
        if lane.is_empty() {
            lanes.remove(&tenant);
        }
        if lanes.is_empty() {
            entry.remove();
        }
        queue_key
    }
}
