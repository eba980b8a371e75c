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
