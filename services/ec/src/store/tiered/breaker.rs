//! Leaves a tier alone for a moment after it failed several times in a row, so that its time limit is not paid by every
//! request (Nygard, "Release It!", circuit breaker). Knows no clock: it is told the time.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::Backoff;

/// Failures in a row that open it.
const FAILURES: u32 = 3;
/// Times for which it stays open.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(15));

/// The breaker of one tier.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<BreakerState>);

#[derive(Debug, Default)]
struct BreakerState {
    failures_in_a_row: u32,
    /// Until when the tier is left alone, and how long that was.
    open: Option<(Instant, Duration)>,
}

impl Breaker {
    /// Whether the tier may be asked. After a pause everyone may, and the first failure makes the next, longer pause.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let state = self.0.lock();
        state.open.is_none_or(|(until, _)| until <= now)
    }

    /// The tier answered.
    pub(super) fn works(&self) {
        *self.0.lock() = BreakerState::default();
    }

    /// The tier did not answer. Whether it is left alone from now on, and was not before.
    pub(super) fn fails(&self, now: Instant) -> bool {
        let mut state = self.0.lock();
        state.failures_in_a_row = state.failures_in_a_row.saturating_add(1);
        match state.open {
            // Those that were under way when it opened are no news.
            Some((until, _)) if until > now => false,
            Some((_, pause)) => {
                let pause = (pause * 2).min(BACKOFF.longest);
                state.open = Some((now + pause, pause));
                false
            }
            None if state.failures_in_a_row >= FAILURES => {
                state.open = Some((now + BACKOFF.first, BACKOFF.first));
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
