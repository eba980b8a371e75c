//! The parts that encodes work with, and the machine that decides, behind one lock.

use super::lease::Leases;
use super::meters::EncodeMeters;
use super::progress::Progress;
use crate::budget::RetryBudget;
use crate::cache::EncoderCache;
use crate::fleet::Fleet;
use crate::request_machine::action::EncodeAction;
use crate::request_machine::encodes::{EncodeId, Encodes, Leave};
use crate::request_machine::event::EncodeEvent;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use triptych_core::WorkerId;

/// Workers whose peers are remembered.
const MAX_PEERS: usize = 1024;

/// The parts.
pub(super) struct Parts {
    pub(super) fleet: Arc<Fleet>,
    pub(super) cache: EncoderCache,
    pub(super) leases: Leases,
    pub(super) budget: Arc<RetryBudget>,
    pub(super) meters: EncodeMeters,
    /// Held for one decision at a time. The budget's lock is taken inside it, never the other way round.
    pub(super) in_flight: Mutex<InFlight>,
    /// `EcObjects` services of each encoder, as it reported them with its latest answer.
    pub(super) peers: Mutex<HashMap<WorkerId, Vec<String>>>,
}

/// The machine, and the task that carries out the actions of each of its encodes.
pub(super) struct InFlight {
    pub(super) encodes: Encodes,
    pub(super) tasks: HashMap<EncodeId, EncodeTask>,
}

/// The task of one encode.
pub(super) struct EncodeTask {
    pub(super) progress: watch::Receiver<Progress>,
    pub(super) task: AbortHandle,
}

impl Parts {
    pub(super) fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock()
    }

    /// Tells an encode what happened.
    pub(super) fn on(&self, id: EncodeId, event: EncodeEvent) -> Vec<EncodeAction> {
        let now = now();
        let mut in_flight = self.in_flight();
        let actions = in_flight.encodes.on(id, event, &mut self.budget.window(), now);
        if in_flight.encodes.get(id).is_none() {
            in_flight.tasks.remove(&id);
        }
        actions
    }

    /// A request has no more interest in an encode.
    pub(super) fn leave(&self, id: EncodeId, leave: Leave) {
        let mut in_flight = self.in_flight();
        in_flight.encodes.leave(id, leave);
        in_flight.abort_if_cancelled(id);
    }

    /// The process stops: nothing goes on for requests that failed.
    pub(super) fn stop_left_behind(&self) {
        let mut in_flight = self.in_flight();
        for (id, _) in in_flight.encodes.stop_left_behind() {
            in_flight.abort_if_cancelled(id);
        }
    }

    /// The task of an encode is gone, whether it came to its end or not.
    pub(super) fn forget(&self, id: EncodeId) {
        let mut in_flight = self.in_flight();
        in_flight.encodes.forget(id);
        in_flight.tasks.remove(&id);
    }

    pub(super) fn peers_of(&self, worker: &WorkerId) -> Vec<String> {
        self.peers.lock().get(worker).cloned().unwrap_or_default()
    }

    pub(super) fn note_peers(&self, worker: &WorkerId, peers: &[String]) {
        let mut known = self.peers.lock();
        if known.get(worker).map(Vec::as_slice) != Some(peers) {
            if known.len() >= MAX_PEERS {
                // Workers come and go under new names; what is forgotten is reported again with the next answer.
                known.clear();
            }
            known.insert(worker.clone(), peers.to_vec());
        }
    }
}

impl InFlight {
    /// Its attempts and its lease are guards in its task: dropping that carries out what the machine asks for.
    fn abort_if_cancelled(&mut self, id: EncodeId) {
        if self.encodes.get(id).is_none()
            && let Some(task) = self.tasks.remove(&id)
        {
            task.task.abort();
        }
    }
}

/// The time, by the clock that a test may pause.
pub(super) fn now() -> std::time::Instant {
    Instant::now().into_std()
}
