//! Items and their encoder outputs: each is looked for before it is made, and made once for all who need it.
//!
//! The steps are decided by [`crate::request_machine::encodes`]; a task for each in-flight encode carries it out
//! ([`driver`]). A request sees an encode as a [`Subscription`].

mod attempt;
mod driver;
pub mod job;
mod lease;
mod meters;
mod parts;
mod progress;
mod subscription;

pub use subscription::Subscription;

use crate::budget::RetryBudget;
use crate::cache::EncoderCache;
use crate::fleet::Fleet;
use crate::request_machine::encode::EncodeTarget;
use crate::request_machine::encodes::{self, Leave, Renewal, Subscribed};
use crate::request_machine::output::{Encoded, Origin};
use crate::request_machine::policy::EncodePolicy;
use driver::{Driver, Probe};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use job::EncodeJob;
use lease::Leases;
use meters::EncodeMeters;
use parking_lot::Mutex;
use parts::{EncodeTask, InFlight, Parts, now};
use progress::Progress;
use std::collections::HashMap;
use std::sync::Arc;
use subscription::Interest;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use triptych_core::EncodedItem;
use triptych_runtime::{Drain, MetricsRegistry};

/// The store's answer about the items of a request; asked when the first of its encodes needs it.
type SharedProbe = Shared<BoxFuture<'static, Arc<Vec<Option<EncodedItem>>>>>;

/// Encodes items, each once for all the requests that need it at the same moment.
#[derive(Clone)]
pub struct Encodes {
    parts: Arc<Parts>,
    tasks: TaskTracker,
}

/// Parts of [`Encodes`].
pub struct EncodeParts<'a> {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The store.
    pub cache: EncoderCache,
    /// Rules.
    pub policy: EncodePolicy,
    /// Pays for whatever is sent twice.
    pub budget: Arc<RetryBudget>,
    /// Waits for what goes on behind requests.
    pub drain: &'a Drain,
    /// Counters.
    pub metrics: &'a MetricsRegistry,
}

impl Encodes {
    /// Encodes on the workers of a fleet what its store does not hold. Must be called inside a tokio runtime.
    pub fn new(parts: EncodeParts<'_>) -> Self {
        let EncodeParts { fleet, cache, policy, budget, drain, metrics } = parts;
        let meters = EncodeMeters::new(metrics);
        let tasks = drain.tasks().clone();
        let leases = Leases {
            cache: cache.clone(),
            tasks: tasks.clone(),
            runtime: Handle::current(),
            count: meters.leases(),
        };
        let in_flight = InFlight { encodes: encodes::Encodes::new(policy), tasks: HashMap::new() };
        let in_flight = Mutex::new(in_flight);
        let parts =
            Arc::new(Parts { fleet, cache, leases, budget, meters, in_flight, peers: Mutex::default() });
        let (stopping, left) = (drain.clone(), Arc::downgrade(&parts));
        tasks.spawn(async move {
            stopping.stopping().await;
            if let Some(parts) = left.upgrade() {
                parts.stop_left_behind();
            }
        });
        Self { parts, tasks }
    }

    /// Looks for the outputs of the items or has them made, all at once; a subscription for each, in their order. The
    /// store is asked once for all of them, inside the encodes: so a second request either joins the first one's encode
    /// or asks the store after it.
    pub fn begin(&self, jobs: &[EncodeJob]) -> Vec<Subscription> {
        let keys: Vec<_> = jobs.iter().map(|job| job.wanted.key).collect();
        let holders = |key: &_| self.parts.fleet.holders(key);
        let known = self.parts.in_flight().encodes.known(&keys, holders, now());
        let wanted: Vec<_> = jobs.iter().map(|job| job.wanted).collect();
        let cache = self.parts.cache.clone();
        // Encodes that are joined leave their place in it unused.
        let probe: SharedProbe = async move { Arc::new(cache.probe(&wanted).await) }.boxed().shared();
        let one = |(i, (job, known)): (usize, (&EncodeJob, Option<Encoded>))| match known {
            Some(encoded) => Subscription::ready_now(encoded),
            None => {
                let probe = probe.clone();
                let found = async move { probe.await.get(i).cloned().flatten() };
                self.subscribe(job, job.origin(Origin::Any), Some(found.boxed()))
            }
        };
        jobs.iter().zip(known).enumerate().map(one).collect()
    }

    /// Makes the output of an item again which a PD worker did not find, or found corrupt; `lost` is what the request
    /// believed of it.
    pub fn begin_again(&self, job: &EncodeJob, lost: &Encoded) -> Subscription {
        let renewal = self.parts.in_flight().encodes.renewal(lost, now());
        match renewal {
            Renewal::Ready(encoded) => Subscription::ready_now(*encoded),
            Renewal::Encode(origin) => self.subscribe(job, job.origin(origin), None),
        }
    }

    fn subscribe(&self, job: &EncodeJob, origin: Origin, first_probe: Option<Probe>) -> Subscription {
        let (model, tower_name) = (job.model.clone(), Arc::clone(&job.tower_name));
        let target = EncodeTarget { model, wanted: job.wanted, tower_name, origin };
        let due = job.deadline.into_std();
        let parts = Arc::clone(&self.parts);
        let mut in_flight = self.parts.in_flight();
        let subscribed = in_flight.encodes.subscribe(target, due, &mut self.parts.budget.window(), now());
        let Subscribed { id, begun } = subscribed;
        let joined = begun.is_none();
        let progress = match (begun, in_flight.tasks.get(&id)) {
            (None, Some(task)) => task.progress.clone(),
            (begun, _) => {
                let (sender, progress) = watch::channel(Progress::default());
                let driver = Driver::new(Arc::clone(&parts), id, job.clone(), sender, first_probe);
                let work = driver.run(begun.unwrap_or_default());
                let span = tracing::info_span!("item", key = ?job.wanted.key);
                let task = self.tasks.spawn(work.instrument(span)).abort_handle();
                in_flight.tasks.insert(id, EncodeTask { progress: progress.clone(), task });
                progress
            }
        };
        drop(in_flight);
        if joined {
            self.parts.meters.shared();
        }
        Subscription::in_flight(Interest { parts, id, progress, joined, leave: Leave::GiveUp })
    }
}
