//! The workers: who is there, what they serve, how busy they are, and who gets the next piece of work.
//!
//! Discovery says who belongs to the fleet ([`members`]); one task per worker asks it to describe itself and watches it
//! ([`task`]); what they say becomes one [`Catalog`], which changes as a whole. A piece of work takes a [`Lease`] on the
//! worker that [`score`] chooses of those that are able, and waits while there is none. Those that fail much more than
//! others are left alone for a while ([`outlier`]). A worker that restarts at its address is found again by its task;
//! one that leaves discovery gets nothing new, and is forgotten when its last work has ended.

pub mod catalog;
mod choice;
pub mod home;
mod lease;
mod members;
mod meters;
pub mod outlier;
pub mod prefix;
pub mod score;
pub mod size;
mod task;
pub mod view;
mod worker;

pub use lease::Lease;
pub use prefix::Prefixes;
pub use size::{Forecast, Size};

use crate::admission::in_time;
use crate::config::ProxyError;
use catalog::{Catalog, Health, Known, Want};
use meters::FleetMeters;
use outlier::{Circuit, Outcome, outliers};
use prefix::PrefixTable;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use triptych_core::{ContentKey, Failure, WorkerId};
use triptych_proto::v1;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::discovery::fixed::Fixed;
use triptych_runtime::discovery::{Discovery, Endpoint, EndpointSet, Role, Source};
use triptych_runtime::grpc::Dialer;
use worker::Worker;

/// Calls without an answer in a row after which a connection is replaced.
const REDIAL_AFTER: u32 = 3;

/// What a fleet is made of.
pub struct FleetSettings {
    /// `host:port` of each encoder worker that is always there.
    pub encoders: Vec<String>,
    /// `host:port` of each PD worker that is always there.
    pub pds: Vec<String>,
    /// Sources of others, which come and go.
    pub discovery: Vec<Box<dyn Source>>,
    /// Makes the channels to them.
    pub dialer: Dialer,
    /// For choices by lot. `None`: the system's randomness.
    pub seed: Option<u64>,
    /// How long an item may wait for its encode to end; `None`: until its deadline.
    pub encode_slo: Option<Duration>,
}

/// All workers. Dropping it ends their tasks.
pub struct Fleet {
    shared: Arc<Shared>,
    _members: JoinSet<()>,
}

struct Shared {
    workers: Mutex<BTreeMap<WorkerId, Arc<Worker>>>,
    catalog: watch::Sender<Arc<Catalog>>,
    prefixes: Mutex<PrefixTable>,
    rng: Mutex<StdRng>,
    dialer: Dialer,
    encode_slo: Option<Duration>,
    meters: FleetMeters,
}

impl Fleet {
    /// Starts asking. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ProxyError`] if there is no PD worker and never can be, or an address is not one.
    pub fn start(settings: FleetSettings, metrics: &MetricsRegistry) -> Result<Self, ProxyError> {
        let FleetSettings { encoders, pds, mut discovery, dialer, seed, encode_slo } = settings;
        if pds.is_empty() && !discovery.iter().any(|source| source.is_dynamic()) {
            return Err(ProxyError::NoPdWorker);
        }
        for address in encoders.iter().chain(&pds) {
            let wrong = |source| ProxyError::WorkerAddress { address: address.clone(), source };
            dialer.dial(address).map_err(wrong)?;
        }
        discovery.push(Box::new(Fixed::new(Role::Encoder, encoders)));
        discovery.push(Box::new(Fixed::new(Role::Pd, pds)));
        let shared = Arc::new(Shared {
            workers: Mutex::default(),
            catalog: watch::Sender::default(),
            prefixes: Mutex::default(),
            rng: Mutex::new(StdRng::seed_from_u64(seed.unwrap_or_else(rand::random))),
            dialer,
            encode_slo,
            meters: FleetMeters::new(metrics),
        });
        let mut members = JoinSet::new();
        members.spawn(members::run(Arc::clone(&shared), Discovery::start(discovery)));
        Ok(Self { shared, _members: members })
    }

    /// The workers as they are.
    pub fn catalog(&self) -> Arc<Catalog> {
        self.shared.catalog.borrow().clone()
    }

    /// The workers as they change.
    pub fn changes(&self) -> watch::Receiver<Arc<Catalog>> {
        self.shared.catalog.subscribe()
    }

