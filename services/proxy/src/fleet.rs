//! The workers: who is there, what they serve, how busy they are, and who gets the next piece of work.
//!
//! Discovery says who belongs to the fleet ([`members`]); one task per worker asks it to describe itself and watches it
//! ([`task`]); what they say becomes one [`Catalog`], which changes as a whole. A piece of work takes a [`Lease`] on the
//! worker that [`score`] chooses of those that are able, and waits while there is none. Those that fail much more than
//! others are left alone for a while ([`outlier`]). A worker that restarts at its address is found again by its task;
//! one that leaves discovery gets nothing new, and is forgotten when its last work has ended.

pub mod catalog;
mod choice;
mod description;
pub mod elastic;
mod foreign;
mod pairing;
pub mod placement;
mod lease;
mod members;
mod meters;
pub mod outlier;
pub mod prefix;
pub mod reservation;
pub mod roles;
pub mod score;
pub mod size;
mod state;
mod status;
mod task;
pub mod view;
mod worker;

pub use lease::Lease;
pub use outlier::Origin;
pub use prefix::Prefixes;
pub use size::{Forecast, Size};
pub use status::{RoleError, WorkerStatus};

use crate::admission::in_time;
use crate::config::ProxyError;
use crate::request_machine::deaths::{Deaths, RequestFingerprint, Trial, Verdict};
use crate::request_machine::policy::IDLE_WAIT;
use catalog::{Catalog, Want};
use choice::now;
use meters::FleetMeters;
use parking_lot::{Mutex, MutexGuard};
use rand::SeedableRng;
use rand::rngs::StdRng;
use roles::Roles;
use state::FleetState;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use triptych_core::{ContentKey, Failure, ModelName, RequestId, WorkerId};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::discovery::fixed::Fixed;
use triptych_runtime::discovery::{Discovery, Role, Source};
use triptych_runtime::grpc::Dialer;

/// Between two looks for a worker that has nothing to do.
const IDLE_PAUSE: Duration = Duration::from_millis(20);

/// Settings of a fleet.
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
    /// The longest wait of an item for its encode to end; `None`: until its deadline.
    pub encode_slo: Option<Duration>,
    /// Division of encodes among the workers.
    pub roles: Roles,
}

/// All workers. Dropping it ends their tasks.
pub struct Fleet {
    shared: Arc<FleetState>,
    _members: JoinSet<()>,
}

