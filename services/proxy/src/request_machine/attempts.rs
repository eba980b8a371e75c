//! Attempts at one encode: what is done when one fails or is slow.
//!
//! Another encoder (a job is idempotent by key) → a second one beside the first after the p95 of such jobs, of which the
//! first READY wins and the other is cancelled → a PD worker that holds the encoder, if the fleet has one → a typed,
//! retryable failure. Whatever is sent a second time is paid from the retry budget.

use super::action::{AttemptId, CancelReason, Counted, EncodeAction, SendReason};
use super::event::ChosenWorker;
use super::output::Encoded;
use super::policy::{ATTEMPTS, EncodePolicy, backoff};
use super::surroundings::Surroundings;
use std::time::{Duration, Instant};
use triptych_core::{Failure, FailureClass, WorkerId};

/// The field that an encoder names when it refuses a job since it has seen a newer lease.
const FENCE: &str = "fence";

/// Attempts that are under way, and what was learned from those that ended.
#[derive(Clone, Debug)]
pub struct Attempts {
    policy: EncodePolicy,
    /// Fencing token of the lease; 0: without one.
    fence: u64,
    /// End of the encode's time.
    deadline: Instant,
    running: Vec<Running>,
    /// Workers that have or had the job.
    tried: Vec<WorkerId>,
    n_sent: u32,
    n_failed: u32,
    /// Time at which the latest attempt was sent that is not a hedge.
    sent: Instant,
    /// p95 of such jobs at the worker that announced its tokens.
    sized: Option<Duration>,
    /// Time of the hedge, which is sent once in the life of a job.
    hedge_at: Option<Instant>,
    hedged: bool,
    next: Next,
}

#[derive(Clone, Debug)]
struct Running {
    id: AttemptId,
    sent: Instant,
    until: Instant,
}

/// The step after those that are under way.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// A worker is being chosen, until then.
    Worker { until: Instant },
    /// An encoder for the hedge is being chosen.
    Spare,
    /// The job is sent again then.
    Resend { at: Instant },
    /// Attempts under way are waited for.
    Wait,
}

/// The end of all attempts.
#[derive(Clone, Debug)]
pub enum AttemptsEnd {
    /// READY, so long after it was sent.
    Made(Box<Encoded>, Duration),
    /// Failed for good.
    Failed(Failure),
    /// Nobody to send it to.
    NoWorker,
    /// The lease is another's: its holder does the job.
    LostLease,
}

impl Attempts {
    /// Begins with the choice of a worker.
    pub fn new(policy: EncodePolicy, fence: u64, deadline: Instant, now: Instant) -> (Self, EncodeAction) {
        let mut attempts = Self {
            policy,
            fence,
            deadline,
            running: Vec::new(),
            tried: Vec::new(),
            n_sent: 0,
            n_failed: 0,
            sent: now,
            sized: None,
            hedge_at: None,
            hedged: false,
            next: Next::Wait,
        };
        let choose = attempts.choose(now);
        (attempts, choose)
    }

    /// A worker was chosen. `seen` is the p95 of the latest jobs, for a worker that has measured nothing.
    pub fn worker(
        &mut self,
        worker: ChosenWorker,
        seen: Option<Duration>,
        now: Instant,
    ) -> Vec<EncodeAction> {
        if !matches!(self.next, Next::Worker { .. }) {
            return vec![EncodeAction::GiveBack];
        }
        self.next = Next::Wait;
        self.sent = now;
        // The workers know best; before they have measured anything, what was seen of them has to do.
        let expected = self.sized.or(worker.expected).or(seen);
        self.hedge_at = (!self.hedged).then(|| now + self.policy.hedge_delay(expected));
        let why = if self.n_failed == 0 { SendReason::First } else { SendReason::Retry };
        vec![self.send(worker, why, now)]
    }

    /// An encoder that has not had the job, for the hedge, if there is one.
    pub fn spare(
        &mut self,
        worker: Option<ChosenWorker>,
        around: &mut Surroundings<'_>,
    ) -> Vec<EncodeAction> {
        let is_wanted = matches!(self.next, Next::Spare);
        if is_wanted {
            self.next = Next::Wait;
        }
        let Some(worker) = worker else { return Vec::new() };
        if !is_wanted || self.running.is_empty() || self.tried.contains(&worker.id) {
            return vec![EncodeAction::GiveBack];
        }
        if !around.budget.try_spend(around.now) {
            return vec![EncodeAction::GiveBack, EncodeAction::Count(Counted::UnpaidHedge)];
        }
        self.hedged = true;
        vec![self.send(worker, SendReason::Hedge, around.now)]
    }

    /// It became known what such a job takes, from the tokens that it will have.
    pub fn sized(&mut self, p95: Duration) {
        if self.sized.replace(p95).is_none() {
            let at = self.sent + self.policy.hedge_delay(Some(p95));
            self.hedge_at = self.hedge_at.map(|_| at);
        }
    }

