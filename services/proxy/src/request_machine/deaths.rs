//! Deaths of workers, by the requests that each had: which request is sent again at once, which alone, which never.
//!
//! A query of death kills the worker that takes it, and every worker that it is sent to next. Many requests die with
//! it, and all but one of them are innocent, so a death tells little of each: a request is a suspect of it if it had not
//! begun to answer, or, if all had, like all others. A connection that is closed under a call is a death at once, until
//! the same process answers again: a successor may take minutes to load, and says nothing before. What a worker was
//! starting when it died is known for certain once its successor reports it; then nobody else is a suspect of that death.
//!
//! A suspect of one death waits a moment for that report and is sent on. A suspect of two, or the only one of a reported
//! death, waits longer for what is not reported yet, and is then tried alone, on a worker that has nothing else. Where no
//! worker is idle for a while, it is sent like any other, but one such suspect at a time: of those that were at the same
//! deaths, each shows for itself what it does. One that kills a worker that it has alone, or is a suspect of a third
//! death, is refused for as long as the death is remembered, and explains the deaths that it was at: the others are
//! suspects of them no more. So no request that kills at its start ends more than three workers of one proxy. A request
//! that begins to answer is cleared: what kills later than that is bounded by the attempts of a request alone, since a long
//! stream may well meet several deaths that are not its own.
//!
//! Requests are told apart by a keyed hash of what they ask for, so that one that is sent again by its client under
//! another id is the same. The key is this process's own and leaves it nowhere.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};
use triptych_core::{RequestId, WorkerId};

/// Time for which a death is remembered.
pub const REMEMBERED: Duration = Duration::from_secs(600);
/// The longest time for which others wait for the end of a request that is tried.
pub const TRIAL: Duration = Duration::from_secs(60);
/// The longest wait of a suspect of one death for the report on it. Streams that went on elsewhere have it to begin there.
pub const SETTLED: Duration = Duration::from_millis(500);
/// The longest wait of a suspect of two deaths for the reports on them: a small model is loaded by then.
pub const REPORTED: Duration = Duration::from_secs(10);
/// Deaths that are remembered; the oldest is forgotten first.
const MAX_DEATHS: usize = 64;
/// Requests that are remembered of one death.
const MAX_ABOARD: usize = 4096;
/// Requests that are tried at the same time, and suspects that are kept in mind.
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

/// The end of a call to a worker without a word of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// No connection came about: the worker never had the call.
    Unreached,
    /// Nothing came any more: the worker may live, behind a network that does not work.
    Silent,
    /// The connection was closed under it, as is that of a process that ends.
    Closed,
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
    /// It has to be tried, alone if a worker has nothing else: [`Deaths::begin_trial`].
    Alone,
    /// The same is being tried; its end is waited for.
    Later,
    /// A report on a death that it was at is waited for.
    Unsettled,
    /// It is refused.
    Refused,
}

/// The way in which a suspect is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// On a worker that has nothing else.
    Alone,
    /// Beside others, as the only suspect of two deaths that is.
    Beside,
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
    /// Calls that broke, of workers of which nothing was heard since.
    open: HashMap<WorkerId, Death>,
    /// The oldest first.
    closed: VecDeque<Death>,
    /// Requests that were suspects of two deaths, and have not begun to answer since.
    suspects: HashSet<RequestFingerprint>,
    /// Those that are being tried.
    trials: HashMap<RequestFingerprint, RunningTrial>,
}

#[derive(Debug)]
struct RunningTrial {
    /// The request that is tried: the same may be asked under several ids.
    owner: RequestId,
    how: Trial,
    /// Time until which its end is waited for.
    until: Instant,
}

#[derive(Debug)]
struct Death {
    at: Instant,
    /// The last time that something told of it.
    latest: Instant,
    /// False as long as the network may be all that failed.
    is_presumed: bool,
    aboard: HashMap<RequestFingerprint, Stage>,
    ids: HashMap<RequestId, RequestFingerprint>,
    /// Report of its successor; `None`: nothing.
    report: Option<Report>,
    /// Requests that it is known to have died of, as far as anything is: they explain it.
    convicted: HashSet<RequestFingerprint>,
}

/// The requests that a worker was starting when it died.
#[derive(Debug)]
struct Report {
    /// Those that this proxy sent.
    own: HashSet<RequestFingerprint>,
    /// True if it was no other, of whichever proxy.
    is_only: bool,
}

