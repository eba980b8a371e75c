//! Confidence interval: a bootstrap over several seeds (Efron, "Bootstrap Methods: Another Look at the
//! Jackknife", 1979).

use super::demand::Draws;
use serde::Serialize;

/// Resamples.
pub(super) const RESAMPLES: usize = 2000;

/// A mean, and where it lies in 95 of 100 resamples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Interval {
    /// Mean over the seeds.
    pub mean: f64,
    /// 2.5 of 100 are below.
    pub low: f64,
    /// 2.5 of 100 are above.
    pub high: f64,
}

impl Interval {
    /// Interval of values with a relative resolution of `tolerance`; zero without values.
    pub fn of(values: &[f64], tolerance: f64) -> Self {
        Self::of_next(values, values.len(), tolerance)
    }

    /// Interval of the mean of `n` further seeds.
    pub fn of_next(values: &[f64], n: usize, tolerance: f64) -> Self {
        if values.is_empty() || n == 0 {
            return Self::default();
        }
        let mut draws = Draws::new(values.len() as u64);
        let mut means: Vec<f64> = (0..RESAMPLES)
            .map(|_| (0..n).map(|_| values[draws.below(values.len())]).sum::<f64>() / n as f64)
            .collect();
        means.sort_by(f64::total_cmp);
        let at = |share: f64| means[((RESAMPLES - 1) as f64 * share).round() as usize];
        let half = tolerance / 2.0;
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            low: at(0.025) * (1.0 - half),
            high: at(0.975) * (1.0 + half),
        }
    }

    /// True if it lies entirely above the other.
    pub fn is_above(&self, other: &Self) -> bool {
        self.low > other.high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_its_mean_and_grows_with_what_is_unsure() {
        let sure = Interval::of(&[10.0, 10.0, 10.0], 0.0);
        assert_eq!(sure, Interval { mean: 10.0, low: 10.0, high: 10.0 });
        let unsure = Interval::of(&[8.0, 10.0, 12.0], 0.0);
        assert!(unsure.low < 10.0 && unsure.high > 10.0 && unsure.low >= 8.0 && unsure.high <= 12.0);
        let coarse = Interval::of(&[10.0], 0.1);
        assert!((coarse.low - 9.5).abs() < 1e-9 && (coarse.high - 10.5).abs() < 1e-9);
        assert!(Interval::of(&[20.0], 0.1).is_above(&coarse) && !unsure.is_above(&coarse));
        assert_eq!(Interval::of(&[], 0.1), Interval::default());
    }

    #[test]
    fn one_more_seed_is_less_sure_than_the_mean_of_many() {
        let found: Vec<f64> = (0..20).map(|i| 10.0 + f64::from(i % 5)).collect();
        let mean = Interval::of(&found, 0.0);
        let one = Interval::of_next(&found, 1, 0.0);
        assert_eq!((one.mean, one.low, one.high), (12.0, 10.0, 14.0));
        assert!(mean.low > 11.0 && mean.high < 13.0, "{mean:?}");
    }
}
