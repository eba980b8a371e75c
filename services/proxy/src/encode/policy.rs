//! The numbers by which items are encoded.

use crate::budget::RetryPolicy;
use std::time::Duration;

/// How items are looked for and encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodePolicy {
    /// Outputs that are remembered. Default 16384, a few MiB; 0: none.
    pub remembered: usize,
    /// How long one is believed to be READY without asking the store. Default 10 s; zero: the store is always asked.
    pub believed_for: Duration,
    /// A job is never hedged earlier, however short it should be. Default 100 ms.
    pub hedge_after_at_least: Duration,
    /// When a job is hedged of which nobody knows how long it takes. Default 5 s.
    pub hedge_after_unknown: Duration,
    /// The most that one job may take at one worker. Default 60 s.
    pub attempt_time: Duration,
    /// The most that the encode of an item may take altogether, however long its requests would wait. Default 120 s.
    pub max_time: Duration,
    /// What may be sent twice.
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
            max_time: Duration::from_secs(120),
            retries: RetryPolicy::default(),
        }
    }
}
