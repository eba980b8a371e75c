//! The size of a planner's search.

use std::time::Duration;

/// Requests that every run has: with fewer, one request decides what a hundredth of them may miss.
const LEAST: usize = 200;

/// Number and length of the simulations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Requests of a simulated run.
    pub requests: usize,
    /// Longest simulated run; it has fewer requests, but 200, if those take longer to arrive.
    pub longest: Duration,
    /// Seeds of the finalists.
    pub seeds: u64,
    /// Ratio, less one, of two rates that count as equal.
    pub tolerance: f64,
    /// Tune the settings.
    pub tunes: bool,
    /// Plan for other demands too.
    pub what_if: bool,
    /// First of these seeds. Results of a policy are of others than those that it was tuned with.
    pub first_seed: u64,
}

impl Effort {
    /// Narrow intervals.
    pub const FULL: Self = Self {
        requests: 1200,
        longest: Duration::MAX,
        seeds: 5,
        tolerance: 0.02,
        tunes: true,
        what_if: true,
        first_seed: 1,
    };
    /// Seconds rather than minutes.
    pub const QUICK: Self = Self { requests: 200, seeds: 3, tolerance: 0.1, tunes: false, ..Self::FULL };

    /// Requests of a run at a rate.
    pub(super) fn requests_at(self, rate: f64) -> usize {
        let offered = (rate * self.longest.as_secs_f64()).ceil();
        // Beyond what a count can hold it is the other bound that counts.
        self.requests.min((offered as usize).max(LEAST)).max(1)
    }

    /// The effort of a first ranking of candidates.
    pub fn coarse(self) -> Self {
        Self { requests: (self.requests / 2).max(100), tolerance: self.tolerance * 2.0, ..self }
    }
}