impl Fleet {
    /// Starts asking. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ProxyError`] if there is no PD worker and never can be, or an address is not one.
    pub fn start(settings: FleetSettings, metrics: &MetricsRegistry) -> Result<Self, ProxyError> {
        let FleetSettings { encoders, pds, mut discovery, dialer, seed, encode_slo, roles } = settings;
        if pds.is_empty() && !discovery.iter().any(|source| source.is_dynamic()) {
            return Err(ProxyError::NoPdWorker);
        }
        for address in encoders.iter().chain(&pds) {
            let wrong = |source| ProxyError::WorkerAddress { address: address.clone(), source };
            dialer.dial(address).map_err(wrong)?;
        }
        discovery.push(Box::new(Fixed::new(Role::Encoder, encoders)));
        discovery.push(Box::new(Fixed::new(Role::Pd, pds)));
        let shared = Arc::new(FleetState {
            workers: Mutex::default(),
            catalog: watch::Sender::default(),
            prefixes: Mutex::default(),
            rng: Mutex::new(StdRng::seed_from_u64(seed.unwrap_or_else(rand::random))),
            deaths: Mutex::new(Deaths::new(rand::random())),
            dialer,
            encode_slo: Mutex::new(encode_slo),
            roles,
            work: Mutex::default(),
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

    /// A worker that has nothing else to do, and is given nothing else before the lease is dropped or says so. Waits while
    /// there is none: the caller bounds the time.
    pub async fn lease_idle(&self, want: &Want, size: impl Into<Size>, tried: &[WorkerId]) -> Lease {
        let size = size.into();
        let mut changes = self.changes();
        loop {
            let catalog = changes.borrow_and_update().clone();
            if let Some((worker, given)) = self.shared.choose_idle(&catalog, want, &size, tried) {
                return Lease::new(Arc::clone(&self.shared), worker, given);
            }
            tokio::select! {
                // One that comes back has nothing to do.
                _ = changes.changed() => {}
                () = sleep(IDLE_PAUSE) => {}
            }
        }
    }

    /// Verdict on work that workers may have died of.
    pub fn verdict(&self, fingerprint: &RequestFingerprint) -> Verdict {
        self.deaths().verdict(fingerprint, now())
    }

    /// As [`Self::lease`], of work that workers may have died of, and the request that asks for it: alone if they did.
    /// Work that is refused is leased too: its sender asks again, and ends the trial.
    pub async fn lease_by_verdict(
        &self,
        want: &Want,
        size: Size,
        tried: &[WorkerId],
        (fingerprint, owner): (RequestFingerprint, RequestId),
    ) -> Lease {
        let begin = |how| self.deaths().begin_trial(fingerprint, owner, how, now());
        let mut idle_until = None;
        loop {
            match self.verdict(&fingerprint) {
                Verdict::Free | Verdict::Refused => return self.lease(want, size, tried).await,
                Verdict::Alone => {
                    let until = *idle_until.get_or_insert_with(|| Instant::now() + IDLE_WAIT);
                    if Instant::now() < until {
                        begin(Trial::Alone);
                        let idle = self.lease_idle(want, size.clone(), tried);
                        if let Ok(lease) = timeout_at(until, idle).await {
                            return lease;
                        }
                        self.deaths().end_trial(&fingerprint, owner);
                    } else if begin(Trial::Beside) {
                        return self.lease(want, size, tried).await;
                    } else {
                        sleep(IDLE_PAUSE).await;
                    }
                }
                Verdict::Later | Verdict::Unsettled => sleep(IDLE_PAUSE).await,
            }
        }
    }

    /// Deaths of workers, and who was there.
    pub fn deaths(&self) -> MutexGuard<'_, Deaths> {
        self.shared.deaths()
    }

    /// Time at which an item of so many bytes would be encoded if it were asked for now; `None` if no encoder is able, or one
    /// that is has not measured what it takes.
    pub fn forecast(&self, want: &Want, bytes: u64) -> Option<Forecast> {
        self.shared.forecast(&self.catalog(), want, bytes)
    }

    /// Refuses an item that would be encoded later than its deadline, or than its SLO allows. To be asked
    /// before the first attempt at a job: what was begun is brought to its end.
    ///
    /// # Errors
    /// Overloaded, with a pause.
    pub fn admit(&self, want: &Want, bytes: u64, deadline: Instant) -> Result<(), Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = self.encode_slo().map_or(left, |slo| slo.min(left));
        in_time(self.forecast(want, bytes), left).inspect_err(|_| self.shared.meters.refused("encode"))
    }

    /// Connections to the PD workers that serve a model, adapters of it included, and are not down.
    pub fn decoders_of(&self, model: &ModelName) -> Vec<(WorkerId, Channel)> {
        self.workers_of(model, |known| known.role == Role::Pd)
    }

    /// Connections to the workers that hold the encoders of a model, or of an adapter, and are not down.
    pub fn encoders_of(&self, model: &ModelName) -> Vec<(WorkerId, Channel)> {
        self.workers_of(model, catalog::Known::is_encoder)
    }

    fn workers_of(
        &self,
        model: &ModelName,
        is_one: impl Fn(&catalog::Known) -> bool,
    ) -> Vec<(WorkerId, Channel)> {
        let catalog = self.catalog();
        let serves = |known: &&catalog::Known| {
            let is_up = known.health != catalog::Health::Down;
            is_up && is_one(known) && known.models.iter().any(|served| served.name == *model)
        };
        let workers = self.shared.workers();
        let found = catalog.workers.iter().filter(serves);
        found.filter_map(|known| Some((known.id.clone(), workers.get(&known.id)?.channel()))).collect()
    }

    /// Connection to a worker.
    pub fn channel_of(&self, worker: &WorkerId) -> Option<Channel> {
        Some(self.shared.workers().get(worker)?.channel())
    }

    /// Connections to all workers that are not down, in the order of their names; encoder workers first.
    pub fn all_up(&self) -> Vec<(WorkerId, Role, Channel)> {
        let (catalog, workers) = (self.catalog(), self.shared.workers());
        let up = catalog.workers.iter().filter(|known| known.health != catalog::Health::Down);
        let channel =
            |known: &catalog::Known| Some((known.id.clone(), known.role, workers.get(&known.id)?.channel()));
        let mut all: Vec<_> = up.filter_map(channel).collect();
        all.sort_by_key(|(_, role, _)| *role != Role::Encoder);
        all
    }

    /// Asks a worker at once what it serves.
    pub fn ask_again(&self, worker: &WorkerId) {
        if let Some(worker) = self.shared.workers().get(worker) {
            worker.ask_again.notify_one();
        }
    }

    /// PD workers that hold an encoder output, take work, and have little more of it than others: beyond that they would be
    /// slower than a worker that loads it ([`score::is_within_bound`]).
    pub fn holders(&self, key: &ContentKey) -> Vec<WorkerId> {
        let catalog = self.catalog();
        let pds = catalog.workers.iter().filter(|w| w.role == Role::Pd && w.health.takes_work());
        let workers = self.shared.workers();
        let (mut all, mut n, mut holders) = (0_u64, 0, Vec::new());
        for (id, worker) in pds.filter_map(|w| Some((&w.id, workers.get(&w.id)?))) {
            let view = worker.view();
            let own = view.n_requests();
            (all, n) = (all.saturating_add(own), n + 1);
            if view.resident.contains(key) {
                holders.push((id.clone(), own));
            }
        }
        let near = holders.into_iter().filter(|(_, own)| score::is_within_bound(*own, (all, n)));
        near.map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests;
