//! Trend over a window: a system that is offered more than it can serve gets slower for as long as
//! the load lasts, whatever its percentiles are at the end.
//!
//! The window of each run is cut into [`N_PARTS`] equal parts, long against the time over which neighbours resemble each
//! other, and each gives one number: the mean of requests under way, or the median time to first token. A rise is claimed if
//! a Mann-Kendall test finds one over all runs of the rate together (one-sided, p < 0.01) *and* the change over a window by
//! Theil-Sen's slope is large enough to matter: [`LEAST_RISE`] of the median, and at least one request, or a tenth of the
//! TTFT limit. Runs are what seasons are in Hirsch, Slack and Smith's test (<https://doi.org/10.1029/WR018i001p00107>):
//! values are compared within a run, the statistics and variances of all are summed. A test of each run would fail a rate
//! by chance more often the more runs it has.

use super::window::Run;
use crate::outcome::Outcome;
use crate::slo::Slo;
use serde::{Deserialize, Serialize};

/// Parts of a window.
pub const N_PARTS: usize = 12;
/// Least number of parts with a request.
const LEAST_PARTS: usize = 8;
/// The least change over the window that matters, as a share of the median.
pub const LEAST_RISE: f64 = 0.2;
/// The normal quantile of 1 - 0.01.
const Z: f64 = 2.326;

/// Trend of a series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trend {
    /// True for a significant rise that is large enough to matter.
    pub rises: bool,
    /// Change over the window (Theil-Sen).
    pub change: f64,
    /// Its median.
    pub median: f64,
    /// Mann-Kendall's statistic, standard normal where there is no trend.
    pub z: f64,
}

impl std::fmt::Display for Trend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:+.2} over the window at a median of {:.2} (z = {:.1})", self.change, self.median, self.z)
    }
}

/// The trend that series of equally spaced values have in common. `matters` is the least change that does, beside
/// [`LEAST_RISE`]. Series of fewer than eight values do not count; `None` without any other.
pub fn trend(series: &[Vec<f64>], matters: f64) -> Option<Trend> {
    let series = || series.iter().filter(|values| values.len() >= LEAST_PARTS);
    let (mut s, mut variance, mut changes) = (0i64, 0.0, Vec::new());
    for values in series() {
        let n = values.len() as f64;
        for (i, a) in values.iter().enumerate() {
            for (j, b) in values.iter().enumerate().skip(i + 1) {
                s += i64::from(b > a) - i64::from(b < a);
                changes.push((b - a) / (j - i) as f64 * n);
            }
        }
        variance += (n * (n - 1.0) * (2.0 * n + 5.0) - ties(values)) / 18.0;
    }
    if changes.is_empty() {
        return None;
    }
    // One off for continuity.
    let z = if variance > 0.0 { (s - s.signum()) as f64 / variance.sqrt() } else { 0.0 };
    let change = median(&mut changes);
    let median = median(&mut series().flatten().copied().collect::<Vec<_>>());
    let rises = z > Z && change >= matters && change >= LEAST_RISE * median;
    Some(Trend { rises, change, median, z })
}

/// Mann-Kendall's correction for equal values.
fn ties(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let groups = sorted.chunk_by(|a, b| a == b).map(|group| group.len() as f64);
    groups.map(|t| t * (t - 1.0) * (2.0 * t + 5.0)).sum()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let n = values.len();
    if n == 0 { 0.0 } else { (values[(n - 1) / 2] + values[n / 2]) / 2.0 }
}

/// Trend of the requests in flight, from when they were due to their end.
pub(super) fn of_concurrency(runs: &[Run]) -> Option<Trend> {
    trend(&runs.iter().map(concurrency).collect::<Vec<_>>(), 1.0)
}

/// Trend of the median TTFT of the requests due in each part, in milliseconds. A request without a token waited
/// until its end.
pub(super) fn of_ttft(runs: &[Run], slo: &Slo) -> Option<Trend> {
    let matters = slo.ttft.map_or(0.0, |t| t.as_secs_f64() * 100.0);
    trend(&runs.iter().map(ttft_ms).collect::<Vec<_>>(), matters)
}

