//! Circuit breaker of a tier: it opens after several consecutive failures, so that not every request waits for the
//! tier's timeout (Nygard, "Release It!"). Takes time as an argument.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::Backoff;

/// Consecutive failures that open it.
const FAILURES: u32 = 3;
/// Times for which it stays open.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(15));

/// The breaker of one tier.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<BreakerState>);

#[derive(Debug, Default)]
struct BreakerState {
    failures_in_a_row: u32,
    /// End of the open state, and the number of times that it opened in a row.
    open: Option<(Instant, u32)>,
}

impl Breaker {
    /// True if the tier may be asked. After the open time every caller may, and the first failure opens it for longer.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let state = self.0.lock();
        state.open.is_none_or(|(until, _)| until <= now)
    }

    /// Records an answer.
    pub(super) fn works(&self) {
        *self.0.lock() = BreakerState::default();
    }

    /// Records a failure. True if it opened the breaker.
    pub(super) fn fails(&self, now: Instant) -> bool {
        let mut state = self.0.lock();
        state.failures_in_a_row = state.failures_in_a_row.saturating_add(1);
        match state.open {
            // Operations that were in flight when it opened do not count.
            Some((until, _)) if until > now => false,
            Some((_, n_openings)) => {
                let n_openings = n_openings.saturating_add(1);
                state.open = Some((now + BACKOFF.after(n_openings), n_openings));
                false
            }
            None if state.failures_in_a_row >= FAILURES => {
                state.open = Some((now + BACKOFF.after(1), 1));
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn three_failures_make_a_pause_that_doubles_until_it_works() {
        let (breaker, start) = (Breaker::default(), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        assert!(!breaker.fails(start) && !breaker.fails(start) && breaker.allows(start));
        assert!(breaker.fails(start), "the third opens it");
        assert!(!breaker.allows(after(499)) && breaker.allows(after(500)));
        assert!(!breaker.fails(after(100)), "a straggler changes nothing");
        breaker.fails(after(500));
        assert!(!breaker.allows(after(1499)) && breaker.allows(after(1500)));
        breaker.works();
        assert!(!breaker.fails(after(1500)) && breaker.allows(after(1500)));
    }
}
