//! The workers of the fleet as they are known, their health, and their ejection.

use super::catalog::{Catalog, Health, Known};
use super::description::Description;
use super::elastic::{WorkSplit, WorkerCounts, divide};
use super::meters::FleetMeters;
use super::outlier::{Cause, Circuit, Outcome, outliers};
use super::pairing::{pair, pairings};
use super::prefix::PrefixTable;
use super::roles::{ElasticRole, Roles};
use super::worker::Worker;
use crate::request_machine::deaths::{Deaths, Life};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rand::rngs::StdRng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use triptych_core::WorkerId;
use triptych_proto::v1;
use triptych_runtime::discovery::{Endpoint, EndpointSet, Role};
use triptych_runtime::grpc::Dialer;

/// Calls without an answer in a row after which a connection is replaced.
const REDIAL_AFTER: u32 = 3;

/// State that the fleet's tasks share.
pub(super) struct FleetState {
    pub(super) workers: Mutex<BTreeMap<WorkerId, Arc<Worker>>>,
    pub(super) catalog: watch::Sender<Arc<Catalog>>,
    pub(super) prefixes: Mutex<PrefixTable>,
    pub(super) rng: Mutex<StdRng>,
    /// Held for one decision at a time, inside the lock of the retry budget if both are.
    pub(super) deaths: Mutex<Deaths>,
    pub(super) dialer: Dialer,
    pub(super) encode_slo: Mutex<Option<Duration>>,
    pub(super) roles: Roles,
    /// Work of the workers, where roles are elastic.
    pub(super) work: Mutex<WorkSplit>,
    pub(super) meters: FleetMeters,
}

impl FleetState {
    pub(super) fn workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Arc<Worker>>> {
        self.workers.lock()
    }

    /// Gives every PD worker with encoders its role, by what operators assigned and by the work that workers report.
    pub(super) fn divide(&self, catalog: &Catalog) {
        let n_encoders = match self.roles {
            Roles::Fixed => 0,
            Roles::Auto => {
                let n_encoders = catalog.workers.iter().filter(|known| known.role == Role::Encoder).count();
                let mut work = self.work.lock();
                let decided = work.n_encoders(WorkerCounts { n: catalog.workers.len(), n_encoders });
                self.meters.encode_share(work.encode_share());
                decided.saturating_sub(n_encoders)
            }
        };
        let workers = self.workers();
        let both = catalog.workers.iter().filter(|known| known.role == Role::Pd && known.encodes);
        let both: Vec<_> = both.filter_map(|known| workers.get(&known.id)).collect();
        let assigned: Vec<ElasticRole> = both.iter().map(|worker| worker.view().assigned).collect();
        for (worker, role) in both.into_iter().zip(divide(&assigned, n_encoders)) {
            let before = std::mem::replace(&mut worker.view().role, role);
            if before != role {
                self.tell_role(worker, before);
            }
        }
    }

    /// Tells operators of a worker's new role.
    fn tell_role(&self, worker: &Worker, before: ElasticRole) {
        let (role, assigned) = {
            let view = worker.view();
            (view.role, view.assigned)
        };
        if role == ElasticRole::Encoder {
            worker.encodes_next.notify_one();
        }
        let cause = if assigned == role && role != ElasticRole::Both { "operator" } else { "load" };
        self.meters.role_changed(role, cause);
        let (encode_share, busy_workers) = {
            let work = self.work.lock();
            (work.encode_share(), work.busy_workers())
        };
        tracing::info!(
            worker = %worker.id,
            from = before.as_str(),
            to = role.as_str(),
            cause,
            encode_share,
            busy_workers,
            "a worker has another role; what it has ends there"
        );
    }