impl Death {
    fn new(at: Instant) -> Self {
        let (aboard, ids, convicted) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { at, latest: at, is_presumed: false, aboard, ids, report: None, convicted }
    }

    /// Weight against a request: [`SUSPICIONS`] are enough to try it.
    fn suspicion(&self, fingerprint: &RequestFingerprint) -> u32 {
        let Some(stage) = self.aboard.get(fingerprint) else { return 0 };
        let is_starting = |stage: &Stage| *stage != Stage::Answering;
        match (&self.report, stage) {
            (_, Stage::Alone) => SUSPICIONS,
            _ if !self.convicted.is_empty() && !self.convicted.contains(fingerprint) => 0,
            (Some(report), _) if !report.own.contains(fingerprint) => 0,
            (Some(report), _) if report.is_only => SUSPICIONS,
            (Some(_), _) | (None, Stage::Starting) => 1,
            (None, Stage::Answering) => u32::from(!self.aboard.values().any(is_starting)),
        }
    }

    /// The longest wait of a request for the report on it.
    fn patience(&self, fingerprint: &RequestFingerprint, suspicion: u32) -> Duration {
        match self.aboard.get(fingerprint) {
            Some(_) if suspicion >= SUSPICIONS => REPORTED,
            Some(Stage::Starting | Stage::Alone) => SETTLED,
            // A reader waits for the rest of it.
            Some(Stage::Answering) | None => Duration::ZERO,
        }
    }
}

impl Deaths {
    /// Without any; `key` is for [`Self::hasher`].
    pub fn new(key: [u8; 32]) -> Self {
        let (open, closed) = (HashMap::new(), VecDeque::new());
        Self { key, open, closed, suspects: HashSet::new(), trials: HashMap::new() }
    }

