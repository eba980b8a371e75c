//! Encode cost of an item as a linear function of its output tokens, fitted to finished jobs.
//!
//! Least squares, in which an old sample weighs less than a new one and an outlier less than its neighbours
//! (iteratively reweighted after Huber, "Robust Estimation of a Location Parameter", 1964). So a machine that
//! was busy for a second does not raise the estimate. Pure arithmetic; it knows no clock.

use std::collections::VecDeque;
use std::time::Duration;

/// Samples that are kept.
const N_KEPT: usize = 128;
/// Fewest samples for a fit.
const N_ENOUGH: usize = 4;
/// Weight of a sample relative to the next one.
const FADING: f64 = 0.98;
/// Rounds of reweighting.
const N_ROUNDS: usize = 4;
/// Residuals up to this multiple of the median weigh in full.
const FULL_WEIGHT: f64 = 1.5;

/// A finished job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostSample {
    /// Bytes of the item.
    pub bytes: usize,
    /// Output tokens.
    pub tokens: u32,
    /// The job's share of the work: preprocessing, its share of the forward, publishing.
    pub work: Duration,
    /// Latency from the start of its batch, that is, without the queue.
    pub took: Duration,
}

/// Fitted line and the spread around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostCurve {
    /// Cost of any item, in microseconds.
    pub fixed_us: f64,
    /// Cost of each output token, in microseconds.
    pub token_us: f64,
    /// Output tokens for each byte of an item.
    pub tokens_per_byte: f64,
    /// 95th percentile of latency over the line's prediction.
    pub p95_ratio: f64,
}

impl CostCurve {
    /// Predicted work of an item of `tokens` output tokens.
    pub fn of_tokens(&self, tokens: u32) -> Duration {
        micros(self.fixed_us + self.token_us * f64::from(tokens))
    }

    /// Predicted work of an item by its size in bytes.
    pub fn of_bytes(&self, bytes: usize) -> Duration {
        micros(self.fixed_us + self.token_us * self.tokens_per_byte * bytes as f64)
    }
}

/// Latest jobs of one encoder.
#[derive(Debug, Default)]
pub struct CostFit {
    samples: VecDeque<CostSample>,
    curve: Option<CostCurve>,
}

impl CostFit {
    /// Adds a finished job.
    pub fn learn(&mut self, sample: CostSample) {
        if self.samples.len() == N_KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        if self.samples.len() >= N_ENOUGH {
            self.curve = Some(fit(&self.samples));
        }
    }

    /// Fitted curve; `None` before enough samples.
    pub fn curve(&self) -> Option<CostCurve> {
        self.curve
    }
}

fn micros(us: f64) -> Duration {
    // The fit gives finite values; any other counts as zero.
    Duration::try_from_secs_f64(us.max(0.0) / 1e6).unwrap_or_default()
}

fn fit(samples: &VecDeque<CostSample>) -> CostCurve {
    let points: Vec<(f64, f64)> =
        samples.iter().map(|s| (f64::from(s.tokens), s.work.as_secs_f64() * 1e6)).collect();
    let age = |i: usize| FADING.powi(i32::try_from(points.len() - 1 - i).unwrap_or(i32::MAX));
    let ages: Vec<f64> = (0..points.len()).map(age).collect();
    let mut weights = ages.clone();
    let mut line = weighted_line(&points, &weights);
    for _ in 0..N_ROUNDS {
        let residuals: Vec<f64> = points.iter().map(|(x, y)| (y - line.0 - line.1 * x).abs()).collect();
        // A microsecond at least, so that a perfect fit is no division by zero.
        let wide = (quantile(&residuals, 0.5) * FULL_WEIGHT).max(1.0);
        for ((weight, age), residual) in weights.iter_mut().zip(&ages).zip(&residuals) {
            *weight = age * (wide / residual.max(wide));
        }
        line = weighted_line(&points, &weights);
    }
    let (tokens, bytes) = samples.iter().zip(&ages).fold((0.0, 0.0), |(tokens, bytes), (s, w)| {
        (tokens + w * f64::from(s.tokens), bytes + w * s.bytes as f64)
    });
    let ratio = |s: &CostSample| {
        let predicted = (line.0 + line.1 * f64::from(s.tokens)).max(1.0);
        s.took.as_secs_f64() * 1e6 / predicted
    };
    let ratios: Vec<f64> = samples.iter().map(ratio).collect();
    CostCurve {
        fixed_us: line.0,
        token_us: line.1,
        tokens_per_byte: if bytes > 0.0 { tokens / bytes } else { 0.0 },
        p95_ratio: quantile(&ratios, 0.95).max(1.0),
    }
}

