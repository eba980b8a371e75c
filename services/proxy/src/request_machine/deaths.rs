//! Deaths of workers, by the requests that each had: which request is sent again at once, which alone, which never.
//!
//! A query of death kills the worker that takes it, and every worker that it is sent to next. Many requests die with
//! it, and all but one of them are innocent, so a death tells little of each: a request counts as a suspect of it if it
//! had not begun to answer, or, if all had, like all others. What a worker was starting when it died is known for
//! certain once its successor reports it; then nobody else is a suspect of that death. A suspect of two deaths, or the
//! only one of a reported death, is sent again alone, to a worker that has nothing else, and speaks for the others that
//! died with it: they are suspects no more. One that kills that worker too is refused for as long as the death is
//! remembered. Where no worker is idle for a while, it is sent like any other, since it may be innocent; a suspect of
//! three deaths is refused. An answer clears its request.
//!
//! Requests are told apart by a keyed hash of what they ask for, so that one that is sent again by its client under
//! another id is the same. The key is this process's own and leaves it nowhere.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};
use triptych_core::{RequestId, WorkerId};

/// Time for which a death is remembered.
pub const REMEMBERED: Duration = Duration::from_secs(600);
/// The longest time for which others wait for the end of a request that is tried alone.
pub const TRIAL: Duration = Duration::from_secs(30);
/// The longest wait of a request for the news whether its worker died; a connection that is refused says so in no time.
pub const SETTLED: Duration = Duration::from_millis(500);
/// Deaths that are remembered; the oldest is forgotten first.
const MAX_DEATHS: usize = 64;
/// Requests that are remembered of one death.
const MAX_ABOARD: usize = 4096;
/// Requests that are tried alone at the same time.
const MAX_TRIALS: usize = 1024;
/// Deaths of which a request is a suspect before it is tried alone.
const SUSPICIONS: u32 = 2;
/// Deaths of which a request is a suspect before it is refused without having been tried alone.
const CONVICTIONS: u32 = 3;

/// Keyed hash of what a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestFingerprint([u8; 32]);

impl RequestFingerprint {
    /// Of a hash.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The hash.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Stage of a request when its worker went away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It had not begun to answer there.
    Starting,
    /// It was being answered.
    Answering,
    /// It was tried alone.
    Alone,
}

/// A request that a worker had when it went away.
#[derive(Clone, Copy, Debug)]
pub struct Aboard {
    /// Its id.
    pub request: RequestId,
    /// Hash of what it asks for.
    pub fingerprint: RequestFingerprint,
    /// Its stage.
    pub stage: Stage,
}

/// Verdict on a request: where it may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Any worker may have it.
    Free,
    /// A worker that has nothing else may have it.
    Alone,
    /// The same is being tried alone; its end is waited for.
    Later,
    /// It is about to be known whether the worker died that had it.
    Unsettled,
    /// It is refused.
    Refused,
}

/// The process that answers at a worker's address, compared with the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The same process.
    Same,
    /// Another one.
    Other,
    /// It does not say.
    Unknown,
}

/// The deaths that are remembered.
#[derive(Debug)]
pub struct Deaths {
    /// Key of the fingerprints.
    key: [u8; 32],
    /// Calls that broke, of workers whose state is not known yet.
    open: HashMap<WorkerId, Death>,
    /// The oldest first.
    closed: VecDeque<Death>,
    /// Requests that are tried alone, and the time until which that is waited for.
    trials: HashMap<RequestFingerprint, Instant>,
}

#[derive(Debug)]
struct Death {
    at: Instant,
    /// True if the worker is known to have died, and not only the connection to it.
    is_certain: bool,
    aboard: HashMap<RequestFingerprint, Stage>,
    ids: HashMap<RequestId, RequestFingerprint>,
    /// The requests that the worker was starting, as its successor reported; `None`: not reported.
    reported: Option<HashSet<RequestFingerprint>>,
    /// Requests of it that are tried only alone: they explain it.
    isolated: HashSet<RequestFingerprint>,
}

impl Death {
    fn new(at: Instant) -> Self {
        let (aboard, ids, isolated) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { at, is_certain: false, aboard, ids, reported: None, isolated }
    }

    /// Weight against a request: [`SUSPICIONS`] are enough.
    fn suspicion(&self, fingerprint: &RequestFingerprint) -> u32 {
        let Some(stage) = self.aboard.get(fingerprint) else { return 0 };
        let is_starting = |stage: &Stage| *stage != Stage::Answering;
        match (&self.reported, stage) {
            (_, Stage::Alone) => SUSPICIONS,
            _ if !self.isolated.is_empty() && !self.isolated.contains(fingerprint) => 0,
            (Some(reported), _) if !reported.contains(fingerprint) => 0,
            (Some(reported), _) if reported.len() == 1 => SUSPICIONS,
            (Some(_), _) | (None, Stage::Starting) => 1,
            (None, Stage::Answering) => u32::from(!self.aboard.values().any(is_starting)),
        }
    }
}

