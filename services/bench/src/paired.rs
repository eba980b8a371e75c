//! Paired differences of two results: runs, or blocks of runs, that had the same requests at the same rate, one beside the other.
//!
//! What changes from hour to hour changes both of a pair, so their differences vary less than they do themselves. The interval is
//! Student's over the pairs of a rate; it needs three of them.

use crate::result::{RateResult, RunResult, SweepResult};

/// Fewest pairs of an interval.
const LEAST_PAIRS: usize = 3;
/// Student's 0.975 quantiles for 1 to 30 degrees of freedom.
const T_975: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// The same for more: that of 30 is a little wider.
const T_MANY: f64 = 2.042;

/// A quantity that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// Percent of the offered requests that met the SLO.
    Attainment,
    /// Median time to the first token, in milliseconds.
    TtftP50,
    /// Its 99th percentile.
    TtftP99,
    /// Median time of a further token, in milliseconds.
    TpotP50,
    /// Its 99th percentile.
    TpotP99,
}

impl Compared {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Attainment, Self::TtftP50, Self::TtftP99, Self::TpotP50, Self::TpotP99];

    /// Its name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attainment => "attainment, %",
            Self::TtftP50 => "p50 TTFT, ms",
            Self::TtftP99 => "p99 TTFT, ms",
            Self::TpotP50 => "p50 TPOT, ms",
            Self::TpotP99 => "p99 TPOT, ms",
        }
    }

    fn of(self, run: &RunResult) -> Option<f64> {
        match self {
            Self::Attainment => (run.verdict.n_offered > 0).then(|| run.verdict.attainment() * 100.0),
            Self::TtftP50 => run.ttft_ms.p50,
            Self::TtftP99 => run.ttft_ms.p99,
            Self::TpotP50 => run.tpot_ms.p50,
            Self::TpotP99 => run.tpot_ms.p99,
        }
    }
}

/// Mean of paired differences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Mean.
    pub mean: f64,
    /// Half of the 95 % interval around it.
    pub half: f64,
    /// Pairs.
    pub n: usize,
}

impl Difference {
    /// Of the differences of pairs; `None` of fewer than three.
    pub fn of(differences: &[f64]) -> Option<Self> {
        let n = differences.len();
        if n < LEAST_PAIRS {
            return None;
        }
        let mean = differences.iter().sum::<f64>() / n as f64;
        let squares = differences.iter().map(|d| (d - mean) * (d - mean)).sum::<f64>();
        let deviation = (squares / (n - 1) as f64).sqrt();
        let t = T_975.get(n - 2).copied().unwrap_or(T_MANY);
        Some(Self { mean, half: t * deviation / (n as f64).sqrt(), n })
    }
}

/// Differences of two results at a rate that both were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct PairedRate {
    /// Requests a second.
    pub rate: f64,
    /// The first result less the second; `None` where fewer than three pairs have it.
    pub differences: Vec<(Compared, Option<Difference>)>,
    /// Pairs of runs.
    pub n_pairs: usize,
}

/// Differences of two results at every common rate, rates ascending. Runs in which the bench itself was late are no pairs.
pub fn paired(first: &SweepResult, second: &SweepResult) -> Vec<PairedRate> {
    let both = first.rates.iter().filter_map(|a| Some((a, second.rates.iter().find(|b| b.rate == a.rate)?)));
    let mut rates: Vec<PairedRate> = both.map(|(a, b)| at_rate(a, b)).filter(|p| p.n_pairs > 0).collect();
    rates.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    rates
}

fn at_rate(first: &RateResult, second: &RateResult) -> PairedRate {
    let partner = |a: &RunResult| {
        let is_partner = |b: &&RunResult| (b.seed, b.block) == (a.seed, a.block) && !b.generator.void;
        second.runs.iter().find(is_partner)
    };
    let sound = first.runs.iter().filter(|run| !run.generator.void);
    let pairs: Vec<_> = sound.filter_map(|a| Some((a, partner(a)?))).collect();
    let difference = |what: Compared| {
        let of = |(a, b): &(&RunResult, &RunResult)| Some(what.of(a)? - what.of(b)?);
        Difference::of(&pairs.iter().filter_map(of).collect::<Vec<_>>())
    };
    PairedRate {
        rate: first.rate,
        differences: Compared::ALL.map(|what| (what, difference(what))).to_vec(),
        n_pairs: pairs.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests_support::sweep;

    #[test]
    fn the_interval_is_students() {
        // Mean 2, deviation 1, 3 pairs: 4.303 / sqrt(3).
        let found = Difference::of(&[1.0, 2.0, 3.0]).unwrap();
        assert!((found.mean - 2.0).abs() < 1e-9 && (found.half - 2.4843).abs() < 1e-3, "{found:?}");
        assert_eq!(Difference::of(&[1.0, 2.0]), None);
        let many = Difference::of(&vec![5.0; 100]).unwrap();
        assert_eq!((many.mean, many.half, many.n), (5.0, 0.0, 100));
    }

    #[test]
    fn a_slow_hour_of_both_is_no_difference() {
        let workload = "epd-short:images=1";
        let (mut a, mut b) = (sweep("1e1pd", workload, 12.0), sweep("dp2", workload, 12.0));
        // Each pair has an hour of its own, some ten times as slow; the first is 3 ms faster in each.
        for (one, gain) in [(&mut a, 3.0), (&mut b, 0.0)] {
            for rate in &mut one.rates {
                for (run, hour) in rate.runs.iter_mut().zip([100.0, 1000.0, 400.0]) {
                    run.ttft_ms.p50 = Some(hour - gain + f64::from(run.seed as u32) * 0.1);
                }
            }
        }
        let rates = paired(&a, &b);
        assert_eq!(rates.len(), a.rates.len());
        for rate in &rates {
            let (_, ttft) = rate.differences.iter().find(|(what, _)| *what == Compared::TtftP50).unwrap();
            let ttft = ttft.unwrap();
            assert!((ttft.mean + 3.0).abs() < 1e-6 && ttft.half < 0.01, "{ttft:?}");
        }
        // A run without its partner, or with a late bench, is no pair.
        b.rates[0].runs[0].seed = 99;
        b.rates[0].runs[1].generator.void = true;
        let rates = paired(&a, &b);
        assert_eq!(rates.iter().map(|r| r.n_pairs).min(), Some(1));
    }
}
