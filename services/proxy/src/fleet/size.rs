//! The size of a piece of work, as far as the proxy can tell before it is done.

use super::prefix::Prefixes;
use std::time::Duration;
use triptych_core::{ContentKey, WorkerId};
use triptych_proto::v1;

/// The facts that decide between the workers that are able to do a piece of work.
#[derive(Clone, Debug)]
pub enum Size {
    /// An item to be encoded.
    Item {
        /// Its key, for affinity; `None`: it has none.
        key: Option<ContentKey>,
        /// Its length in bytes.
        bytes: u64,
        /// The PD worker that the request goes to, where PD workers encode; see [`super::placement`].
        placement: Option<WorkerId>,
    },
    /// A request to be answered.
    Request {
        /// The encoder outputs it needs, and how many bytes each has.
        items: Vec<(ContentKey, u64)>,
        /// The beginning of its prompt.
        prompt: Prefixes,
        /// Workers that hold items which nobody else is known to have, or that have them encoded for this request; empty:
        /// there are no such items.
        holders: Vec<WorkerId>,
    },
}

impl From<u64> for Size {
    fn from(bytes: u64) -> Self {
        Self::Item { key: None, bytes, placement: None }
    }
}

/// Cost of an item at an encoder: a straight line over its tokens, which are estimated from its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curve {
    fixed_us: f64,
    byte_us: f64,
    token_us: f64,
    p95_ratio: f64,
}

/// For workers that have measured nothing yet. Wrong, and equally so for all of them.
pub const UNKNOWN: Curve = Curve { fixed_us: 10_000.0, byte_us: 0.1, token_us: 1.0, p95_ratio: 3.0 };

impl From<&v1::EncodeCost> for Curve {
    fn from(cost: &v1::EncodeCost) -> Self {
        let sane = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
        Self {
            fixed_us: cost.fixed_us as f64,
            byte_us: sane(cost.token_us) * sane(cost.tokens_per_byte),
            token_us: sane(cost.token_us),
            p95_ratio: sane(cost.p95_ratio).max(1.0),
        }
    }
}

impl Curve {
    /// The cost of an item of so many bytes, in microseconds.
    pub fn cost_us(&self, bytes: u64) -> u64 {
        // A cast from a float saturates.
        (self.fixed_us + self.byte_us * bytes as f64) as u64
    }

    /// The cost of an item of so many output tokens, in microseconds: better, once they are known.
    pub fn tokens_us(&self, tokens: u32) -> u64 {
        (self.fixed_us + self.token_us * f64::from(tokens)) as u64
    }

    /// p95 of the time of a job with this predicted cost.
    pub fn p95(&self, cost_us: u64) -> Duration {
        Duration::from_micros((cost_us as f64 * self.p95_ratio) as u64)
    }
}

/// Time of a prompt token of a model, as its workers measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTime {
    token_us: f64,
}

/// Shortest and longest time of a prompt token that is believed, in microseconds: of a small model on a large GPU, and of a
/// large one on a small CPU.
const TOKEN_US: (f64, f64) = (0.1, 100_000.0);

impl PrefillTime {
    /// For models of which nobody has measured it yet: of a decoder of two billion weights on sixteen cores.
    pub const UNMEASURED: Self = Self { token_us: 250.0 };

    /// The median of what workers report, in microseconds: one that is wrong, or lies, moves it little. What is no time is
    /// no report.
    pub fn of_workers(reported: impl IntoIterator<Item = Option<f64>>) -> Self {
        let is_time = |us: &f64| us.is_finite() && *us >= 0.0;
        let mut all: Vec<f64> = reported.into_iter().flatten().filter(is_time).collect();
        all.sort_by(f64::total_cmp);
        let median = all.get(all.len().saturating_sub(1) / 2);
        median.map_or(Self::UNMEASURED, |us| Self { token_us: us.clamp(TOKEN_US.0, TOKEN_US.1) })
    }

    /// Time of so many tokens, in microseconds.
    pub fn of_tokens(&self, n_tokens: u64) -> u64 {
        // A cast from a float saturates.
        (self.token_us * n_tokens as f64) as u64
    }
}

/// Forecast of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Until the encoder's weights are in memory; zero: they are.
    pub cold: Duration,
    /// From there until it begins.
    pub queue: Duration,
    /// From there.
    pub cost: Duration,
    /// p95 of the same.
    pub p95: Duration,
}

impl Forecast {
    /// From now to its begin.
    pub fn begin(&self) -> Duration {
        self.cold.saturating_add(self.queue)
    }

    /// From now to its end, by which items are admitted. A load of weights is left out: an encoder whose items were refused
    /// for it would never be loaded.
    pub fn end(&self) -> Duration {
        self.queue.saturating_add(self.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_token_takes_the_median_of_what_workers_report() {
        let cases: [(&str, &[Option<f64>], u64); 9] = [
            ("no worker", &[], 250_000),
            ("none has measured", &[None, None], 250_000),
            ("one has", &[None, Some(30.0)], 30_000),
            ("one is slower for a while", &[Some(30.0), Some(31.0), Some(90.0)], 31_000),
            ("one lies", &[Some(30.0), Some(1e300), Some(31.0), Some(32.0)], 31_000),
            ("no number", &[Some(f64::NAN), Some(-3.0), Some(f64::INFINITY)], 250_000),
            ("nothing", &[Some(0.0)], 100),
            ("too much", &[Some(1e300)], 100_000_000),
            ("two", &[Some(40.0), Some(20.0)], 20_000),
        ];
        for (what, reported, expect) in cases {
            let time = PrefillTime::of_workers(reported.iter().copied());
            assert_eq!(time.of_tokens(1000), expect, "{what}");
        }
        assert_eq!(PrefillTime::of_workers([Some(1e9)]).of_tokens(u64::MAX), u64::MAX);
    }

    #[test]
    fn costs_are_lines_and_nonsense_is_nothing() {
        let wire = |token_us, tokens_per_byte, p95_ratio| v1::EncodeCost {
            fixed_us: 1000,
            token_us,
            tokens_per_byte,
            p95_ratio,
            ..v1::EncodeCost::default()
        };
        let curve = Curve::from(&wire(20.0, 0.01, 1.5));
        assert_eq!([curve.cost_us(0), curve.cost_us(10_000), curve.tokens_us(100)], [1000, 3000, 3000]);
        assert_eq!(curve.p95(3000), Duration::from_micros(4500));
        for nonsense in [wire(f64::NAN, 1.0, f64::NAN), wire(-5.0, 1.0, -1.0), wire(1.0, f64::INFINITY, 0.0)]
        {
            let curve = Curve::from(&nonsense);
            assert_eq!((curve.cost_us(u64::MAX), curve.p95(10)), (1000, Duration::from_micros(10)));
        }
    }
}