impl Deaths {
    /// Without any; `key` is for [`Self::hasher`].
    pub fn new(key: [u8; 32]) -> Self {
        Self { key, open: HashMap::new(), closed: VecDeque::new(), trials: HashMap::new() }
    }

    /// Hasher of what a request asks for.
    pub fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.key)
    }

    /// The connection to a worker broke, which had this request. Tells nothing before it is known that the worker died.
    pub fn broke(&mut self, worker: &WorkerId, aboard: Aboard, now: Instant) {
        let death = self.open.entry(worker.clone()).or_insert_with(|| Death::new(now));
        if death.ids.len() >= MAX_ABOARD {
            return;
        }
        death.ids.insert(aboard.request, aboard.fingerprint);
        let stage = death.aboard.entry(aboard.fingerprint).or_insert(aboard.stage);
        if *stage == Stage::Answering {
            *stage = aboard.stage;
        }
    }

    /// Nobody listens at a worker's address any more: the process has ended.
    pub fn died(&mut self, worker: &WorkerId, now: Instant) {
        self.open.entry(worker.clone()).or_insert_with(|| Death::new(now)).is_certain = true;
    }

    /// A worker answers, and reports the requests that the process before it was starting when it ended.
    pub fn lives(&mut self, worker: &WorkerId, life: Life, starting: &[RequestId]) {
        let Some(mut death) = self.open.remove(worker) else { return };
        let is_death = match life {
            Life::Same => false,
            Life::Other => true,
            Life::Unknown => death.is_certain,
        };
        if !is_death || death.aboard.is_empty() {
            return;
        }
        death.is_certain = true;
        if !starting.is_empty() {
            death.reported = Some(starting.iter().filter_map(|id| death.ids.get(id).copied()).collect());
        }
        if self.closed.len() >= MAX_DEATHS {
            self.closed.pop_front();
        }
        self.closed.push_back(death);
    }

    /// Verdict on a request.
    pub fn verdict(&mut self, fingerprint: &RequestFingerprint, now: Instant) -> Verdict {
        self.forget(now);
        let is_young = |death: &Death| now.saturating_duration_since(death.at) < SETTLED;
        let is_unsettled = |death: &&Death| !death.is_certain && is_young(death);
        if self.open.values().filter(is_unsettled).any(|death| death.aboard.contains_key(fingerprint)) {
            return Verdict::Unsettled;
        }
        let certain = || self.open.values().chain(&self.closed).filter(|death| death.is_certain);
        let suspicion: u32 = certain().map(|death| death.suspicion(fingerprint)).sum();
        if suspicion < SUSPICIONS {
            return Verdict::Free;
        }
        let died_alone = |death: &Death| death.aboard.get(fingerprint) == Some(&Stage::Alone);
        let is_refused = suspicion >= CONVICTIONS || certain().any(died_alone);
        for death in self.open.values_mut().chain(&mut self.closed) {
            if death.suspicion(fingerprint) > 0 {
                death.isolated.insert(*fingerprint);
            }
        }
        if is_refused {
            return Verdict::Refused;
        }
        match self.trials.contains_key(fingerprint) {
            true => Verdict::Later,
            false => Verdict::Alone,
        }
    }

    /// A request is about to be tried alone.
    pub fn begin_trial(&mut self, fingerprint: RequestFingerprint, now: Instant) {
        if self.trials.len() < MAX_TRIALS {
            self.trials.insert(fingerprint, now + TRIAL);
        }
    }

    /// It is not tried alone any more.
    pub fn end_trial(&mut self, fingerprint: &RequestFingerprint) {
        self.trials.remove(fingerprint);
    }

    /// A request was answered: no worker died of it.
    pub fn answered(&mut self, fingerprint: &RequestFingerprint) {
        self.trials.remove(fingerprint);
        for death in self.open.values_mut().chain(&mut self.closed) {
            death.aboard.remove(fingerprint);
            death.isolated.remove(fingerprint);
        }
    }

    fn forget(&mut self, now: Instant) {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= REMEMBERED;
        self.open.retain(|_, death| !is_old(death.at));
        while self.closed.front().is_some_and(|death| is_old(death.at)) {
            self.closed.pop_front();
        }
        self.trials.retain(|_, until| *until > now);
    }
}
