//! The judged part of a run.

use crate::outcome::Outcome;
use std::time::Duration;

/// The judged part of a run: requests that were due from its start until before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JudgedWindow {
    /// The end of the warm-up, after the start of the run.
    pub from: Duration,
    /// The start of the drain.
    pub to: Duration,
}

impl JudgedWindow {
    /// True if a time is within it.
    pub fn has(&self, t: Duration) -> bool {
        self.from <= t && t < self.to
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.to.saturating_sub(self.from).as_secs_f64()
    }
}

/// One run of several at the same rate.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// All of its outcomes, in any order.
    pub outcomes: &'a [Outcome],
    /// Judged window.
    pub window: JudgedWindow,
}

/// Requests a second that were due in the windows of all runs together; `None` if none was.
pub fn offered_rate(runs: &[Run]) -> Option<f64> {
    let n =
        runs.iter().map(|run| run.outcomes.iter().filter(|o| run.window.has(o.due)).count()).sum::<usize>();
    let seconds = runs.iter().map(|run| run.window.seconds()).sum::<f64>();
    (n > 0 && seconds > 0.0).then(|| n as f64 / seconds)
}
