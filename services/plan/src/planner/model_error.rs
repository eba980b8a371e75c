//! The model's own error: goodput that was measured over goodput that was expected, of clusters that are stored.
//!
//! A simulated interval knows the chance in arrivals and lengths and not that the costs are wrong. Its error is taken from
//! residuals of other workloads than the one that is planned for (leave one workload out), as a normal distribution of
//! their logarithms, of which a further one is predicted (Student, "The Probable Error of a Mean", 1908).

use super::demand::Draws;
use super::interval::{Interval, RESAMPLES};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Residuals of this repository.
const STORED: &str = include_str!("residuals.json");
/// Fewest cells that say how wide an interval is.
const FEWEST: usize = 6;
/// Standard deviation of the logarithm that is assumed where fewer are stored: nine in ten within a third.
const ASSUMED: f64 = 0.25;
/// Most cells of a file.
const MOST_CELLS: usize = 10_000;

/// Measured clusters and what was expected of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Place of the measurements, and the curves of their plan.
    pub source: String,
    /// The clusters.
    pub cells: Vec<Residual>,
}

/// The machine of curves: idle, beside neighbours, or in service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CurveKind {
    /// Times on an idle machine.
    Idle,
    /// Times beside neighbours too (`triptych profile`).
    UnderLoad,
    /// Times scaled to a cluster in service (`triptych plan calibrate`).
    InService,
}

impl CurveKind {
    /// The kinds whose residuals say something of a plan by such curves, its own first. A model that was calibrated errs by less than
    /// one that was not.
    fn telling(self) -> &'static [Self] {
        match self {
            Self::Idle => &[Self::Idle, Self::UnderLoad],
            Self::UnderLoad => &[Self::UnderLoad, Self::Idle],
            Self::InService => &[Self::InService, Self::UnderLoad, Self::Idle],
        }
    }
}

/// Goodput of a cluster under a workload, in requests a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// Curves of the plan.
    pub curves: CurveKind,
    /// Workload.
    pub workload: String,
    /// Topology.
    pub topology: String,
    /// The mean that was expected.
    pub expected: f64,
    /// The highest rate that passed.
    pub passes: f64,
    /// The lowest that failed; none if none did.
    pub fails_at: Option<f64>,
}

/// A text without usable residuals.
#[derive(Debug, Error)]
pub enum ResidualsError {
    /// Not JSON, or JSON of another file.
    #[error("not a file of residuals: {0}")]
    Format(#[from] serde_json::Error),
    /// Impossible values.
    #[error("cells[{index}]: expected {expected}, passes {passes}; allowed are finite rates of 0 and more")]
    Cell {
        /// Its index.
        index: usize,
        /// Expected goodput.
        expected: f64,
        /// Measured goodput.
        passes: f64,
    },
    /// Too long a list.
    #[error("{n} cells, at most {MOST_CELLS} are read")]
    Many {
        /// Their number.
        n: usize,
    },
}

/// Error of an expected goodput: a factor with a log-normal distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelError {
    /// Mean of its logarithm.
    pub log_mean: f64,
    /// Standard deviation of its logarithm.
    pub log_sd: f64,
    /// Residuals that it is from.
    pub n: usize,
    /// Origin.
    pub basis: Basis,
}

/// Origin of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Residuals of curves of the same kind: mean and spread.
    Measured,
    /// Residuals of curves of another kind: their spread around their own mean.
    OtherCurves,
    /// Fewer residuals than say anything: a spread that is assumed.
    Assumed,
}

impl Basis {
    /// Its part of a sentence.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Measured => "the model's error is that of stored cells with curves of this kind",
            Self::OtherCurves => {
                "no cells of curves of this kind are stored: the spread of the model's error is that of others, and no bias is \
                 assumed"
            }
            Self::Assumed => "no cells are stored: the model's error is assumed, one in four either way",
        }
    }
}

