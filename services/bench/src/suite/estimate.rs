//! Estimated time of a suite.

use crate::blocks::n_blocks;
use crate::search::SearchPlan;
use std::time::Duration;

/// Size of the runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Judged requests of a run.
    pub n_requests: u64,
    /// Runs at each rate.
    pub n_seeds: u64,
    /// The longest judged window.
    pub max_window: Duration,
    /// Length of the blocks of a run, each of which has a warm-up and a drain.
    pub block: Option<Duration>,
}

/// Estimated time of `n_sweeps` sweeps with warm-up and drain, if goodput is near the first rate of the search.
pub fn estimate(n_sweeps: usize, plan: &SearchPlan, size: &Size) -> Duration {
    let window = Duration::from_secs_f64(size.n_requests as f64 / plan.first).min(size.max_window);
    // A fifth of the window goes before it and behind it, and a little between runs.
    let run = window.mul_f64(1.2) + Duration::from_secs(5) * n_blocks(window, size.block);
    let n_runs = n_sweeps as f64 * f64::from(plan.likely_rates()) * size.n_seeds as f64;
    run.mul_f64(n_runs)
}

/// A time in one readable unit: `45 s`, `10 min`, `2.5 h`.
pub fn readable(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s => format!("{:.1} h", s as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_estimated_and_readable() {
        let size = Size { n_requests: 1000, n_seeds: 3, max_window: Duration::from_secs(600), block: None };
        let plan = SearchPlan::from(10.0, 0.1);
        let one = estimate(1, &plan, &size);
        assert_eq!(one, Duration::from_secs(125) * (plan.likely_rates() * 3));
        assert_eq!(estimate(2, &plan, &size), one * 2);
        let cut = Size { block: Some(Duration::from_secs(50)), ..size };
        assert_eq!(estimate(1, &plan, &cut), one + Duration::from_secs(5) * (plan.likely_rates() * 3));
        assert_eq!(
            ["45 s", "10 min", "2.5 h"],
            [45, 600, 9000]
                .map(|s| readable(Duration::from_secs(s)))
                .map(|s| s)
                .each_ref()
                .map(String::as_str)
        );
    }
}
