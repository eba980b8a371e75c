//! Items and their encoder outputs: each is looked for before it is made, and made once for all who need it.
//!
//! Read from the cheapest to the dearest: an output that was READY a moment ago ([`recents`]), one that a PD worker
//! still holds, one that the store has (asked once for all items of a request), one that another request of this proxy
//! is having made ([`triptych_runtime::single_flight`]), one that another proxy is ([`lease`]), and at last a job of its own,
//! down the [`ladder`]. What a request sees of it is a [`Flight`].

mod attempt;
mod errand;
mod flight;
mod ladder;
mod lease;
mod meters;
pub mod pace;
mod policy;
pub mod recents;

pub use flight::{Announced, Flight};
pub use policy::EncodePolicy;

use crate::auth::Account;
use crate::budget::RetryBudget;
use crate::cache::{EncoderCache, Wanted};
use crate::fleet::Fleet;
use crate::fleet::catalog::Want;
use crate::fleet::home::Home;
use bytes::Bytes;
use flight::{Due, Progress, Teller};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use lease::Leases;
use meters::EncodeMeters;
use pace::Pace;
use recents::Recents;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{ContentKey, EncodedItem, Failure, ItemOptions, ModelName, RequestId, WorkerId};
use triptych_runtime::single_flight::{CallRole, SingleFlight};
use triptych_runtime::{Drain, MetricsRegistry};

/// Times a job is sent before it is given up.
pub const ATTEMPTS: u32 = 5;
/// How long a request waits for a worker to be there at all: long enough for a restart.
pub const WORKER_WAIT: Duration = Duration::from_secs(30);
/// Items of failed requests that may go on to READY at once.
const LEFT_BEHIND: usize = 64;

/// Workers of which it is remembered where they serve what they made.
const MAX_PEERS: usize = 1024;

/// An item to be encoded.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request that asks.
    pub request_id: RequestId,
    /// Its model.
    pub model: ModelName,
    /// The output.
    pub wanted: Wanted,
    /// The item.
    pub bytes: Bytes,
    /// What is asked of its processing; in the key.
    pub options: ItemOptions,
    /// When the request's answer is due.
    pub deadline: Instant,
    /// Whose it is: what has to be encoded counts there.
    pub account: Arc<Account>,
    /// The PD worker that should encode it, where PD workers do.
    pub home: Option<Arc<Home>>,
}

impl Job {
    /// Who can do it.
    pub fn encoder(&self) -> Want {
        let Self { model, wanted, .. } = self;
        Want::Encoder { model: model.clone(), modality: wanted.modality, fingerprint: wanted.fingerprint }
    }
}

/// An item whose encoder output is READY.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// The output.
    pub item: EncodedItem,
    /// Where it came from, seen from one request.
    pub source: ItemSource,
    /// Queue, encode and publish.
    pub times: StageTimes,
    /// `host:port` of `EcObjects` services that hold it in memory, the best first.
    pub peers: Vec<String>,
    /// PD workers that hold it, where nobody else is known to: the request should go to one of them. Empty: to any.
    pub holders: Vec<WorkerId>,
    /// Why it is believed to be there.
    belief: Belief,
    /// Since when.
    at: Instant,
}

impl Encoded {
    fn cached(item: EncodedItem, belief: Belief) -> Self {
        let (times, peers, holders) = (StageTimes::default(), Vec::new(), Vec::new());
        Self { item, source: ItemSource::Cached, times, peers, holders, belief, at: Instant::now() }
    }

    /// What a PD worker is told of it.
    pub fn announced(&self) -> Announced {
        Announced { item: self.item.clone(), peers: self.peers.clone(), pending: false }
    }
}

/// Why an output is believed to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Belief {
    /// It was READY a moment ago.
    Remembered,
    /// A PD worker said that it holds it.
    Resident,
    /// The store says so.
    Stored,
    /// An encoder made it.
    Made,
}

/// The outcome of a flight.
type Outcome = Result<Encoded, Failure>;

/// What the store said about the items of a request; asked when the first of its flights needs it.
type Probe = Shared<BoxFuture<'static, Arc<Vec<Option<EncodedItem>>>>>;

