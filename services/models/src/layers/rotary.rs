//! Rotary embedding: the angle of each pair of values of a head.
//!
//! Paper: <https://arxiv.org/abs/2104.09864>; M-RoPE: <https://arxiv.org/abs/2409.12191>, section 2.1. Angles
//! are computed in f32 as the published models do; the back end does the turning.

use crate::spec::{RotaryAxes, RotaryScaling, RotarySpec, YarnSpec};
use triptych_kernels::KernelError;
use triptych_kernels::ops::{RopeShape, Rotation, StageBuilder};

/// The frequencies of a model. For the pair `i` of a head the angle is `position[axis[i]] · frequency[i]`.
#[derive(Clone, Debug)]
pub struct Rotary {
    // (axis of the position, frequency), `[rotary_dim / 2]`.
    pairs: Vec<(usize, f32)>,
    // On cosines and sines.
    factor: f32,
    shape: RopeShape,
}

impl Rotary {
    /// The frequencies for heads of `head_dim`.
    pub fn new(spec: &RotarySpec, head_dim: usize) -> Self {
        let rotary_dim = spec.rotary_dim.unwrap_or(head_dim);
        let half = rotary_dim / 2;
        let frequency = |i: usize, width: usize| {
            let trained = 1.0 / spec.theta.powf((2 * i) as f32 / width as f32);
            match spec.scaling {
                RotaryScaling::Absent => trained,
                RotaryScaling::Linear { factor } => trained / factor,
                RotaryScaling::Llama3 { .. } => scaled(trained, spec.scaling),
                RotaryScaling::Yarn(yarn) => {
                    let kept = kept_share(yarn, spec.theta, width, i);
                    trained / yarn.factor * (1.0 - kept) + trained * kept
                }
            }
        };
        let pair = |i: usize| match spec.axes {
            RotaryAxes::Single => (0, frequency(i, rotary_dim)),
            RotaryAxes::Sections([t, h, _]) => {
                (usize::from(i >= t) + usize::from(i >= t + h), frequency(i, rotary_dim))
            }
            RotaryAxes::Interleaved(sections) => {
                let axis = i % 3;
                (if i / 3 < sections[axis] { axis } else { 0 }, frequency(i, rotary_dim))
            }
            RotaryAxes::Plane => (1 + usize::from(i >= half / 2), frequency(i % (half / 2).max(1), half)),
            RotaryAxes::AlternatingPlane => {
                let is_width = usize::from(i >= half / 2);
                (1 + is_width, frequency(2 * (i % (half / 2).max(1)) + is_width, rotary_dim))
            }
        };
        let shape = RopeShape { head_dim, rotary_dim, pairs: spec.pairs };
        let factor = match spec.scaling {
            RotaryScaling::Yarn(yarn) => yarn.attention_factor,
            _ => 1.0,
        };
        Self { pairs: (0..half).map(pair).collect(), factor, shape }
    }

    /// Pairs of a head that are rotated.
    pub fn n_pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Adds the angles of tokens at `positions: [n_tokens]`, each (temporal, height, width), to a step.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the step has no room for them.
    pub fn stage(&self, builder: &mut StageBuilder, positions: &[[u32; 3]]) -> Result<Rotation, KernelError> {
        let [cos, sin] = self.tables(positions);
        Ok(Rotation { shape: self.shape, angles: builder.angles(&cos, &sin, self.pairs.len())? })
    }

    /// Cosines and sines, each `[n_tokens, rotary_dim / 2]`.
    fn tables(&self, positions: &[[u32; 3]]) -> [Vec<f32>; 2] {
        let n = positions.len() * self.pairs.len();
        let mut cosines = Vec::with_capacity(n);
        let mut sines = Vec::with_capacity(n);
        for position in positions {
            for &(axis, frequency) in &self.pairs {
                let (sin, cos) = (position[axis] as f32 * frequency).sin_cos();
                cosines.push(self.factor * cos);
                sines.push(self.factor * sin);
            }
        }
        [cosines, sines]
    }
}

