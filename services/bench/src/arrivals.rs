//! Arrival processes: endless, seeded sequences of times at a mean rate.
//!
//! The same seed at twice the rate gives the same sequence in half the time, so runs at different rates differ in
//! their load only.

use crate::seed::{BenchRng, Purpose, rng, unit};
use crate::text::{Settings, TextError};
use rand_distr::{Distribution, Gamma};
use std::str::FromStr;
use std::time::Duration;

/// An arrival process.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Arrivals {
    /// The workload's own: that of its clients, trace or conversations; else Poisson.
    #[default]
    Own,
    /// Exponential gaps.
    Poisson,
    /// Gamma gaps with a coefficient of variation: 1 is Poisson, above it bursts, below it is more even.
    Gamma {
        /// Standard deviation of the gaps over their mean.
        cv: f64,
    },
    /// Equal gaps.
    Constant,
    /// Poisson, at a rate that rises in a straight line and then stays.
    Ramp {
        /// First rate, as a share of the rate.
        from: f64,
        /// Time of the rise.
        over: Duration,
    },
}

const NAMES: &str = "own, poisson, gamma:cv=2, constant, ramp:from=0.1,over=60s";

impl FromStr for Arrivals {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        let (name, mut settings) = Settings::parse(text)?;
        let arrivals = match name.as_str() {
            "own" => Self::Own,
            "poisson" => Self::Poisson,
            "gamma" => Self::Gamma { cv: settings.number("cv", 2.0, (0.01, 100.0))? },
            "constant" => Self::Constant,
            "ramp" => Self::Ramp {
                from: settings.number("from", 0.1, (0.0, 1.0))?,
                over: settings.time("over")?.unwrap_or(Duration::from_secs(60)),
            },
            _ => return Err(TextError::Name { what: "arrivals", found: name, allowed: NAMES.to_owned() }),
        };
        settings.end()?;
        Ok(arrivals)
    }
}

impl std::fmt::Display for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Own => write!(f, "own"),
            Self::Poisson => write!(f, "poisson"),
            Self::Gamma { cv } => write!(f, "gamma:cv={cv}"),
            Self::Constant => write!(f, "constant"),
            Self::Ramp { from, over } => write!(f, "ramp:from={from},over={}s", over.as_secs_f64()),
        }
    }
}

impl Arrivals {
    /// Seconds after the start, without an end.
    pub(crate) fn times(&self, rate: f64, seed: u64, stream: u64) -> Times {
        let gaps = match *self {
            Self::Own | Self::Poisson => Gaps::Exponential,
            Self::Constant => Gaps::Equal,
            Self::Gamma { cv } => Gaps::gamma(cv),
            Self::Ramp { from, over } => Gaps::Ramp { from, over_s: over.as_secs_f64() },
        };
        Times { gaps, rate, rng: rng(seed, Purpose::Arrivals, stream), n_before: 0.0 }
    }
}

/// Gaps between arrivals in units of the mean gap.
#[derive(Clone, Debug)]
enum Gaps {
    Exponential,
    Equal,
    Gamma(Gamma<f64>),
    Ramp { from: f64, over_s: f64 },
}

impl Gaps {
    fn gamma(cv: f64) -> Self {
        // Shape k and scale 1/k have mean 1 and variance 1/k.
        let shape = 1.0 / (cv * cv);
        Self::Gamma(Gamma::new(shape, 1.0 / shape).expect("the shape of a positive, finite CV is positive"))
    }
}

/// An endless sequence of times.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    gaps: Gaps,
    /// Requests a second.
    rate: f64,
    rng: BenchRng,
    /// Position in the sequence, in mean gaps at the full rate.
    n_before: f64,
}

