//! Circuit breaker of a store (Nygard, "Release It!"): a state machine without I/O, with the time as an argument. One is
//! shared by all calls of a process to one store; [`crate::guarded`] asks it and reports to it.
//!
//! **Closed**: calls go through. It opens after several consecutive failures, and after the first timeout if the store
//! answered nothing since that call began: so a store that hangs is noticed by one timeout, and a slow object among
//! others that arrive is not taken for it.
//! **Open**: every call is refused at once, for a time that doubles until a call is answered again.
//! **Half-open**, when that time is over: exactly one call probes, and the others are refused until it ends.

use std::time::Duration;
use tokio::time::Instant;
use triptych_core::Backoff;

/// Settings of a circuit breaker and of the calls through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerTuning {
    /// Consecutive failures that open it. Default 3; 0 is read as 1.
    pub failures: u32,
    /// Time for which it stays open. Default 500 ms, doubling up to 5 s.
    pub open: Backoff,
    /// Timeout of a probe and of a lookup: heads, leases, pings. Default 500 ms, and 1.5 s for a bucket, whose requests
    /// of many heads take several rounds.
    pub answer_timeout: Duration,
    /// Time after which a transfer that its caller gave up counts as a timeout. Default 2 s.
    pub transfer_timeout: Duration,
}

impl Default for BreakerTuning {
    fn default() -> Self {
        Self {
            failures: 3,
            open: Backoff::new(Duration::from_millis(500), Duration::from_secs(5)),
            answer_timeout: Duration::from_millis(500),
            transfer_timeout: Duration::from_secs(2),
        }
    }
}

impl BreakerTuning {
    /// The same for a bucket: at least 1.5 s for an answer.
    pub fn for_bucket(self) -> Self {
        Self { answer_timeout: self.answer_timeout.max(Duration::from_millis(1500)), ..self }
    }
}

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// Calls go through.
    Closed,
    /// Calls are refused.
    Open,
    /// One call probes, and the others are refused.
    HalfOpen,
}

impl BreakerState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::HalfOpen];

    /// Label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// Decision about a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes through.
    Call(CallTicket),
    /// It probes first.
    Probe(ProbeTicket),
    /// It is refused.
    Refuse,
}

/// A call that went through.
#[derive(Debug, PartialEq, Eq)]
pub struct CallTicket {
    began: Instant,
    /// Value of `n_closings` when it began.
    closing: u64,
}

/// The only probe of a half-open breaker.
#[derive(Debug, PartialEq, Eq)]
pub struct ProbeTicket(());

/// Outcome of a call or a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The store answered.
    Answered,
    /// The store is unreachable, or reported a failure of its own.
    Failed,
    /// No answer in time.
    TimedOut,
    /// Given up by its caller, or refused before it reached the store.
    Unknown,
}

/// The state machine.
#[derive(Debug)]
pub struct Breaker {
    tuning: BreakerTuning,
    phase: Phase,
    /// Consecutive times that it opened without an answered call.
    n_openings: u32,
    /// Times that it closed. Calls of an earlier closed phase do not count any more.
    n_closings: u64,
}

#[derive(Debug)]
enum Phase {
    Closed { failures_in_a_row: u32, last_answer: Option<Instant> },
    Open { until: Instant },
    HalfOpen,
}

const CLOSED: Phase = Phase::Closed { failures_in_a_row: 0, last_answer: None };

impl Breaker {
    /// A closed breaker.
    pub fn new(tuning: BreakerTuning) -> Self {
        Self { tuning, phase: CLOSED, n_openings: 0, n_closings: 0 }
    }

    /// The state.
    pub fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed { .. } => BreakerState::Closed,
            Phase::Open { .. } => BreakerState::Open,
            Phase::HalfOpen => BreakerState::HalfOpen,
        }
    }

    /// Decides about a call that begins now.
    pub fn admit(&mut self, now: Instant) -> Verdict {
        match self.phase {
            Phase::Closed { .. } => Verdict::Call(CallTicket { began: now, closing: self.n_closings }),
            Phase::Open { until } if until <= now => {
                self.phase = Phase::HalfOpen;
                Verdict::Probe(ProbeTicket(()))
            }
            Phase::Open { .. } | Phase::HalfOpen => Verdict::Refuse,
        }
    }

    /// Records the end of a call.
    pub fn ended(&mut self, call: CallTicket, end: CallEnd, now: Instant) {
        let Phase::Closed { failures_in_a_row, last_answer } = &mut self.phase else { return };
        if call.closing != self.n_closings {
            return;
        }
        let is_silent = last_answer.is_none_or(|answer| answer < call.began);
        match end {
            CallEnd::Unknown => return,
            CallEnd::Answered => {
                (*failures_in_a_row, *last_answer, self.n_openings) = (0, Some(now), 0);
                return;
            }
            CallEnd::Failed | CallEnd::TimedOut => *failures_in_a_row = failures_in_a_row.saturating_add(1),
        }
        let silent_timeout = end == CallEnd::TimedOut && is_silent;
        if silent_timeout || *failures_in_a_row >= self.tuning.failures.max(1) {
            self.open(now);
        }
    }

    /// Records the end of the probe. One of unknown end leaves the next call to probe.
    pub fn probed(&mut self, _probe: ProbeTicket, end: CallEnd, now: Instant) {
        match end {
            CallEnd::Answered => {
                self.n_closings += 1;
                self.phase = CLOSED;
            }
            CallEnd::Failed | CallEnd::TimedOut => self.open(now),
            CallEnd::Unknown => self.phase = Phase::Open { until: now },
        }
    }

    fn open(&mut self, now: Instant) {
        self.n_openings = self.n_openings.saturating_add(1);
        self.phase = Phase::Open { until: now + self.tuning.open.after(self.n_openings) };
    }
}

#[cfg(test)]
mod tests;