/// Whether the store may answer for the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    /// It may.
    Any,
    /// Its object was found missing or corrupt: encode.
    Fresh,
}

/// Encodes items, each once for all the requests that need it at the same moment.
#[derive(Clone)]
pub struct Encodes {
    parts: Arc<Parts>,
    flights: SingleFlight<(ContentKey, Origin), Progress>,
    left_behind: Arc<Semaphore>,
    drain: Drain,
}

/// What flights work with.
struct Parts {
    fleet: Arc<Fleet>,
    cache: EncoderCache,
    leases: Leases,
    recents: Recents,
    pace: Pace,
    budget: Arc<RetryBudget>,
    policy: EncodePolicy,
    meters: EncodeMeters,
    /// Where each encoder serves what it made, as it said with its latest answer.
    peers: Mutex<HashMap<WorkerId, Vec<String>>>,
}

/// What [`Encodes`] are made of.
pub struct EncodeParts<'a> {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The store.
    pub cache: EncoderCache,
    /// How it is done.
    pub policy: EncodePolicy,
    /// Pays for whatever is sent twice.
    pub budget: Arc<RetryBudget>,
    /// Waits for what goes on behind requests.
    pub drain: &'a Drain,
    /// Where it is counted.
    pub metrics: &'a MetricsRegistry,
}

impl Encodes {
    /// Encodes on the workers of a fleet what its store does not hold. Must be called inside a tokio runtime.
    pub fn new(parts: EncodeParts<'_>) -> Self {
        let EncodeParts { fleet, cache, policy, budget, drain, metrics } = parts;
        let meters = EncodeMeters::new(metrics);
        let leases = Leases {
            cache: cache.clone(),
            tasks: drain.tasks().clone(),
            runtime: Handle::current(),
            count: meters.leases(),
        };
        let recents = Recents::new(policy.remembered, policy.believed_for);
        let (pace, peers) = (Pace::default(), Mutex::default());
        let parts = Parts { fleet, cache, leases, recents, pace, budget, policy, meters, peers };
        let flights = SingleFlight::new(drain.tasks().clone());
        let left_behind = Arc::new(Semaphore::new(LEFT_BEHIND));
        Self { parts: Arc::new(parts), flights, left_behind, drain: drain.clone() }
    }

    /// Looks for the outputs of the items or has them made, all at once; a flight for each, in their order. The store
    /// is asked once for all of them, inside the flights: so a second request either joins the first one's flight or
    /// asks the store after it.
    pub fn begin(&self, jobs: &[Job]) -> Vec<Flight> {
        let known = self.known(jobs);
        let wanted: Vec<_> = jobs.iter().map(|job| job.wanted).collect();
        let cache = self.parts.cache.clone();
        // SingleFlight that are joined leave their place in it unused.
        let probe: Probe = async move { Arc::new(cache.probe(&wanted).await) }.boxed().shared();
        let flights = jobs.iter().zip(known).enumerate();
        let flight = |(i, (job, known)): (usize, (&Job, Option<Encoded>))| match known {
            Some(encoded) => Flight::landed(job, encoded),
            None => {
                let probe = probe.clone();
                let found = async move { probe.await.get(i).cloned().flatten() };
                self.board(job, Origin::Any, found.boxed())
            }
        };
        flights.map(flight).collect()
    }

    /// Has the flights of a request that failed go on to their ends, as far as there is room for such.
    pub fn leave_behind(&self, flights: impl IntoIterator<Item = Flight>) {
        for flight in flights.into_iter().filter(|flight| !flight.has_ended()) {
            let Ok(room) = Arc::clone(&self.left_behind).try_acquire_owned() else { return };
            let drain = self.drain.clone();
            flight.detach_until(async move {
                drain.stopping().await;
                drop(room);
            });
        }
    }

    /// Makes the output of an item again which a PD worker did not find, or found corrupt; `lost` is what the request
    /// believed of it.
    pub fn begin_again(&self, job: &Job, lost: &Encoded) -> Flight {
        if let Some((item, peers)) = self.parts.recents.renewed(&job.wanted.key, lost.at.into_std()) {
            let encoded = Encoded { peers, ..Encoded::cached(item, Belief::Remembered) };
            return Flight::landed(job, Encoded { source: ItemSource::Shared, ..encoded });
        }
        match lost.belief {
            // The store was not asked: it may have it.
            Belief::Remembered | Belief::Resident => {
                let (cache, wanted) = (self.parts.cache.clone(), job.wanted);
                let found = async move { cache.probe(&[wanted]).await.pop().flatten() };
                self.board(job, Origin::Any, found.boxed())
            }
            Belief::Stored | Belief::Made => self.board(job, Origin::Fresh, async { None }.boxed()),
        }
    }

