//! Measured speed of steps.
//!
//! Two estimates come from it. The cost of recomputing is asked often, and a typical rate serves. Whether a
//! request can meet its deadline is decided by the best rate ever seen: only a request that could not meet it
//! even so is refused, and one slow step cannot make an engine refuse everything.

use std::time::Duration;

/// Weight of a new measurement in the typical rate.
const WEIGHT: f64 = 0.2;

/// Measured rates, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRates {
    /// Typical time of a row in a step with prefill.
    typical_row: Option<f64>,
    /// Least time of such a row.
    best_row: Option<f64>,
    /// Least time of a decode-only step.
    best_step: Option<f64>,
}

/// Properties of a step that its time depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRows {
    /// Number of rows.
    pub n_rows: usize,
    /// True if some rows are of prompts.
    pub prefills: bool,
}

impl StepRates {
    /// Records a step and its time.
    pub fn observe(&mut self, shape: StepRows, took: Duration) {
        let seconds = took.as_secs_f64();
        let least = |best: Option<f64>, new: f64| Some(best.map_or(new, |b| b.min(new)));
        if shape.n_rows == 0 {
            return;
        }
        if !shape.prefills {
            self.best_step = least(self.best_step, seconds);
            return;
        }
        let row = seconds / shape.n_rows as f64;
        self.best_row = least(self.best_row, row);
        self.typical_row = Some(self.typical_row.map_or(row, |t| t + WEIGHT * (row - t)));
    }

    /// Typical time to prefill `n_rows` rows. `None` before the first measurement.
    pub fn prefill_time(&self, n_rows: usize) -> Option<Duration> {
        self.typical_row.map(|row| seconds(row * n_rows as f64))
    }

    /// Least time to prefill `n_rows` rows and then run `n_steps` steps. Unmeasured parts count as zero.
    pub fn least(&self, n_rows: usize, n_steps: usize) -> Duration {
        let prefill = self.best_row.unwrap_or(0.0) * n_rows as f64;
        let decode = self.best_step.unwrap_or(0.0) * n_steps as f64;
        seconds(prefill + decode)
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_time_is_at_the_best_rates_and_typical_time_follows_the_latest() {
        let mut rates = StepRates::default();
        assert_eq!((rates.prefill_time(10), rates.least(10, 10)), (None, Duration::ZERO));
        let ms = Duration::from_millis;
        for took in [100, 10, 1000] {
            rates.observe(StepRows { n_rows: 10, prefills: true }, ms(took));
            rates.observe(StepRows { n_rows: 4, prefills: false }, ms(took));
        }
        rates.observe(StepRows { n_rows: 0, prefills: true }, ms(0));
        assert_eq!(rates.least(20, 3), ms(20 + 30));
        let typical = rates.prefill_time(10).unwrap();
        assert!(typical > ms(200) && typical < ms(300), "{typical:?}");
    }
}