/// Mean of the requests in flight in each part; empty if none was due.
fn concurrency(run: &Run) -> Vec<f64> {
    let from = run.window.from.as_secs_f64();
    let seconds = run.window.seconds();
    if seconds <= 0.0 || !run.outcomes.iter().any(|o| run.window.has(o.due)) {
        return Vec::new();
    }
    let part_s = seconds / N_PARTS as f64;
    let mut busy = [0.0; N_PARTS];
    for outcome in run.outcomes {
        let start = outcome.due.as_secs_f64() - from;
        let end = outcome.ended.as_secs_f64() - from;
        for (part, busy) in busy.iter_mut().enumerate() {
            let a = part as f64 * part_s;
            let b = (part + 1) as f64 * part_s;
            *busy += (end.min(b) - start.max(a)).max(0.0) / part_s;
        }
    }
    busy.to_vec()
}

/// Median TTFT of the requests due in each part with one, in milliseconds.
fn ttft_ms(run: &Run) -> Vec<f64> {
    let from = run.window.from.as_secs_f64();
    let seconds = run.window.seconds();
    if seconds <= 0.0 {
        return Vec::new();
    }
    let mut parts = vec![Vec::new(); N_PARTS];
    for outcome in run.outcomes.iter().filter(|o| run.window.has(o.due)) {
        let part = (outcome.due.as_secs_f64() - from) / seconds * N_PARTS as f64;
        parts[(part as usize).min(N_PARTS - 1)].push(wait_ms(outcome));
    }
    parts.iter_mut().filter(|p| !p.is_empty()).map(|p| median(p)).collect()
}

fn wait_ms(outcome: &Outcome) -> f64 {
    outcome.ttft().unwrap_or_else(|| outcome.e2el()).as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::{Purpose, rng, unit};

    #[test]
    fn a_rise_is_claimed_when_it_is_sure_and_large() {
        let check = |name: &str, value: &dyn Fn(f64) -> f64, expect: bool| {
            let values: Vec<f64> = (0..12).map(|i| value(f64::from(i))).collect();
            assert_eq!(trend(&[values], 1.0).expect("enough values").rises, expect, "{name}");
        };
        check("flat", &|_| 10.0, false);
        check("steady rise", &|i| 10.0 + i, true);
        check("fall", &|i| 30.0 - i, false);
        check("sure, but a twelfth of the median", &|i| 120.0 + i, false);
        check("sure and large in proportion, but less than one", &|i| 0.1 + 0.01 * i, false);
        check("one jump back and forth", &|i| if (5.0..7.0).contains(&i) { 90.0 } else { 10.0 }, false);
        check("rise with waves", &|i| 10.0 + 3.0 * i + 4.0 * (i * 2.0).sin(), true);
        assert_eq!(trend(&[vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]], 0.0), None);
    }

    #[test]
    fn a_rise_of_several_runs_is_one_that_they_have_in_common() {
        let line = |from: f64, by: f64| -> Vec<f64> { (0..12).map(|i| from + by * f64::from(i)).collect() };
        let check = |series: &[Vec<f64>], expect: Option<bool>| {
            assert_eq!(trend(series, 1.0).map(|trend| trend.rises), expect, "{series:?}");
        };
        check(&[line(10.0, 1.0), line(10.0, 0.0), line(10.0, 0.0)], Some(false));
        check(&[line(10.0, 1.0), line(90.0, -1.0)], Some(false));
        check(&[line(10.0, 1.0), line(9.0, 2.0), line(10.0, 0.0)], Some(true));
        // From one run to the next nothing rises: they are not in one time.
        check(&[line(10.0, 0.0), line(90.0, 0.0)], Some(false));
        check(&[line(10.0, 1.0), Vec::new()], Some(true));
        check(&[Vec::new()], None);
        // Waves hide in each run what all have in common.
        let waves = |phase: f64| -> Vec<f64> {
            (0..12).map(|i| 10.0 + 0.6 * f64::from(i) + 6.0 * (f64::from(i) * 2.0 + phase).sin()).collect()
        };
        let runs: Vec<_> = (0..6).map(|phase| waves(f64::from(phase))).collect();
        assert!(!runs.iter().all(|run| trend(std::slice::from_ref(run), 1.0).expect("enough").rises));
        check(&runs, Some(true));
    }

    #[test]
    fn noise_is_seldom_a_rise_however_many_runs_there_are() {
        let mut rng = rng(5, Purpose::Bootstrap, 0);
        for n_runs in [1, 3, 10] {
            let mut claims = 0;
            for _ in 0..2000 {
                let mut run = || (0..12).map(|_| unit(&mut rng)).collect();
                let runs: Vec<Vec<f64>> = (0..n_runs).map(|_| run()).collect();
                claims += u32::from(trend(&runs, 0.0).expect("enough values").rises);
            }
            assert!(claims <= 30, "{claims} of 2000 in {n_runs} runs, where 20 are expected at most");
        }
    }
}
