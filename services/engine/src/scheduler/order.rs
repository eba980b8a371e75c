//! Who goes first among those that wait: the smaller priority, then the tenant served least, then who came first.
//!
//! Each tenant has a counter of the rows that were computed for it. A tenant that comes back, or comes for the
//! first time, starts no lower than the least of those that are here: to be away earns nothing. One that left
//! ahead of the others is remembered as long as it is ahead.

use crate::sequence::{Place, Sequence};
use std::collections::{BTreeMap, HashMap, VecDeque};
use triptych_core::TenantId;

/// What each tenant was served.
#[derive(Debug, Default)]
pub(super) struct Shares {
    tenants: HashMap<TenantId, Share>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// Rows, virtual ones at the start.
    served: u64,
    /// Live sequences.
    n_live: usize,
}

impl Shares {
    /// A sequence of the tenant is here.
    pub fn join(&mut self, tenant: TenantId) {
        let floor = self.floor().unwrap_or(0);
        let share = self.tenants.entry(tenant).or_default();
        if share.n_live == 0 {
            share.served = share.served.max(floor);
        }
        share.n_live += 1;
    }

    /// A sequence of the tenant is gone.
    pub fn leave(&mut self, tenant: &TenantId) {
        if let Some(share) = self.tenants.get_mut(tenant) {
            share.n_live = share.n_live.saturating_sub(1);
        }
        let floor = self.floor();
        self.tenants.retain(|_, share| share.n_live > 0 || floor.is_some_and(|floor| share.served > floor));
    }

    /// Rows are computed for the tenant.
    pub fn charge(&mut self, tenant: &TenantId, n_rows: usize) {
        if let Some(share) = self.tenants.get_mut(tenant) {
            share.served += n_rows as u64;
        }
    }

    fn served(&self, tenant: &TenantId) -> u64 {
        self.tenants.get(tenant).map_or(0, |share| share.served)
    }

    /// The least that one of those here was served; `None` when nobody is here, and so nothing is owed.
    fn floor(&self) -> Option<u64> {
        self.tenants.values().filter(|share| share.n_live > 0).map(|share| share.served).min()
    }
}

/// Those that wait, in lanes.
#[derive(Debug, Default)]
pub(super) struct Queue {
    lanes: BTreeMap<i32, HashMap<TenantId, VecDeque<Place>>>,
}

impl Queue {
    /// All sequences of the line that do not run.
    pub fn of(line: &BTreeMap<Place, Sequence>) -> Self {
        let mut queue = Self::default();
        for (place, sequence) in line.iter().filter(|(_, s)| s.residence().is_none()) {
            let lane = queue.lanes.entry(sequence.priority).or_default();
            lane.entry(sequence.tenant).or_default().push_back(*place);
        }
        queue
    }

    /// Takes the next one out.
    pub fn pop(&mut self, shares: &Shares) -> Option<Place> {
        let mut entry = self.lanes.first_entry()?;
        let lanes = entry.get_mut();
        let first = lanes.iter().min_by_key(|(tenant, lane)| (shares.served(tenant), lane.front().copied()));
        let tenant = first.map(|(tenant, _)| *tenant)?;
        let lane = lanes.get_mut(&tenant)?;
        let place = lane.pop_front();
        if lane.is_empty() {
            lanes.remove(&tenant);
        }
        if lanes.is_empty() {
            entry.remove();
        }
        place
    }
}