impl Residuals {
    /// Reads a file's text.
    ///
    /// # Errors
    /// [`ResidualsError`] names what is wrong with it.
    pub fn read(text: &str) -> Result<Self, ResidualsError> {
        let read: Self = serde_json::from_str(text)?;
        if read.cells.len() > MOST_CELLS {
            return Err(ResidualsError::Many { n: read.cells.len() });
        }
        let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
        match read.cells.iter().position(|c| !is_rate(c.expected) || !is_rate(c.passes)) {
            None => Ok(read),
            Some(index) => {
                let Residual { expected, passes, .. } = read.cells[index];
                Err(ResidualsError::Cell { index, expected, passes })
            }
        }
    }

    /// Those of this repository.
    pub fn stored() -> Self {
        Self::read(STORED).unwrap_or_else(|e| unreachable!("residuals.json is read by a test: {e}"))
    }

    /// Error of a plan for a workload by curves of a kind: the workload's own cells do not count.
    pub fn error_for(&self, workload: &str, curves: CurveKind) -> ModelError {
        let log = |cell: &Residual| (cell.passes / cell.expected).ln();
        let of_kind = |kind: &CurveKind| {
            let others = self.cells.iter().filter(|cell| cell.workload != workload && cell.curves == *kind);
            let logs: Vec<f64> = others.map(log).filter(|log| log.is_finite()).collect();
            (logs.len() >= FEWEST).then_some((*kind, logs))
        };
        let Some((kind, logs)) = curves.telling().iter().find_map(of_kind) else {
            return ModelError { log_mean: 0.0, log_sd: ASSUMED, n: 0, basis: Basis::Assumed };
        };
        let n = logs.len();
        let mean = logs.iter().sum::<f64>() / n as f64;
        let log_sd = (logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / (n - 1) as f64).sqrt();
        match kind == curves {
            true => ModelError { log_mean: mean, log_sd, n, basis: Basis::Measured },
            false => ModelError { log_mean: 0.0, log_sd, n, basis: Basis::OtherCurves },
        }
    }
}

impl ModelError {
    /// Interval of one further measurement of what has this mean: 95 of 100 lie in it.
    pub fn interval(&self, values: &[f64], n_seeds: usize, tolerance: f64) -> Interval {
        if values.is_empty() || n_seeds == 0 {
            return Interval::default();
        }
        let mut draws = Draws::new(values.len() as u64 ^ self.n as u64);
        let mut found: Vec<f64> = (0..RESAMPLES)
            .map(|i| {
                let mean = (0..n_seeds).map(|_| values[draws.below(values.len())]).sum::<f64>();
                mean / n_seeds as f64 * self.quantile((i as f64 + 0.5) / RESAMPLES as f64)
            })
            .collect();
        found.sort_by(f64::total_cmp);
        let at = |share: f64| found[((RESAMPLES - 1) as f64 * share).round() as usize];
        let half = tolerance / 2.0;
        Interval {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            low: at(0.025) * (1.0 - half),
            high: at(0.975) * (1.0 + half),
        }
    }

    /// The factor below which a share of further residuals lies.
    fn quantile(&self, share: f64) -> f64 {
        let widened = self.log_sd * (1.0 + 1.0 / self.n.max(1) as f64).sqrt();
        let sd = if self.n == 0 { self.log_sd } else { widened };
        (self.log_mean + sd * student(normal_quantile(share), self.n.saturating_sub(1))).exp()
    }
}

/// Quantile of Student's distribution from that of the normal one, by its expansion in the degrees of freedom; without
/// any the normal one.
fn student(z: f64, freedom: usize) -> f64 {
    if freedom == 0 {
        return z;
    }
    let v = freedom as f64;
    z + (z.powi(3) + z) / (4.0 * v) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * v * v)
}

