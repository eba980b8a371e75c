//! Trend over a window: a system that is offered more than it can serve gets slower for as long as
//! the load lasts, whatever its percentiles are at the end.
//!
//! The window is cut into [`N_PARTS`] equal parts, long against the time over which neighbours resemble each other,
//! and each gives one number: the mean of requests under way, or the median time to first token. A rise is claimed if
//! a Mann-Kendall test finds one (one-sided, p < 0.01) *and* the change over the window by Theil-Sen's slope is large
//! enough to matter: [`LEAST_RISE`] of the median, and at least one request, or a tenth of the TTFT limit.

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

/// The trend of equally spaced values. `matters` is the least change that does, beside [`LEAST_RISE`]. None for
/// fewer than eight values.
pub fn trend(values: &[f64], matters: f64) -> Option<Trend> {
    let n = values.len();
    if n < LEAST_PARTS {
        return None;
    }
    let mut s = 0i64;
    let mut slopes = Vec::with_capacity(n * (n - 1) / 2);
    for (i, a) in values.iter().enumerate() {
        for (j, b) in values.iter().enumerate().skip(i + 1) {
            s += i64::from(b > a) - i64::from(b < a);
            slopes.push((b - a) / (j - i) as f64);
        }
    }
    let n_f = n as f64;
    let variance = (n_f * (n_f - 1.0) * (2.0 * n_f + 5.0) - ties(values)) / 18.0;
    // One off for continuity.
    let z = if variance > 0.0 { (s - s.signum()) as f64 / variance.sqrt() } else { 0.0 };
    let change = median(&mut slopes) * n_f;
    let median = median(&mut values.to_vec());
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
pub(super) fn of_concurrency(run: &Run) -> Option<Trend> {
    let from = run.window.from.as_secs_f64();
    let seconds = run.window.seconds();
    if seconds <= 0.0 || !run.outcomes.iter().any(|o| run.window.has(o.due)) {
        return None;
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
    trend(&busy, 1.0)
}

/// Trend of the median TTFT of the requests due in each part, in milliseconds. A request without a token waited
/// until its end.
pub(super) fn of_ttft(run: &Run, slo: &Slo) -> Option<Trend> {
    let from = run.window.from.as_secs_f64();
    let seconds = run.window.seconds();
    if seconds <= 0.0 {
        return None;
    }
    let mut parts = vec![Vec::new(); N_PARTS];
    for outcome in run.outcomes.iter().filter(|o| run.window.has(o.due)) {
        let part = (outcome.due.as_secs_f64() - from) / seconds * N_PARTS as f64;
        parts[(part as usize).min(N_PARTS - 1)].push(wait_ms(outcome));
    }
    let medians: Vec<f64> = parts.iter_mut().filter(|p| !p.is_empty()).map(|p| median(p)).collect();
    trend(&medians, slo.ttft.map_or(0.0, |t| t.as_secs_f64() * 100.0))
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
            assert_eq!(trend(&values, 1.0).expect("enough values").rises, expect, "{name}: {values:?}");
        };
        check("flat", &|_| 10.0, false);
        check("steady rise", &|i| 10.0 + i, true);
        check("fall", &|i| 30.0 - i, false);
        check("sure, but a twelfth of the median", &|i| 120.0 + i, false);
        check("sure and large in proportion, but less than one", &|i| 0.1 + 0.01 * i, false);
        check("one jump back and forth", &|i| if (5.0..7.0).contains(&i) { 90.0 } else { 10.0 }, false);
        check("rise with waves", &|i| 10.0 + 3.0 * i + 4.0 * (i * 2.0).sin(), true);
        assert_eq!(trend(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 0.0), None);
    }

    #[test]
    fn noise_is_seldom_a_rise() {
        let mut rng = rng(5, Purpose::Bootstrap, 0);
        let mut claims = 0;
        for _ in 0..2000 {
            let values: Vec<f64> = (0..12).map(|_| unit(&mut rng)).collect();
            claims += u32::from(trend(&values, 0.0).expect("enough values").rises);
        }
        assert!(claims <= 30, "{claims} of 2000, where 20 are expected at most");
    }
}
