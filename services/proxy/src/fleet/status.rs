//! Workers as an operator sees them, and what an operator may change of the fleet while it runs.

use super::Fleet;
use super::catalog::{Health, Known};
use super::choice::now;
use super::roles::{ElasticRole, Roles};
use super::view::View;
use super::worker::Worker;
use serde::Serialize;
use std::time::Duration;
use triptych_core::WorkerId;
use triptych_runtime::discovery::Role;

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
    /// Work that a PD worker with encoders is given: `both`, `encoder` or `pd`.
    pub elastic_role: Option<&'static str>,
    /// Role that an operator gave it, or `plan --watch`; `both`: none.
    pub assigned_role: Option<&'static str>,
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

/// A role that a worker cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleError {
    /// There is no such worker.
    #[error("there is no such worker")]
    Unknown,
    /// It holds an encoder or a decoder, not both.
    #[error("it does not hold both encoder and decoder; start it with `triptych pd --with-encoder`")]
    OneHalf,
    /// Nobody else would answer requests.
    #[error("no other worker is ready to answer requests")]
    LastPd,
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
            elastic_role: known.encodes.then(|| view.role.as_str()),
            assigned_role: known.encodes.then(|| view.assigned.as_str()),
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

    /// Division of encodes among the workers.
    pub fn roles(&self) -> Roles {
        self.shared.roles
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

    /// Gives a PD worker with encoders a role, from the next request and encode on; what it has ends there. The order holds for
    /// its address. `Both`: as the setting of roles says.
    ///
    /// # Errors
    /// [`RoleError`].
    pub fn assign(&self, id: &WorkerId, role: ElasticRole) -> Result<(), RoleError> {
        let catalog = self.catalog();
        let holds_both = |id: &WorkerId| catalog.workers.iter().any(|known| known.id == *id && known.encodes);
        let worker = self.shared.workers().get(id).cloned().ok_or(RoleError::Unknown)?;
        if !holds_both(id) {
            return Err(RoleError::OneHalf);
        }
        let others =
            self.shared.workers().values().filter(|other| other.id != *id).cloned().collect::<Vec<_>>();
        let answers = |other: &Worker| {
            let (view, is_pd) = (other.view(), other.endpoint.role == Role::Pd);
            is_pd && view.health() == Health::Ready && view.assigned != ElasticRole::Encoder
        };
        if role == ElasticRole::Encoder && !others.iter().any(|other| answers(other)) {
            return Err(RoleError::LastPd);
        }
        worker.view().assigned = role;
        self.shared.divide(&catalog);
        Ok(())
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