/// Quantile of the normal distribution (Abramowitz and Stegun, 26.2.23), to 0.0005.
fn normal_quantile(share: f64) -> f64 {
    let tail = share.min(1.0 - share).max(1e-12);
    let t = (-2.0 * tail.ln()).sqrt();
    let top = 2.515_517 + 0.802_853 * t + 0.010_328 * t * t;
    let bottom = 1.0 + 1.432_788 * t + 0.189_269 * t * t + 0.001_308 * t.powi(3);
    let z = t - top / bottom;
    if share < 0.5 { -z } else { z }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The stored cells of a kind, and the number of those that lie in their interval.
    fn inside(kind: CurveKind) -> (usize, usize) {
        let stored = Residuals::stored();
        let cells: Vec<_> = stored.cells.iter().filter(|cell| cell.curves == kind).collect();
        let holds = |cell: &&&Residual| {
            let error = stored.error_for(&cell.workload, kind);
            assert!(error.basis == Basis::Measured && error.n >= 36, "{error:?}");
            let found = error.interval(&[cell.expected], 1, 0.0);
            found.low <= cell.fails_at.unwrap_or(f64::INFINITY) && cell.passes <= found.high
        };
        (cells.iter().filter(holds).count(), cells.len())
    }

    #[test]
    fn intervals_of_stored_cells_hold_95_of_100_by_residuals_of_other_workloads() {
        let (n, all) = inside(CurveKind::Idle);
        assert!(all == 39 && n >= 37, "{n} of {all}");
        let (n, all) = inside(CurveKind::InService);
        assert!(all == 52 && n >= 50, "{n} of {all}");
    }

    #[test]
    fn an_interval_says_on_what_it_rests() {
        let stored = Residuals::stored();
        let other = stored.error_for("text", CurveKind::UnderLoad);
        assert_eq!((other.basis, other.log_mean), (Basis::OtherCurves, 0.0));
        assert!(other.log_sd > 0.1 && other.log_sd < 0.4, "{other:?}");
        let calibrated = stored.error_for("text", CurveKind::InService);
        assert!(
            calibrated.basis == Basis::Measured && calibrated.log_sd < 0.6 * other.log_sd,
            "{calibrated:?}"
        );
        let mut of_others = stored.clone();
        of_others.cells.retain(|cell| cell.curves == CurveKind::InService);
        let assumed = of_others.error_for("text", CurveKind::UnderLoad);
        assert_eq!(assumed.basis, Basis::Assumed, "calibrated cells say nothing of curves that are not");
        let none = Residuals::default().error_for("text", CurveKind::UnderLoad);
        assert_eq!((none.basis, none.n), (Basis::Assumed, 0));
        let interval = none.interval(&[10.0, 10.0], 2, 0.0);
        assert!((interval.low - 6.13).abs() < 0.1 && (interval.high - 16.3).abs() < 0.2, "{interval:?}");
        assert_eq!(none.interval(&[], 1, 0.0), Interval::default());
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_its_mistakes_are_named() {
        let stored = Residuals::stored();
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(Residuals::read(&text).unwrap(), stored);
        let mut wrong = stored;
        wrong.cells[3].passes = -1.0;
        let refused = Residuals::read(&serde_json::to_string(&wrong).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("cells[3]"), "{refused}");
        assert!(Residuals::read("{}").unwrap_err().to_string().contains("not a file of residuals"));
    }

    proptest! {
        #[test]
        fn no_text_and_no_rates_panic(text in "\\PC*", rates in prop::collection::vec((0.0f64..1e300, 0.0f64..1e300), 0..20)) {
            let _ = Residuals::read(&text);
            let cell = |(expected, passes)| Residual {
                curves: CurveKind::Idle,
                workload: "w".into(),
                topology: "dp2".into(),
                expected,
                passes,
                fails_at: None,
            };
            let residuals = Residuals { cells: rates.into_iter().map(cell).collect(), ..Residuals::default() };
            let interval = residuals.error_for("other", CurveKind::Idle).interval(&[1.0, 2.0], 2, 0.1);
            prop_assert!(interval.low <= interval.high, "{interval:?}");
        }
    }
}
