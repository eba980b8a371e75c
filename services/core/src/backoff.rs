//! Exponential backoff: pauses that double up to a limit, for everything that retries.
//!
//! Pure: callers sleep, and bring the random draw for jitter.

use std::time::Duration;

/// Doublings after which a pause no longer grows; keeps the shift in range.
const MAX_DOUBLINGS: u32 = 20;

/// Limits of the pauses between attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Pause after the first failure.
    pub first: Duration,
    /// Longest pause.
    pub longest: Duration,
}

impl Backoff {
    /// Pauses that double from `first` up to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// The pause after so many consecutive failures, at least one: `min(first * 2^(n - 1), longest)`.
    pub fn after(&self, n_failures: u32) -> Duration {
        let doublings = n_failures.saturating_sub(1).min(MAX_DOUBLINGS);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }

    /// The pauses of one sequence of attempts.
    pub const fn pauses(self) -> Pauses {
        Pauses { backoff: self, n_failures: 0 }
    }
}

/// The pauses of one sequence of attempts, in order.
#[derive(Clone, Debug)]
pub struct Pauses {
    backoff: Backoff,
    n_failures: u32,
}

impl Pauses {
    /// Counts a failure and returns the pause before the next attempt.
    pub fn next_pause(&mut self) -> Duration {
        self.n_failures = self.n_failures.saturating_add(1);
        self.backoff.after(self.n_failures)
    }

    /// Starts again with the first pause, after a success.
    pub const fn reset(&mut self) {
        self.n_failures = 0;
    }
}

/// A pause spread over `pause * (1 - spread) .. pause * (1 + spread)`, so that processes that started at the same moment
/// do not act at the same moment. `draw` is uniform in `[0, 1)`; `spread` is in `[0, 1]`.
pub fn jitter(pause: Duration, spread: f64, draw: f64) -> Duration {
    pause.mul_f64(1.0 + spread * (2.0 * draw - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff::new(50 * MS, 500 * MS);
        let ms = [1, 2, 3, 4, 5, 100, u32::MAX].map(|n| backoff.after(n).as_millis());
        assert_eq!(ms, [50, 100, 200, 400, 500, 500, 500]);
        assert_eq!(Backoff::new(Duration::MAX, Duration::MAX).after(9), Duration::MAX);
    }

    #[test]
    fn a_success_starts_again_with_the_first_pause() {
        let mut pauses = Backoff::new(10 * MS, 25 * MS).pauses();
        let three = |pauses: &mut Pauses| [(); 3].map(|()| pauses.next_pause().as_millis());
        assert_eq!(three(&mut pauses), [10, 20, 25]);
        pauses.reset();
        assert_eq!(three(&mut pauses), [10, 20, 25]);
    }

    #[test]
    fn jitter_stays_within_its_spread() {
        let ms = [0.0, 0.5, 1.0].map(|draw| jitter(100 * MS, 0.2, draw).as_millis());
        assert_eq!(ms, [80, 100, 120]);
    }
}