    /// Makes the members those of the set; returns the new ones, which need a task.
    pub(super) fn follow(&self, present: &EndpointSet) -> Vec<Arc<Worker>> {
        let mut workers = self.workers();
        workers.retain(|id, worker| {
            let stays = present.contains(&worker.endpoint);
            if !stays {
                tracing::info!(worker = %id, "worker left; it gets nothing new");
                worker.leaving.cancel();
            }
            stays
        });
        let known: BTreeSet<_> = workers.values().map(|w| w.endpoint.clone()).collect();
        let new: Vec<_> = present.difference(&known).filter_map(|endpoint| self.meet(endpoint)).collect();
        workers.extend(new.iter().map(|worker| (worker.id.clone(), Arc::clone(worker))));
        let ids: BTreeSet<_> = workers.keys().cloned().collect();
        drop(workers);
        self.change_catalog(|catalog| {
            catalog.workers.retain(|known| ids.contains(&known.id));
            catalog.workers.extend(new.iter().map(|w| Known {
                id: w.id.clone(),
                role: w.role(),
                encodes: false,
                health: Health::Down,
                instance: Bytes::new(),
                models: Vec::new(),
            }));
            catalog.workers.sort_by(|a, b| a.id.cmp(&b.id));
        });
        new
    }

    pub(super) fn meet(&self, endpoint: &Endpoint) -> Option<Arc<Worker>> {
        match Worker::new(endpoint.clone(), self.dialer.clone()) {
            Ok(worker) => Some(Arc::new(worker)),
            Err(e) => {
                tracing::warn!(address = endpoint.address, error = %e, "discovery names what is no address");
                None
            }
        }
    }

    /// `asked`: when the worker was asked for the description.
    pub(super) fn set_up(&self, worker: &Worker, description: Description, asked: Instant) {
        let (health, life, role) = {
            let mut view = worker.view();
            view.is_up = true;
            (view.health(), view.identify(description.instance.clone()), view.role)
        };
        if life != Life::Same && role == ElasticRole::Encoder {
            worker.encodes_next.notify_one();
        }
        if life == Life::Other {
            let suspects = description.suspects.len();
            tracing::info!(worker = %worker.id, suspects, "another process answers for this worker");
        }
        self.deaths().lives(&worker.id, life, &description.suspects, asked.into_std());
        let encodes = worker.role() == Role::Pd && description.encodes;
        self.change(worker, |known| {
            let Description { instance, models, .. } = description;
            *known = Known { health, encodes, instance, models, ..known.clone() };
        });
    }

    pub(super) fn deaths(&self) -> MutexGuard<'_, Deaths> {
        self.deaths.lock()
    }

    /// Nobody listens at its address.
    pub(super) fn note_death(&self, worker: &Worker) {
        let was_there = worker.view().instance.is_some();
        if was_there {
            self.deaths().died(&worker.id, Instant::now().into_std());
        }
    }

    pub(super) fn set_down(&self, worker: &Worker) {
        worker.view().go_down();
        self.refresh(worker);
    }

    pub(super) fn report(&self, worker: &Worker, state: v1::WorkerState, first: bool) {
        let now = Instant::now().into_std();
        let done = worker.view().take_report(state, first, now);
        self.work.lock().add(now, done);
        self.refresh(worker);
    }

    pub(super) fn end_reports(&self, worker: &Worker) {
        worker.view().end_reports();
        self.refresh(worker);
    }

    /// Puts the worker's health into the catalog.
    pub(super) fn refresh(&self, worker: &Worker) {
        let health = worker.view().health();
        self.change(worker, |known| known.health = health);
    }

    /// Changes what is known of one worker, if it still belongs to the fleet.
    pub(super) fn change(&self, worker: &Worker, change: impl FnOnce(&mut Known)) {
        if worker.leaving.is_cancelled() {
            return;
        }
        self.change_catalog(|catalog| {
            if let Some(known) = catalog.workers.iter_mut().find(|known| known.id == worker.id) {
                change(known);
            }
        });
    }

    /// Changes the catalog, and tells of pairs that began to disagree.
    pub(super) fn change_catalog(&self, change: impl FnOnce(&mut Catalog)) {
        let (mut new_disagreements, mut new_pairings) = (BTreeSet::new(), BTreeSet::new());
        self.catalog.send_if_modified(|current| {
            let mut next = Catalog::clone(current);
            change(&mut next);
            pair(&mut next);
            let changed = next != **current;
            if changed {
                new_disagreements = &next.disagreements() - &current.disagreements();
                new_pairings = &pairings(&next) - &pairings(current);
                self.meters.catalog(&next);
                *current = Arc::new(next);
            }
            changed
        });
        for pairing in new_pairings {
            tracing::info!(
                worker = %pairing.worker,
                model = %pairing.model,
                modality = %pairing.modality,
                encoder = pairing.encoder.map_or("itself".into(), |encoder| encoder.to_string()),
                items = if pairing.has_bytes { "with their bytes" } else { "by metadata" },
                "items of another engine's worker"
            );
        }
        for d in new_disagreements {
            tracing::error!(
                model = %d.model,
                modality = %d.modality,
                encoder = %d.encoder.0,
                encoder_fingerprint = %d.encoder.1,
                pd = %d.pd.0,
                pd_fingerprint = %d.pd.1,
                differences = d.differences.join(", "),
                "encoder and PD worker serve different encoders under one name; the pair is refused"
            );
        }
    }
}

