//! How fast steps are, measured as they run.
//!
//! Two questions are asked of it, and answered differently. What computing again will cost is asked often, and a
//! typical rate serves. Whether a request can make its deadline is answered by the best rate ever seen: it is
//! refused only if it could not make it even so, and one slow step cannot make an engine refuse everything.

use std::time::Duration;

/// Weight of a new measurement in the typical rate.
const WEIGHT: f64 = 0.2;

/// What was measured so far, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// A row of a step that reads prompts, typically.
    typical_row: Option<f64>,
    /// The fastest such row.
    best_row: Option<f64>,
    /// The fastest step that reads none.
    best_step: Option<f64>,
}

/// A step, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Rows.
    pub n_rows: usize,
    /// Whether rows of prompts are among them.
    pub reads: bool,
}

impl Rates {
    /// A step took this long.
    pub fn observe(&mut self, shape: StepShape, took: Duration) {
        let seconds = took.as_secs_f64();
        let least = |best: Option<f64>, new: f64| Some(best.map_or(new, |b| b.min(new)));
        if shape.n_rows == 0 {
            return;
        }
        if !shape.reads {
            self.best_step = least(self.best_step, seconds);
            return;
        }
        let row = seconds / shape.n_rows as f64;
        self.best_row = least(self.best_row, row);
        self.typical_row = Some(self.typical_row.map_or(row, |t| t + WEIGHT * (row - t)));
    }

    /// Typical time to read `n_rows` rows. `None` before the first measurement.
    pub fn reading(&self, n_rows: usize) -> Option<Duration> {
        self.typical_row.map(|row| seconds(row * n_rows as f64))
    }

    /// The least time in which a sequence can read `n_rows` rows and then go `n_steps` steps. What was not
    /// measured yet counts nothing.
    pub fn least(&self, n_rows: usize, n_steps: usize) -> Duration {
        let reading = self.best_row.unwrap_or(0.0) * n_rows as f64;
        let writing = self.best_step.unwrap_or(0.0) * n_steps as f64;
        seconds(reading + writing)
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
        let mut rates = Rates::default();
        assert_eq!((rates.reading(10), rates.least(10, 10)), (None, Duration::ZERO));
        let ms = Duration::from_millis;
        for took in [100, 10, 1000] {
            rates.observe(StepShape { n_rows: 10, reads: true }, ms(took));
            rates.observe(StepShape { n_rows: 4, reads: false }, ms(took));
        }
        rates.observe(StepShape { n_rows: 0, reads: true }, ms(0));
        assert_eq!(rates.least(20, 3), ms(20 + 30));
        let typical = rates.reading(10).unwrap();
        assert!(typical > ms(200) && typical < ms(300), "{typical:?}");
    }
}