/// A frequency, scaled for a longer context
/// (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/modeling_rope_utils.py>).
fn scaled(frequency: f32, scaling: RotaryScaling) -> f32 {
    let RotaryScaling::Llama3 { factor, low, high, context } = scaling else { return frequency };
    let wave = std::f32::consts::TAU / frequency;
    if wave > context / low {
        frequency / factor
    } else if wave < context / high {
        frequency
    } else {
        let smooth = (context / wave - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// Share of frequency `i` of `width / 2` that YaRN keeps, 0 to 1
/// (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/modeling_rope_utils.py>).
fn kept_share(yarn: YarnSpec, theta: f32, width: usize, i: usize) -> f32 {
    let width = width as f64;
    // The frequency that turns so often within the context.
    let bound = |turns: f32| {
        let turns = f64::from(turns) * std::f64::consts::TAU;
        width * (f64::from(yarn.context) / turns).ln() / (2.0 * f64::from(theta).ln())
    };
    let mut low = bound(yarn.fast);
    let mut high = bound(yarn.slow);
    if yarn.truncate {
        low = low.floor();
        high = high.ceil();
    }
    low = low.max(0.0);
    high = high.min(width - 1.0);
    if low == high {
        high += 0.001;
    }
    (1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frequencies are those of transformers, in `tests/golden/rotary.json`.
    #[test]
    fn scaled_frequencies_are_the_references() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/rotary.json");
        let text = std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let cases: Vec<serde_json::Value> = serde_json::from_slice(&text).expect("JSON");
        assert!(cases.len() >= 4);
        for case in &cases {
            let config = crate::family::Config::new("config.json", &case["config"]);
            let head_dim = case["head_dim"].as_u64().expect("a number") as usize;
            let spec = crate::family::rotary(&config, head_dim).expect("a rotation");
            let rotary = Rotary::new(&spec, head_dim);
            let expected: Vec<f32> = serde_json::from_value(case["frequencies"].clone()).expect("numbers");
            assert_eq!(rotary.pairs.len(), expected.len(), "{}", case["config"]);
            for ((_, actual), expect) in rotary.pairs.iter().zip(&expected) {
                assert!((actual / expect - 1.0).abs() < 1e-5, "{}: {actual} {expect}", case["config"]);
            }
            let factor = case["attention_factor"].as_f64().expect("a number") as f32;
            assert!((rotary.factor - factor).abs() < 1e-6, "{}: {}", case["config"], rotary.factor);
        }
    }

    fn angles(axes: RotaryAxes, head_dim: usize, position: [u32; 3]) -> Vec<f32> {
        let [cos, sin] = Rotary::new(&RotarySpec::new(10_000.0, axes), head_dim).tables(&[position]);
        cos.iter().zip(&sin).map(|(c, s)| s.atan2(*c)).collect()
    }

    fn check(axes: RotaryAxes, head_dim: usize, position: [u32; 3], expect: &[f32]) {
        let actual = angles(axes, head_dim, position);
        assert_eq!(actual.len(), expect.len());
        for (a, e) in actual.iter().zip(expect) {
            assert!((a - e).abs() < 1e-6, "{actual:?} {expect:?}");
        }
    }

    #[test]
    fn text_follows_the_temporal_part() {
        check(RotaryAxes::Single, 4, [2, 9, 9], &[2.0, 0.02]);
    }

    #[test]
    fn sections_share_out_the_frequencies_in_order() {
        check(RotaryAxes::Sections([1, 1, 2]), 8, [1, 2, 3], &[1.0, 0.2, 0.03, 0.003]);
    }

    #[test]
    fn interleaved_sections_take_frequencies_in_turn() {
        let base = |i: usize| 1.0 / 10_000f32.powf((2 * i) as f32 / 12.0);
        let axes = [1.0, 2.0, 3.0, 1.0, 2.0, 1.0];
        let expect: Vec<f32> = axes.iter().enumerate().map(|(i, position)| position * base(i)).collect();
        check(RotaryAxes::Interleaved([3, 2, 1]), 12, [1, 2, 3], &expect);
    }

    #[test]
    fn axes_of_an_alternating_plane_have_every_second_frequency() {
        check(RotaryAxes::AlternatingPlane, 8, [7, 1, 2], &[1.0, 0.01, 0.2, 0.002]);
    }

    #[test]
    fn both_axes_of_a_plane_have_all_frequencies() {
        check(RotaryAxes::Plane, 8, [7, 1, 2], &[1.0, 0.01, 2.0, 0.02]);
    }
}
