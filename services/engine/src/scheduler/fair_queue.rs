//! Order of admission: the smaller priority, then the least served tenant, then the request that is due first.
//!
//! A request is due at its arrival plus [`WORK_WEIGHT`] times the time that its prompt still takes: the shortest prefill first,
//! with ageing. So text does not wait for a queue of images, and a long prompt waits only for those that arrive within that
//! time of it. A sequence that has its first token keeps the place of its arrival. Before a prefill was measured the order is
//! that of arrival.
//!
//! Each tenant has a counter of the rows that were computed for it. A tenant that comes back, or comes for the
//! first time, starts no lower than the least of the present ones: being away earns nothing. A tenant that left
//! ahead of the others is remembered as long as it is ahead.

use crate::sequence::{QueueKey, Sequence};
use crate::step_rates::StepRates;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};
use triptych_core::TenantId;

/// Weight of a prompt's prefill against its age, as that of an encoder's jobs.
const WORK_WEIGHT: u32 = 4;
/// Longest time for which others overtake a request, however long its prompt.
const MOST_OVERTAKING: Duration = Duration::from_secs(30);

/// Place of a sequence among those of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    at: Instant,
    queue_key: QueueKey,
}

/// Order of a tenant's sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionOrder {
    /// The shortest prefill first, with ageing.
    #[default]
    LeastWorkLeft,
    /// In order of arrival, as vLLM's scheduler does.
    Arrival,
}

impl Due {
    /// The place of a sequence; `rates`: of prefills, `None` in order of arrival.
    pub fn of(queue_key: QueueKey, sequence: &Sequence, rates: Option<&StepRates>) -> Self {
        let milestones = sequence.milestones;
        let n_left = sequence.n_tokens().saturating_sub(sequence.n_computed());
        let rates = rates.filter(|_| milestones.first_token.is_none());
        let prefill = rates.and_then(|rates| rates.prefill_time(n_left));
        let later = prefill.unwrap_or_default().saturating_mul(WORK_WEIGHT).min(MOST_OVERTAKING);
        Self { at: milestones.arrived.checked_add(later).unwrap_or(milestones.arrived), queue_key }
    }
}

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
    lanes: BTreeMap<i32, HashMap<TenantId, VecDeque<Due>>>,
}

impl FairQueue {
    /// All sequences that do not run.
    pub fn of(sequences: &BTreeMap<QueueKey, Sequence>, rates: Option<&StepRates>) -> Self {
        let mut queue = Self::default();
        for (queue_key, sequence) in sequences.iter().filter(|(_, s)| s.device_kv().is_none()) {
            let lane = queue.lanes.entry(sequence.priority).or_default().entry(sequence.tenant).or_default();
            lane.push_back(Due::of(*queue_key, sequence, rates));
        }
        for lane in queue.lanes.values_mut().flat_map(HashMap::values_mut) {
            lane.make_contiguous().sort_unstable();
        }
        queue
    }

    /// Removes the next sequence to admit, if it comes before `limit`: a priority, and a place among those that have it.
    pub fn pop(&mut self, shares: &TenantShares, limit: Option<(i32, Due)>) -> Option<QueueKey> {
        let mut entry = self.lanes.first_entry()?;
        let priority = *entry.key();
        let lanes = entry.get_mut();
        let first = lanes.iter().min_by_key(|(tenant, lane)| (shares.served(tenant), lane.front().copied()));
        let tenant = first.map(|(tenant, _)| *tenant)?;
        let lane = lanes.get_mut(&tenant)?;
        if limit.is_some_and(|limit| lane.front().is_some_and(|due| (priority, *due) >= limit)) {
            return None;
        }
        let due = lane.pop_front();
        if lane.is_empty() {
            lanes.remove(&tenant);
        }
        if lanes.is_empty() {
            entry.remove();
        }
        due.map(|due| due.queue_key)
    }
}
