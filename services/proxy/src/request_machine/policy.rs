//! The numbers of the machines: attempts, backoff, hedge delay, lease times, and how items are encoded.

use super::retry_budget::RetryPolicy;
use std::time::{Duration, Instant};

/// Times a job or a request is sent before it is given up.
pub const ATTEMPTS: u32 = 5;
/// The longest wait for a worker to be there at all: long enough for a restart of ours.
pub const WORKER_WAIT: Duration = Duration::from_secs(30);
/// The longest wait of a request that is to be tried alone for a worker that has nothing else.
pub const IDLE_WAIT: Duration = Duration::from_secs(5);
/// Pause before a request looks again whether the same one is still tried alone.
pub const TRIAL_PAUSE: Duration = Duration::from_millis(100);
/// Pause before a request looks again whether the worker died that had it.
pub const SETTLE_PAUSE: Duration = Duration::from_millis(5);
/// Encodes of failed requests that may go on to READY at once.
pub const LEFT_BEHIND: usize = 64;
/// Times a job is begun anew under a newer lease; after that it is sent without one.
pub const MAX_LOST_LEASES: u32 = 2;
/// Times one item is encoded again because a PD worker did not find it.
pub const RENEWALS_PER_ITEM: u32 = 4;
/// The longest wait of a complete answer for reports on items that were read already.
pub const LAST_REPORTS: Duration = Duration::from_millis(250);

/// An attempt is given up after so many times the p95 of such jobs, but never before the second number.
const PATIENCE_OF_P95: u32 = 16;
const PATIENCE_AT_LEAST: Duration = Duration::from_secs(15);
/// The most, and the share of its time, that a request keeps back so that a failure still reaches the client in time.
const MARGIN: Duration = Duration::from_millis(250);
const MARGIN_SHARE: u32 = 20;
/// A lease's cost where nobody knows what a job takes.
const COST_UNKNOWN: Duration = Duration::from_secs(2);
/// A lease lasts for so many times the predicted cost of its job, within [`TTL`]. It is renewed after a third of it.
const TTL_OF_COST: u32 = 4;
/// The shortest and the longest lease: long enough for a busy machine to renew it, short enough to be taken over from
/// the dead within a request's time.
pub const TTL: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// The longest single wait for another's job.
pub const WAIT_SLICE: Duration = Duration::from_secs(2);
/// The first and the longest pause after a wait that ended at once though the key is held.
pub const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// Rules by which items are looked for and encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodePolicy {
    /// Outputs that are remembered. Default 16384, a few MiB; 0: none.
    pub remembered: usize,
    /// Time for which one is believed to be READY without asking the store. Default 10 s; zero: the store is always
    /// asked.
    pub believed_for: Duration,
    /// A job is never hedged earlier, however short it should be. Default 100 ms.
    pub hedge_after_at_least: Duration,
    /// The hedge delay of a job of which nobody knows how long it takes. Default 5 s.
    pub hedge_after_unknown: Duration,
    /// The most that one job may take at one worker. Default 60 s.
    pub attempt_time: Duration,
    /// The longest wait for an encoder to be there at all. Default 30 s; a vLLM encoder's restart takes longer.
    pub encoder_wait: Duration,
    /// The most that the encode of an item may take altogether, however long its requests would wait. Default 120 s.
    pub max_time: Duration,
    /// The share of work that may be sent twice.
    pub retries: RetryPolicy,
}

impl Default for EncodePolicy {
    fn default() -> Self {
        Self {
            remembered: 16_384,
            believed_for: Duration::from_secs(10),
            hedge_after_at_least: Duration::from_millis(100),
            hedge_after_unknown: Duration::from_secs(5),
            attempt_time: Duration::from_secs(60),
            encoder_wait: WORKER_WAIT,
            max_time: Duration::from_secs(120),
            retries: RetryPolicy::default(),
        }
    }
}

impl EncodePolicy {
    /// Time that one attempt may take: far longer than it should, and no longer than that.
    pub fn attempt_time(&self, expected: Option<Duration>) -> Duration {
        let expected = expected.map(|expected| expected.saturating_mul(PATIENCE_OF_P95));
        expected.map_or(self.attempt_time, |time| time.max(PATIENCE_AT_LEAST).min(self.attempt_time))
    }

    /// Time after which a second encoder is asked, of what is expected of the first.
    pub fn hedge_delay(&self, expected: Option<Duration>) -> Duration {
        expected.unwrap_or(self.hedge_after_unknown).max(self.hedge_after_at_least)
    }
}

/// The pause after an attempt.
pub fn backoff(attempt: u32) -> Duration {
    Duration::from_millis(50 << attempt.saturating_sub(1).min(4))
}

/// The pause before a request is sent after an item was encoded for it for the `n`-th time: a store that went
/// away, and lost what it had, is given time to come back.
pub fn renewal_pause(n: u32) -> Duration {
    match n {
        0 | 1 => Duration::ZERO,
        _ => Duration::from_millis(500 << (n - 2).min(3)),
    }
}

/// Time of a lease, of what its job usually takes.
pub fn lease_ttl(usual: Option<Duration>) -> Duration {
    usual.unwrap_or(COST_UNKNOWN).saturating_mul(TTL_OF_COST).clamp(TTL.0, TTL.1)
}

/// Time until which a request waits for an item that it needs from `began` on.
pub fn item_patience(began: Instant, deadline: Instant) -> Instant {
    let margin = (deadline.saturating_duration_since(began) / MARGIN_SHARE).min(MARGIN);
    deadline.checked_sub(margin).unwrap_or(deadline)
}