    /// Hasher of what a request asks for.
    pub fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.key)
    }

    /// A call to a worker ended without a word of it, which had this request.
    pub fn broke(&mut self, worker: &WorkerId, aboard: Aboard, lost: Lost, now: Instant) {
        if lost == Lost::Unreached {
            return;
        }
        let death = self.open.entry(worker.clone()).or_insert_with(|| Death::new(now));
        death.latest = now;
        death.is_presumed |= lost == Lost::Closed;
        if death.ids.len() >= MAX_ABOARD {
            return;
        }
        death.ids.insert(aboard.request, aboard.fingerprint);
        let stage = death.aboard.entry(aboard.fingerprint).or_insert(aboard.stage);
        if *stage == Stage::Answering || aboard.stage == Stage::Alone {
            *stage = aboard.stage;
        }
    }

    /// Nobody listens at a worker's address any more: the process has ended.
    pub fn died(&mut self, worker: &WorkerId, now: Instant) {
        let death = self.open.entry(worker.clone()).or_insert_with(|| Death::new(now));
        (death.latest, death.is_presumed) = (now, true);
    }

    /// A worker answers what it was asked at `asked`, and reports the requests that the process before it was starting when it
    /// ended. The answer of a process to what was asked before calls of it broke is no sign that it lived on: it may be the
    /// last that it sent.
    pub fn lives(&mut self, worker: &WorkerId, life: Life, starting: &[RequestId], asked: Instant) {
        let Entry::Occupied(death) = self.open.entry(worker.clone()) else { return };
        if life != Life::Other && asked < death.get().latest {
            return;
        }
        let mut death = death.remove();
        let is_death = match life {
            Life::Same => false,
            Life::Other => true,
            Life::Unknown => death.is_presumed,
        };
        if !is_death || death.aboard.is_empty() {
            return;
        }
        death.is_presumed = true;
        if !starting.is_empty() {
            let own = starting.iter().filter_map(|id| death.ids.get(id).copied()).collect();
            death.report = Some(Report { own, is_only: starting.len() == 1 });
        }
        if self.closed.len() >= MAX_DEATHS {
            self.closed.pop_front();
        }
        self.closed.push_back(death);
    }

    /// Verdict on a request.
    pub fn verdict(&mut self, fingerprint: &RequestFingerprint, now: Instant) -> Verdict {
        self.forget(now);
        if self.suspicion(fingerprint) >= SUSPICIONS {
            if self.suspects.len() < MAX_TRIALS {
                self.suspects.insert(*fingerprint);
            }
            self.convict(now);
        }
        if self.is_refused(fingerprint, now) {
            return Verdict::Refused;
        }
        if self.awaits_report(fingerprint, now) {
            return Verdict::Unsettled;
        }
        match self.suspicion(fingerprint) >= SUSPICIONS {
            true if self.trials.contains_key(fingerprint) => Verdict::Later,
            true => Verdict::Alone,
            false => Verdict::Free,
        }
    }

    /// True if a request is a suspect of any death.
    pub fn is_suspect(&self, fingerprint: &RequestFingerprint) -> bool {
        self.suspicion(fingerprint) > 0
    }

    /// A suspect is about to be tried. False: it has to wait, since another is being tried beside others.
    pub fn begin_trial(
        &mut self,
        fingerprint: RequestFingerprint,
        owner: RequestId,
        how: Trial,
        now: Instant,
    ) -> bool {
        let is_beside = |trial: &RunningTrial| trial.how == Trial::Beside;
        if how == Trial::Beside && self.trials.values().any(is_beside) {
            return false;
        }
        if self.trials.len() < MAX_TRIALS {
            self.trials.insert(fingerprint, RunningTrial { owner, how, until: now + TRIAL });
        }
        true
    }

    /// A request is not tried any more, if it was.
    pub fn end_trial(&mut self, fingerprint: &RequestFingerprint, owner: RequestId) {
        if self.trials.get(fingerprint).is_some_and(|trial| trial.owner == owner) {
            self.trials.remove(fingerprint);
        }
    }

    /// A request began to answer, and would begin anew elsewhere: it is not one that kills before that.
    pub fn wrote(&mut self, fingerprint: &RequestFingerprint) {
        self.clear(fingerprint, |stage| stage != Stage::Answering);
    }

    /// A request was answered, or went on where it broke off before: no worker died of it.
    pub fn answered(&mut self, fingerprint: &RequestFingerprint) {
        self.clear(fingerprint, |_| true);
    }

    fn clear(&mut self, fingerprint: &RequestFingerprint, of: impl Fn(Stage) -> bool) {
        self.trials.remove(fingerprint);
        self.suspects.remove(fingerprint);
        for death in self.open.values_mut().chain(&mut self.closed) {
            if death.aboard.get(fingerprint).is_some_and(|stage| of(*stage)) {
                death.aboard.remove(fingerprint);
                death.convicted.remove(fingerprint);
            }
        }
    }

    fn presumed(&self) -> impl Iterator<Item = &Death> {
        self.open.values().chain(&self.closed).filter(|death| death.is_presumed)
    }

    fn suspicion(&self, fingerprint: &RequestFingerprint) -> u32 {
        self.presumed().map(|death| death.suspicion(fingerprint)).sum()
    }

    /// True if a report that may clear it can still come.
    fn awaits_report(&self, fingerprint: &RequestFingerprint, now: Instant) -> bool {
        let suspicion = self.suspicion(fingerprint);
        let is_awaited = |death: &Death| {
            let age = now.saturating_duration_since(death.at);
            death.suspicion(fingerprint) > 0 && age < death.patience(fingerprint, suspicion)
        };
        self.open.values().any(is_awaited)
    }

    fn is_refused(&self, fingerprint: &RequestFingerprint, now: Instant) -> bool {
        let died_alone = |death: &Death| death.aboard.get(fingerprint) == Some(&Stage::Alone);
        let is_convicted = || self.suspicion(fingerprint) >= CONVICTIONS;
        self.presumed().any(died_alone) || is_convicted() && !self.awaits_report(fingerprint, now)
    }

    /// Explains the deaths that refused requests were at.
    fn convict(&mut self, now: Instant) {
        let refused: Vec<_> = self.suspects.iter().filter(|f| self.is_refused(f, now)).copied().collect();
        for fingerprint in refused {
            for death in self.open.values_mut().chain(&mut self.closed) {
                if death.suspicion(&fingerprint) > 0 {
                    death.convicted.insert(fingerprint);
                }
            }
        }
    }

    fn forget(&mut self, now: Instant) {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= REMEMBERED;
        let before = self.open.len() + self.closed.len();
        self.open.retain(|_, death| !is_old(death.at));
        while self.closed.front().is_some_and(|death| is_old(death.at)) {
            self.closed.pop_front();
        }
        if self.open.len() + self.closed.len() < before {
            let (open, closed) = (&self.open, &self.closed);
            let is_remembered = |f: &RequestFingerprint| {
                open.values().chain(closed).any(|death| death.aboard.contains_key(f))
            };
            self.suspects.retain(is_remembered);
        }
        self.trials.retain(|_, trial| trial.until > now);
    }
}