/// Intercept and slope, neither below zero. Instead of a negative one: the best line through the origin, or a
/// flat one.
fn weighted_line(points: &[(f64, f64)], weights: &[f64]) -> (f64, f64) {
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().zip(weights).map(|((x, y), w)| w * f(*x, *y)).sum()
    };
    let n = sum(&|_, _| 1.0).max(f64::MIN_POSITIVE);
    let (mean_x, mean_y) = (sum(&|x, _| x) / n, sum(&|_, y| y) / n);
    let spread = sum(&|x, _| (x - mean_x).powi(2));
    let squares = sum(&|x, _| x * x);
    let through_origin = if squares > 0.0 { sum(&|x, y| x * y) / squares } else { 0.0 };
    // Items of one size do not determine the intercept; then the cost is all per token.
    if spread <= n * 1e-9 {
        return if squares > 0.0 { (0.0, through_origin) } else { (mean_y, 0.0) };
    }
    let slope = sum(&|x, y| (x - mean_x) * (y - mean_y)) / spread;
    let fixed = mean_y - slope * mean_x;
    match (fixed >= 0.0, slope >= 0.0) {
        (true, true) => (fixed, slope),
        (_, false) => (mean_y, 0.0),
        (false, true) => (0.0, through_origin),
    }
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len().saturating_sub(1)) as f64 * share;
    sorted.get(rank.ceil() as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(tokens: u32, us: u64) -> CostSample {
        let work = Duration::from_micros(us);
        CostSample { bytes: tokens as usize * 50, tokens, work, took: work }
    }

    fn near(actual: f64, expect: f64) -> bool {
        (actual - expect).abs() <= expect.abs() * 0.02 + 0.5
    }

    fn learned(samples: impl IntoIterator<Item = CostSample>) -> CostCurve {
        let mut fit = CostFit::default();
        samples.into_iter().for_each(|s| fit.learn(s));
        fit.curve().expect("enough samples")
    }

    #[test]
    fn a_line_is_found_and_outliers_do_not_bend_it() {
        let line = |tokens: u32| sample(tokens, 5_000 + 20 * u64::from(tokens));
        let clean = learned((1..=40).map(|i| line(i * 25)));
        assert!(near(clean.fixed_us, 5_000.0) && near(clean.token_us, 20.0), "{clean:?}");
        assert!(near(clean.tokens_per_byte * 50.0, 1.0) && near(clean.p95_ratio, 1.0), "{clean:?}");
        // One job in ten ran on a busy machine.
        let busy = |i: u32| if i.is_multiple_of(10) { sample(i * 25, 900_000) } else { line(i * 25) };
        let robust = learned((1..=60).map(busy));
        assert!((robust.fixed_us + robust.token_us * 500.0 - 15_000.0).abs() < 1_500.0, "{robust:?}");
        assert!(robust.p95_ratio > 5.0, "but it is known that some take longer: {robust:?}");
        assert_eq!(robust.of_tokens(0), micros(robust.fixed_us));
        assert_eq!(robust.of_bytes(50_000), micros(robust.fixed_us + robust.token_us * 1000.0));
    }

    #[test]
    fn old_samples_are_forgotten() {
        let slow = (1..=60).map(|i| sample(i * 10, 100 * u64::from(i) * 10));
        let fast = (1..=128).map(|i| sample(i * 10, 10 * u64::from(i) * 10));
        let curve = learned(slow.chain(fast));
        assert!(near(curve.token_us, 10.0), "{curve:?}");
    }

    #[test]
    fn neither_part_is_ever_negative_nor_anything_but_a_number() {
        let cases: [(&str, Vec<CostSample>); 5] = [
            ("one size", (0..8).map(|_| sample(100, 2_000)).collect()),
            ("no tokens", (0..8).map(|_| sample(0, 700)).collect()),
            ("falling", (1..9).map(|i| sample(i * 10, 1_000 - u64::from(i) * 100)).collect()),
            ("steep", (1..9).map(|i| sample(i * 10, u64::from(i * i) * 1_000)).collect()),
            ("no time at all", (1..9).map(|i| sample(i, 0)).collect()),
        ];
        for (case, samples) in cases {
            let curve = learned(samples);
            let parts = [curve.fixed_us, curve.token_us, curve.tokens_per_byte, curve.p95_ratio];
            assert!(parts.iter().all(|p| p.is_finite() && *p >= 0.0), "{case}: {curve:?}");
        }
        let one_size = learned((0..8).map(|_| sample(100, 2_000)));
        assert_eq!(one_size.of_tokens(200), Duration::from_micros(4_000));
    }

    #[test]
    fn a_few_jobs_teach_nothing() {
        let mut fit = CostFit::default();
        for _ in 0..3 {
            fit.learn(sample(10, 100));
        }
        assert_eq!(fit.curve(), None);
    }
}