    /// True if an attempt is under way.
    pub fn is_running(&self, attempt: AttemptId) -> bool {
        self.running.iter().any(|running| running.id == attempt)
    }

    /// An attempt is READY; the others are not needed any more.
    pub fn made(&mut self, attempt: AttemptId, encoded: Encoded, now: Instant) -> Option<AttemptsEnd> {
        let at = self.running.iter().position(|running| running.id == attempt)?;
        let running = self.running.remove(at);
        Some(AttemptsEnd::Made(Box::new(encoded), now.saturating_duration_since(running.sent)))
    }

    /// An attempt failed: whether and when there is another.
    pub fn failed(
        &mut self,
        attempt: AttemptId,
        failure: Failure,
        lease_lost: bool,
        around: &mut Surroundings<'_>,
    ) -> (Vec<EncodeAction>, Option<AttemptsEnd>) {
        let Some(at) = self.running.iter().position(|running| running.id == attempt) else {
            return Default::default();
        };
        self.running.remove(at);
        self.n_failed += 1;
        if lease_lost || failure.param.as_deref() == Some(FENCE) {
            return (Vec::new(), Some(AttemptsEnd::LostLease));
        }
        if !failure.class.is_retryable() {
            return (Vec::new(), Some(AttemptsEnd::Failed(failure)));
        }
        if !self.running.is_empty() {
            // Another attempt is under way: no reason to begin one more.
            return Default::default();
        }
        if self.n_failed >= ATTEMPTS {
            return (Vec::new(), Some(AttemptsEnd::Failed(failure)));
        }
        if !around.budget.try_spend(around.now) {
            let count = EncodeAction::Count(Counted::UnpaidRetry);
            return (vec![count], Some(AttemptsEnd::Failed(failure)));
        }
        self.next = Next::Resend { at: around.now + backoff(self.n_failed) };
        self.hedge_at = None;
        Default::default()
    }

    /// Time at which it is to be woken.
    pub fn wake_at(&self) -> Option<Instant> {
        let next = match self.next {
            Next::Worker { until } => Some(until),
            Next::Resend { at } => Some(at),
            Next::Spare | Next::Wait => None,
        };
        let ends = self.running.iter().map(|running| running.until);
        ends.chain(self.hedge_at).chain(next).min()
    }

    /// Does what is due.
    pub fn woken(
        &mut self,
        lease_lost: bool,
        around: &mut Surroundings<'_>,
    ) -> (Vec<EncodeAction>, Option<AttemptsEnd>) {
        let now = around.now;
        let mut actions = Vec::new();
        let late: Vec<_> = self.running.iter().filter(|running| running.until <= now).cloned().collect();
        for Running { id, sent, until } in late {
            actions.push(EncodeAction::Cancel { attempt: id, why: CancelReason::TimedOut });
            let failure = self.too_late(until.saturating_duration_since(sent), until);
            let (more, end) = self.failed(id, failure, lease_lost, around);
            actions.extend(more);
            if end.is_some() {
                return (actions, end);
            }
        }
        match self.next {
            Next::Worker { until } if until <= now => return (actions, Some(AttemptsEnd::NoWorker)),
            Next::Resend { at } if at <= now => actions.push(self.choose(now)),
            Next::Wait if self.hedge_at.is_some_and(|at| at <= now) && !self.running.is_empty() => {
                self.hedge_at = None;
                self.next = Next::Spare;
                actions.push(EncodeAction::ChooseSpare { tried: self.tried.clone() });
            }
            _ => {}
        }
        (actions, None)
    }

    /// Cancels what is under way.
    pub fn cancel(&mut self) -> Vec<EncodeAction> {
        let why = CancelReason::Unneeded;
        self.running.drain(..).map(|running| EncodeAction::Cancel { attempt: running.id, why }).collect()
    }

    fn choose(&mut self, now: Instant) -> EncodeAction {
        self.hedge_at = None;
        self.next = Next::Worker { until: (now + self.policy.encoder_wait).min(self.deadline) };
        EncodeAction::Choose { tried: self.tried.clone() }
    }

    fn send(&mut self, worker: ChosenWorker, why: SendReason, now: Instant) -> EncodeAction {
        let attempt = AttemptId(self.n_sent);
        self.n_sent += 1;
        let until = self.deadline.min(now + self.policy.attempt_time(worker.expected));
        self.running.push(Running { id: attempt, sent: now, until });
        let why = if worker.is_last_resort { SendReason::Fallback } else { why };
        self.tried.push(worker.id);
        EncodeAction::Send { attempt, fence: self.fence, until, why }
    }

    fn too_late(&self, time: Duration, until: Instant) -> Failure {
        if until < self.deadline {
            let message = format!("an encoder did not answer within {} s", time.as_secs());
            return Failure::unavailable(message);
        }
        out_of_time()
    }
}

/// The failure of an encode whose time is over.
pub fn out_of_time() -> Failure {
    let message = "the request's time ran out while an item was encoded";
    Failure::new(FailureClass::DeadlineExceeded, message)
}