impl Iterator for Times {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        let gap = match &self.gaps {
            Gaps::Equal => 1.0,
            Gaps::Gamma(gamma) => gamma.sample(&mut self.rng),
            // 1 - u is never 0.
            Gaps::Exponential | Gaps::Ramp { .. } => -(1.0 - unit(&mut self.rng)).ln(),
        };
        self.n_before += gap;
        Some(match self.gaps {
            Gaps::Ramp { from, over_s } => ramp_time(self.n_before / self.rate, from, over_s),
            _ => self.n_before / self.rate,
        })
    }
}

/// Time at which a rate that rises from `from` to 1 within `over_s` has admitted as much as rate 1 in `done_s`.
fn ramp_time(done_s: f64, from: f64, over_s: f64) -> f64 {
    let at_top = over_s * (1.0 + from) / 2.0;
    if done_s >= at_top {
        return over_s + (done_s - at_top);
    }
    // from·t + (1 - from)·t²/(2·over) = done, solved for t.
    let a = (1.0 - from) / (2.0 * over_s);
    if a < 1e-12 { done_s } else { (-from + (from * from + 4.0 * a * done_s).sqrt()) / (2.0 * a) }
}

/// A time of the sequence as a [`Duration`]; what is before the start is at the start.
pub(crate) fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(arrivals: &str, n: usize) -> Vec<f64> {
        let arrivals: Arrivals = arrivals.parse().expect("a known process");
        let mut before = 0.0;
        let gap = |t: f64| t - std::mem::replace(&mut before, t);
        arrivals.times(4.0, 7, 0).take(n).map(gap).collect()
    }

    #[test]
    fn gaps_have_the_mean_and_the_spread_of_their_process() {
        let check = |text: &str, cv: f64, tolerance: f64| {
            let gaps = gaps(text, 40_000);
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let var = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean - 0.25).abs() < 0.25 * tolerance, "{text}: mean gap {mean}");
            assert!(
                (var.sqrt() / mean - cv).abs() <= cv.max(0.01) * tolerance,
                "{text}: {}",
                var.sqrt() / mean
            );
        };
        check("poisson", 1.0, 0.03);
        check("own", 1.0, 0.03);
        check("gamma:cv=3", 3.0, 0.06);
        check("gamma:cv=0.5", 0.5, 0.03);
        check("constant", 0.0, 0.01);
    }

    #[test]
    fn a_ramp_lets_through_what_its_area_says() {
        let arrivals: Arrivals = "ramp:from=0.2,over=100s".parse().expect("a ramp");
        let within = |until: f64| arrivals.times(50.0, 3, 0).take_while(|t| *t < until).count() as f64;
        // The area under the rate: 50·(0.2 + 1)/2·100 in the ramp, 50 a second after it.
        assert!((within(100.0) / 3000.0 - 1.0).abs() < 0.05, "{}", within(100.0));
        assert!(((within(200.0) - within(100.0)) / 5000.0 - 1.0).abs() < 0.05);
        assert!(within(10.0) < within(100.0) / 10.0);
    }

    #[test]
    fn twice_the_rate_is_the_same_sequence_in_half_the_time() {
        for text in ["poisson", "gamma:cv=2", "constant"] {
            let arrivals: Arrivals = text.parse().expect("a known process");
            let slow: Vec<_> = arrivals.times(2.0, 1, 0).take(100).collect();
            let fast: Vec<_> = arrivals.times(4.0, 1, 0).take(100).collect();
            assert!(slow.iter().zip(&fast).all(|(s, f)| (s - 2.0 * f).abs() < 1e-9), "{text}");
        }
    }

    #[test]
    fn texts_are_read_back_as_written() {
        for text in ["own", "poisson", "gamma:cv=2.5", "constant", "ramp:from=0.5,over=30s"] {
            assert_eq!(text.parse::<Arrivals>().expect("a known process").to_string(), text);
        }
        for wrong in ["", "gamma:cv=0", "gamma:cv=x", "burst", "poisson:cv=1", "ramp:over=5"] {
            assert!(wrong.parse::<Arrivals>().is_err(), "{wrong}");
        }
    }
}