    /// What needs no question to the store: outputs that were READY a moment ago, and those of which a PD worker holds
    /// as many of the others as any does.
    fn known(&self, jobs: &[Job]) -> Vec<Option<Encoded>> {
        let now = Instant::now().into_std();
        let young = |job: &Job| {
            let (item, peers) = self.parts.recents.young(&job.wanted.key, now)?;
            Some(Encoded { peers, ..Encoded::cached(item, Belief::Remembered) })
        };
        let mut known: Vec<_> = jobs.iter().map(young).collect();
        let held: Vec<_> = jobs
            .iter()
            .zip(&known)
            .map(|(job, known)| match known {
                Some(_) => Held::default(),
                None => self.held(&job.wanted.key),
            })
            .collect();
        let all: Vec<_> = held.iter().map(|one| one.by.as_slice()).collect();
        let Some(best) = holder_of_most(&all) else { return known };
        for (known, held) in known.iter_mut().zip(held) {
            if let Some(item) = held.item.filter(|_| held.by.contains(&best)) {
                let holders = vec![best.clone()];
                *known = Some(Encoded { holders, ..Encoded::cached(item, Belief::Resident) });
            }
        }
        known
    }

    /// The output, if it is known what it is, and the PD workers that say they hold it.
    fn held(&self, key: &ContentKey) -> Held {
        match self.parts.recents.described(key) {
            Some(item) => Held { item: Some(item), by: self.parts.fleet.holders(key) },
            None => Held::default(),
        }
    }

    fn board(&self, job: &Job, origin: Origin, found: BoxFuture<'static, Option<EncodedItem>>) -> Flight {
        let due = Due::new(job.deadline);
        let initial = Progress { announced: None, outcome: None, due: due.clone() };
        let (seat, boarding) = self.flights.subscribe((job.wanted.key, origin), initial, |state| {
            let teller = Teller(Arc::new(state));
            let errand = errand::Errand {
                parts: Arc::clone(&self.parts),
                job: job.clone(),
                origin,
                teller: teller.clone(),
                due,
            };
            async move { teller.end(errand.run(found).await) }
        });
        if boarding == CallRole::Follower {
            seat.now().due.extend(job.deadline);
            self.parts.meters.shared();
        }
        Flight::flying(job, seat, boarding)
    }
}

impl Parts {
    fn peers_of(&self, worker: &WorkerId) -> Vec<String> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).get(worker).cloned().unwrap_or_default()
    }

    fn note_peers(&self, worker: &WorkerId, peers: &[String]) {
        let mut known = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if known.get(worker).map(Vec::as_slice) != Some(peers) {
            if known.len() >= MAX_PEERS {
                // Workers come and go under new names; what is forgotten is said again with the next answer.
                known.clear();
            }
            known.insert(worker.clone(), peers.to_vec());
        }
    }
}

/// An output that PD workers hold.
#[derive(Debug, Default)]
struct Held {
    item: Option<EncodedItem>,
    by: Vec<WorkerId>,
}

/// The worker that holds most of the outputs, each of which has a list of holders; the first by name if several do.
pub fn holder_of_most(held: &[&[WorkerId]]) -> Option<WorkerId> {
    let mut n_held: BTreeMap<&WorkerId, usize> = BTreeMap::new();
    for holder in held.iter().copied().flatten() {
        *n_held.entry(holder).or_default() += 1;
    }
    // Of equals `max_by_key` takes the last.
    n_held.into_iter().rev().max_by_key(|(_, n)| *n).map(|(id, _)| id.clone())
}

/// The pause after an attempt.
pub fn backoff(attempt: u32) -> Duration {
    Duration::from_millis(50 << attempt.saturating_sub(1).min(4))
}

#[cfg(test)]
mod tests;
