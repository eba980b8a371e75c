//! Times of forwards by curves, for workers that compute nothing.

use super::{BatchShape, CostCurves, Costs, Spread, StepShape};
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::time::Duration;
use triptych_core::TowerIdx;
use triptych_models::compute::{ForwardTimes, StepSizes};

/// Times by curves, drawn as the simulator draws them, of several towers each by its own; those of the first where the curves have no
/// more.
pub struct CurveTimes {
    costs: Costs,
    rng: Mutex<StdRng>,
}

impl CurveTimes {
    /// Times of curves without mistakes, from a seed.
    pub fn new(curves: &CostCurves, seed: u64) -> Self {
        Self { costs: Costs::new(curves), rng: Mutex::new(StdRng::seed_from_u64(seed)) }
    }

    fn draw(&self, spread: Spread) -> Duration {
        spread.draw(&mut *self.rng.lock())
    }
}

impl ForwardTimes for CurveTimes {
    fn step(&self, sizes: StepSizes) -> Duration {
        self.draw(self.costs.step(StepShape {
            prefill_tokens: sizes.prefill_tokens,
            prefill_context: sizes.prefill_context,
            decodes: sizes.decodes,
            decode_context: sizes.decode_context,
            projected_rows: 0,
        }))
    }

    fn encode(&self, tower: TowerIdx, tokens: &[u32]) -> Duration {
        self.draw(self.costs.encoder(tower).encode(BatchShape::of(tokens.iter().copied())))
    }

    fn project(&self, rows: usize) -> Duration {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        self.draw(self.costs.step(StepShape { projected_rows: rows, ..StepShape::default() }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{curves, two_towers};
    use super::*;

    #[test]
    fn forwards_take_about_what_the_curves_say() {
        let times = CurveTimes::new(&curves(), 1);
        let mean = |of: &dyn Fn() -> Duration| (0..200).map(|_| of().as_secs_f64()).sum::<f64>() / 200.0;
        // One item of 256 tokens: 1 ms, and 0.2 ms a token.
        let encode = mean(&|| times.encode(TowerIdx(0), &[256]));
        assert!((encode / 0.0522 - 1.0).abs() < 0.05, "{encode}");
        // A step with eight sequences of 64 keys: 2 ms, 0.1 ms each, 0.05 us a key.
        let sizes = StepSizes { decodes: 8, decode_context: 512, ..StepSizes::default() };
        let step = mean(&|| times.step(sizes));
        assert!((step / 0.002_825_6 - 1.0).abs() < 0.05, "{step}");
    }

    #[test]
    fn a_tower_takes_what_its_own_curves_say() {
        let times = CurveTimes::new(&two_towers(), 1);
        let mean = |tower| {
            (0..200).map(|_| times.encode(TowerIdx(tower), &[256]).as_secs_f64()).sum::<f64>() / 200.0
        };
        let (low, high, beyond) = (mean(0), mean(1), mean(2));
        assert!((low / 0.0522 - 1.0).abs() < 0.05 && (high / 0.0174 - 1.0).abs() < 0.05, "{low} and {high}");
        assert!((beyond / low - 1.0).abs() < 0.05, "a tower without curves: {beyond}");
    }
}