/// Ejection: one worker's outcomes, compared with the others'.
impl FleetState {
    pub(super) fn count(&self, worker: &Worker, outcome: Outcome) {
        let (cause, timeouts) = {
            let mut view = worker.view();
            (view.outlier.count(outcome), view.outlier.timeouts())
        };
        if timeouts > 0 && timeouts.is_multiple_of(REDIAL_AFTER) {
            worker.reconnect();
        }
        match cause {
            Some(cause) => self.eject(worker, cause, Instant::now()),
            // A probe that went well closes the circuit.
            None => self.refresh(worker),
        }
    }

    /// Leaves it alone for a while, unless half of those that can do its work are left alone already.
    pub(super) fn eject(&self, worker: &Worker, cause: Cause, now: Instant) {
        if cause != Cause::Probe && !self.may_eject(&worker.id) {
            return;
        }
        let time = worker.view().outlier.eject(now);
        self.meters.ejected(worker.role(), cause);
        tracing::warn!(worker = %worker.id, cause = cause.as_str(), ?time, "worker ejected");
        self.refresh(worker);
        // Its task waits for the end of this time.
        worker.ask_again.notify_one();
    }

    /// True if, of those that serve each of its models, at most half would be ejected with it.
    pub(super) fn may_eject(&self, id: &WorkerId) -> bool {
        let catalog = self.catalog.borrow().clone();
        let Some(own) = catalog.workers.iter().find(|known| known.id == *id) else { return false };
        own.models.iter().all(|model| {
            let serves = |known: &&Known| {
                known.role == own.role
                    && known.models.iter().any(|m| m.name == model.name && m.edition == model.edition)
            };
            let peers: Vec<_> = catalog.workers.iter().filter(serves).collect();
            let is_out = |known: &&&Known| matches!(known.health, Health::Ejected | Health::Probing);
            (peers.iter().filter(is_out).count() + 1) * 2 <= peers.len()
        })
    }

    /// Ends an interval: ejects those whose success rates are far below the others'.
    pub(super) fn compare_rates(&self, now: Instant) {
        let workers: Vec<_> = self.workers().values().cloned().collect();
        for role in Role::ALL {
            let of_role = workers.iter().filter(|w| w.role() == role);
            let rated = of_role.filter_map(|w| Some((w, w.view().outlier.end_interval()?)));
            let (rated, rates): (Vec<_>, Vec<_>) = rated.unzip();
            for i in outliers(&rates) {
                if let Some(worker) = rated.get(i).filter(|w| w.view().outlier.circuit() == Circuit::Closed) {
                    self.eject(worker, Cause::SuccessRate, now);
                }
            }
        }
    }

    /// Until the worker's ejection ends, if it is ejected.
    pub(super) fn until_probe(&self, worker: &Worker, now: Instant) -> Option<Duration> {
        match worker.view().outlier.circuit() {
            Circuit::Open { until } => Some(until.saturating_duration_since(now)),
            _ => None,
        }
    }

    pub(super) fn half_open(&self, worker: &Worker, now: Instant) {
        let is_over = worker.view().outlier.half_open(now);
        if is_over {
            tracing::info!(worker = %worker.id, "worker may show what it can do");
            self.refresh(worker);
        }
    }

    /// It may have other work beside what was tried alone.
    pub(super) fn end_isolation(&self, worker: &Worker) {
        worker.view().is_isolated = false;
        // As below.
        self.catalog.send_modify(|_| {});
    }

    /// A probe ended without an outcome: the next piece of work is one.
    pub(super) fn end_probe(&self, worker: &Worker) {
        let free_again = worker.view().outlier.give_back_probe();
        if free_again {
            // Nothing in the catalog changes, and those who wait for a worker have to look again.
            self.catalog.send_modify(|_| {});
        }
    }
}
