//! Workers as an operator sees them, and what an operator may change of the fleet while it runs.

use super::Fleet;
use super::catalog::Known;
use super::choice::now;
use super::view::View;
use serde::Serialize;
use std::time::Duration;
use triptych_core::WorkerId;

/// A worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerStatus {
    /// Its name: role and address.
    pub id: String,
    /// `encoder` or `pd`.
    pub role: String,
    /// `ready`, `probing`, `ejected`, `draining` or `down`.
    pub health: &'static str,
    /// True if an operator drains it.
    pub drained: bool,
    /// True if it is a PD worker that holds the encoders too.
    pub encodes: bool,
    /// Names of its models.
    pub models: Vec<String>,
    /// Requests or encode jobs that this proxy gave it and that are not done.
    pub given: u64,
    /// Requests that run there, of every proxy.
    pub running: u64,
    /// Requests that wait there.
    pub waiting: u64,
    /// Prompt tokens that wait there.
    pub waiting_tokens: u64,
    /// Milliseconds of encoding that wait there.
    pub queued_ms: u64,
    /// Share of its KV cache in use, from 0 to 1; the fuller of both where there is one for cross-attention.
    pub kv_usage: f64,
    /// Encoder outputs that it holds.
    pub resident: usize,
}

impl WorkerStatus {
    fn new(known: &Known, view: &View) -> Self {
        let (running, waiting, waiting_tokens) = view.requests();
        Self {
            id: known.id.to_string(),
            role: known.role.to_string(),
            health: known.health.as_str(),
            drained: view.is_held,
            encodes: known.encodes,
            models: known.models.iter().map(|model| model.name.to_string()).collect(),
            given: view.n_leases,
            running,
            waiting,
            waiting_tokens,
            queued_ms: view.queued_us(now()) / 1000,
            kv_usage: (view.kv_usage().min(1.0) * 1e3).round() / 1e3,
            resident: view.resident.len(),
        }
    }
}

impl Fleet {
    /// Every worker, in the order of their names.
    pub fn statuses(&self) -> Vec<WorkerStatus> {
        let (catalog, workers) = (self.catalog(), self.shared.workers());
        let known = catalog.workers.iter();
        known.filter_map(|known| Some(WorkerStatus::new(known, &workers.get(&known.id)?.view()))).collect()
    }

    /// Lets a worker end what it has and gives it nothing new, or gives it work again. The order holds for its address: for
    /// whoever answers there. False: there is no such worker.
    pub fn hold(&self, id: &WorkerId, is_held: bool) -> bool {
        let worker = self.shared.workers().get(id).cloned();
        let Some(worker) = worker else { return false };
        worker.view().is_held = is_held;
        self.shared.refresh(&worker);
        true
    }

    /// The longest wait of an item for its encode to end; `None`: until its deadline.
    pub fn encode_slo(&self) -> Option<Duration> {
        *self.shared.encode_slo.lock()
    }

    /// Changes it, for items that are still to come.
    pub fn set_encode_slo(&self, slo: Option<Duration>) {
        *self.shared.encode_slo.lock() = slo;
    }
}