    /// The best worker for the work, `tried` ones last. Waits while none is able: the caller bounds the time.
    pub async fn lease(&self, want: &Want, size: impl Into<Size>, tried: &[WorkerId]) -> Lease {
        let size = size.into();
        let mut changes = self.changes();
        loop {
            let catalog = changes.borrow_and_update().clone();
            if let Some((worker, given)) = self.shared.choose(&catalog, want, &size, tried) {
                return Lease::new(Arc::clone(&self.shared), worker, given);
            }
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    /// When an item of so many bytes would be encoded if it were asked for now; `None` if no encoder is able, or one
    /// that is has not measured what it takes.
    pub fn forecast(&self, want: &Want, bytes: u64) -> Option<Forecast> {
        self.shared.forecast(&self.catalog(), want, bytes)
    }

    /// Refuses an item that would be encoded later than its deadline, or than what clients are promised. To be asked
    /// before the first attempt at a job: what was begun is brought to its end.
    ///
    /// # Errors
    /// Overloaded, with a pause.
    pub fn admit(&self, want: &Want, bytes: u64, deadline: Instant) -> Result<(), Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = self.shared.encode_slo.map_or(left, |slo| slo.min(left));
        in_time(self.forecast(want, bytes), left).inspect_err(|_| self.shared.meters.refused("encode"))
    }

    /// PD workers that hold an encoder output, and take work.
    pub fn holders(&self, key: &ContentKey) -> Vec<WorkerId> {
        let catalog = self.catalog();
        let pds = catalog.workers.iter().filter(|w| w.role == Role::Pd && w.health.takes_work());
        let workers = self.shared.workers();
        let holds = |id: &WorkerId| workers.get(id).is_some_and(|w| w.view().resident.contains(key));
        pds.map(|w| &w.id).filter(|id| holds(id)).cloned().collect()
    }
}

impl Shared {
    fn workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Arc<Worker>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the members those of the set; returns the new ones, which need a task.
    fn follow(&self, present: &EndpointSet) -> Vec<Arc<Worker>> {
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
                models: Vec::new(),
            }));
            catalog.workers.sort_by(|a, b| a.id.cmp(&b.id));
        });
        new
    }

    fn meet(&self, endpoint: &Endpoint) -> Option<Arc<Worker>> {
        match Worker::new(endpoint.clone(), self.dialer.clone()) {
            Ok(worker) => Some(Arc::new(worker)),
            Err(e) => {
                tracing::warn!(address = endpoint.address, error = %e, "discovery names what is no address");
                None
            }
        }
    }

    fn set_up(&self, worker: &Worker, description: task::Description) {
        let health = {
            let mut view = worker.view();
            view.is_up = true;
            view.health()
        };
        let encodes = worker.role() == Role::Pd && description.encodes;
        self.change(worker, |known| {
            *known = Known { health, encodes, models: description.models, ..known.clone() };
        });
    }

    fn set_down(&self, worker: &Worker) {
        worker.view().go_down();
        self.refresh(worker);
    }

    fn report(&self, worker: &Worker, state: v1::WorkerState, first: bool) {
        worker.view().take_report(state, first, Instant::now().into_std());
        self.refresh(worker);
    }

    fn end_reports(&self, worker: &Worker) {
        worker.view().end_reports();
        self.refresh(worker);
    }

    /// Puts the worker's health into the catalog.
    fn refresh(&self, worker: &Worker) {
        let health = worker.view().health();
        self.change(worker, |known| known.health = health);
    }

    /// Changes what is known of one worker, if it still belongs to the fleet.
    fn change(&self, worker: &Worker, change: impl FnOnce(&mut Known)) {
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
    fn change_catalog(&self, change: impl FnOnce(&mut Catalog)) {
        let mut new_disagreements = BTreeSet::new();
        self.catalog.send_if_modified(|current| {
            let mut next = Catalog::clone(current);
            change(&mut next);
            let changed = next != **current;
            if changed {
                new_disagreements = &next.disagreements() - &current.disagreements();
                self.meters.catalog(&next);
                *current = Arc::new(next);
            }
            changed
        });
        for d in new_disagreements {
            tracing::error!(
                model = %d.model,
                modality = %d.modality,
                encoder = %d.encoder.0,
                encoder_fingerprint = %d.encoder.1,
                pd = %d.pd.0,
                pd_fingerprint = %d.pd.1,
                "encoder and PD worker serve different encoders under one name; the pair is refused"
            );
        }
    }
}

/// Ejection: what one worker's outcomes mean, seen beside the others'.
impl Shared {
    fn count(&self, worker: &Worker, outcome: Outcome) {
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
    fn eject(&self, worker: &Worker, cause: outlier::Cause, now: Instant) {
        if cause != outlier::Cause::Probe && !self.may_eject(&worker.id) {
            return;
        }
        let time = worker.view().outlier.eject(now);
        self.meters.ejected(worker.role(), cause);
        tracing::warn!(worker = %worker.id, cause = cause.as_str(), ?time, "worker ejected");
        self.refresh(worker);
        // Its task waits for the end of this time.
        worker.ask_again.notify_one();
    }

    /// Whether, of those that serve each of its models, at most half would be ejected with it.
    fn may_eject(&self, id: &WorkerId) -> bool {
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
    fn compare_rates(&self, now: Instant) {
        let workers: Vec<_> = self.workers().values().cloned().collect();
        for role in Role::ALL {
            let of_role = workers.iter().filter(|w| w.role() == role);
            let rated = of_role.filter_map(|w| Some((w, w.view().outlier.end_interval()?)));
            let (rated, rates): (Vec<_>, Vec<_>) = rated.unzip();
            for i in outliers(&rates) {
                if let Some(worker) = rated.get(i).filter(|w| w.view().outlier.circuit() == Circuit::Closed) {
                    self.eject(worker, outlier::Cause::SuccessRate, now);
                }
            }
        }
    }

    /// Until the worker's ejection ends, if it is ejected.
    fn until_probe(&self, worker: &Worker, now: Instant) -> Option<Duration> {
        match worker.view().outlier.circuit() {
            Circuit::Open { until } => Some(until.saturating_duration_since(now)),
            _ => None,
        }
    }

    fn half_open(&self, worker: &Worker, now: Instant) {
        let is_over = worker.view().outlier.half_open(now);
        if is_over {
            tracing::info!(worker = %worker.id, "worker may show what it can do");
            self.refresh(worker);
        }
    }

    /// A probe ended without an outcome: the next piece of work is one.
    fn end_probe(&self, worker: &Worker) {
        let free_again = worker.view().outlier.give_back_probe();
        if free_again {
            // Nothing in the catalog changes, and whoever waits for a worker has to look again.
            self.catalog.send_modify(|_| {});
        }
    }
}

#[cfg(test)]
mod tests;
