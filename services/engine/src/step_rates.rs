//! Measured speed of steps.
//!
//! Five estimates come from it. The cost of recomputing is asked often, and a typical rate serves. Whether a
//! request can meet its deadline is decided by the best rate ever seen: only a request that could not meet it
//! even so is refused, and one slow step cannot make an engine refuse everything. What a prompt token takes, for whoever
//! compares engines, is the work of recent steps over all their rows: long chunks count for more than short ones, and what
//! any step takes counts for none. Both together are what a step is expected to take, for who plans the next one meanwhile. The
//! longest of the recent steps with prefill is what a token that waits leaves room for.

use std::time::Duration;

/// Weight of a new measurement in the typical rate.
const WEIGHT: f64 = 0.2;
/// Rows after which the work of earlier ones counts half.
const HALVED_AFTER_ROWS: f64 = 4096.0;
/// Multiple of the estimate that a step's rows count for at most: a machine that stood still for a moment says little of them.
const MOST_ABOVE: f64 = 4.0;
/// Least that it is a multiple of, in seconds, so that an estimate of nothing can rise.
const LEAST_ROW: f64 = 1e-6;
/// Part of the longest step with prefill that is left with each later one.
const LONG_LEFT: f64 = 15.0 / 16.0;
/// Rows from which the time of one is known well enough to foretell a step.
const ENOUGH_ROWS: f64 = 2048.0;

/// Measured rates, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRates {
    /// Typical time of a row in a step with prefill.
    typical_row: Option<f64>,
    /// Least time of such a row.
    best_row: Option<f64>,
    /// Least time of a decode-only step.
    best_step: Option<f64>,
    /// Time of steps with prefill beyond that, the older the less.
    recent_work: f64,
    /// Their rows, likewise.
    recent_rows: f64,
    /// Time of the longest recent step with prefill.
    long_prefill: f64,
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
        let is_first = self.best_row.is_none();
        self.best_row = least(self.best_row, row);
        self.typical_row = Some(self.typical_row.map_or(row, |t| t + WEIGHT * (row - t)));
        // The first step of a process pays for pages and caches.
        if !is_first {
            self.long_prefill = seconds.max(self.long_prefill * LONG_LEFT);
            self.observe_work(shape.n_rows as f64, (seconds - self.best_step.unwrap_or(0.0)).max(0.0));
        }
    }

    fn observe_work(&mut self, n_rows: f64, work: f64) {
        let before = (self.recent_rows > 0.0).then(|| self.recent_work / self.recent_rows);
        let most = before.map_or(f64::INFINITY, |row| row.max(LEAST_ROW) * MOST_ABOVE * n_rows);
        let left = (-n_rows / HALVED_AFTER_ROWS).exp2();
        self.recent_work = self.recent_work * left + work.min(most);
        self.recent_rows = self.recent_rows * left + n_rows;
    }

    /// Time of a row in recent steps with prefill, without what any step takes. `None` before the second of those.
    pub fn prefill_row(&self) -> Option<Duration> {
        (self.recent_rows > 0.0).then(|| seconds(self.recent_work / self.recent_rows))
    }

    /// Time of the longest recent step with prefill; each later one takes a sixteenth off it.
    pub fn long_prefill(&self) -> Duration {
        seconds(self.long_prefill)
    }

    /// Time that a step is expected to take: what any step takes at least, and the work of its prompt rows. `None` before the first
    /// decode-only step.
    pub fn expected(&self, rows: StepRows) -> Option<Duration> {
        let is_known = rows.prefills && self.recent_rows >= ENOUGH_ROWS;
        let work = if is_known { self.recent_work / self.recent_rows * rows.n_rows as f64 } else { 0.0 };
        self.best_step.map(|least| seconds(least + work))
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

    #[test]
    fn a_long_step_with_prefill_is_remembered_for_a_while() {
        let long = |steps: &[(usize, u64)]| after(steps).long_prefill().as_micros();
        assert_eq!(long(&[]), 0, "the first step of a process is not like others");
        assert_eq!(long(&[(10, 1600), (10, 100)]), 1500);
        assert_eq!(long(&[(10, 1600), (10, 1550)]), 1550);
        assert!(long(&[&[(10, 1600)][..], &[(10, 100); 60]].concat()) < 110);
    }

    #[test]
    fn a_step_is_foretold_by_its_rows_once_many_were_measured() {
        let us = Duration::from_micros;
        let decode = StepRows { n_rows: 4, prefills: false };
        let prefill = StepRows { n_rows: 100, prefills: true };
        assert_eq!(StepRates::default().expected(decode), None);
        let few = after(&[(100, 4000)]);
        assert_eq!((few.expected(decode), few.expected(prefill)), (Some(us(1000)), Some(us(1000))));
        let many = after(&[(512, 16_360); 8]);
        assert_eq!((many.expected(decode), many.expected(prefill)), (Some(us(1000)), Some(us(4000))));
    }

    /// Steps, and the bounds of what a row takes after them.
    type Case = (&'static str, Vec<(usize, u64)>, Option<[Duration; 2]>);

    /// Rates after decode-only steps of a millisecond and these steps with prefill: rows, and microseconds.
    fn after(steps: &[(usize, u64)]) -> StepRates {
        let mut rates = StepRates::default();
        rates.observe(StepRows { n_rows: 1, prefills: false }, Duration::from_millis(1));
        rates.observe(StepRows { n_rows: 16, prefills: true }, Duration::from_millis(700));
        for (n_rows, us) in steps {
            rates.observe(StepRows { n_rows: *n_rows, prefills: true }, Duration::from_micros(*us));
        }
        rates
    }

    #[test]
    fn a_row_of_a_prompt_is_measured_by_the_work_of_recent_steps() {
        let us = Duration::from_micros;
        let cases: [Case; 6] = [
            ("a cold step alone", vec![], None),
            ("a step's fixed time is no row's", vec![(100, 4000)], Some([us(30), us(30)])),
            (
                "short prompts weigh little",
                [[(1, 1300); 8].to_vec(), vec![(512, 16_360)]].concat(),
                Some([us(30), us(35)]),
            ),
            (
                "one that stood still",
                [vec![(512, 16_360); 8], vec![(512, 5_000_000)]].concat(),
                Some([us(30), us(50)]),
            ),
            (
                "a slower machine from here on",
                [vec![(512, 16_360); 8], vec![(512, 154_600); 40]].concat(),
                Some([us(290), us(300)]),
            ),
            (
                "faster than the fastest step",
                vec![(512, 900), (512, 16_360), (512, 16_360)],
                Some([us(1), us(30)]),
            ),
        ];
        for (what, steps, expect) in cases {
            let found = after(&steps).prefill_row();
            let is_within =
                |[least, most]: [Duration; 2]| found.is_some_and(|row| (least..=most).contains(&row));
            assert!(expect.map_or(found.is_none(), is_within), "{what}: {found:?}");
        }
    }
}
