//! Scores of Swin's second version: cosines of queries and keys times a factor of each head, and a bias that a small
//! network makes of each offset.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/swinv2/modeling_swinv2.py>.
//! The network is computed once, when the weights are loaded.

use crate::encoder::position_bias::n_offsets;
use crate::error::ModelError;
use crate::layers::{Loader, norm_parts};
use triptych_core::DType;
use triptych_kernels::Backend;
use triptych_kernels::ops::{AttentionShape, NormKind, WeightView};

/// Width of the network between its layers.
const INNER: usize = 512;

/// Largest bias.
const MOST_BIAS: f32 = 16.0;

/// Largest factor on a cosine.
const MOST_FACTOR: f32 = 100.0;

/// Added to the mean of squares, as little as tells nothing but zeros apart.
const EPS: f32 = 1e-12;

/// Factors that make cosines of scores, which are products times `1 / head_dim`.
pub(super) struct CosineScores<B: Backend> {
    // Of each head by itself; afterwards its root mean square is 1.
    head: B::Norm,
    // Of all heads together, whose root mean square is 1 by then, so that it multiplies each by its factor alone.
    factors: B::Norm,
    n_heads: usize,
}

impl<B: Backend> CosineScores<B> {
    /// Loads the logarithms of the factors, `[n_heads, 1, 1]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, name: &str, shape: AttentionShape) -> Result<Self, ModelError> {
        let AttentionShape { n_heads, head_dim, .. } = shape;
        let logs = loader.bare_values(name, &[n_heads, 1, 1])?;
        let factor = |log: &f32| log.min(MOST_FACTOR.ln()).exp();
        let factors: Vec<f32> =
            logs.iter().flat_map(|log| std::iter::repeat_n(factor(log), head_dim)).collect();
        let norm = |values: &[f32]| {
            let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let view = WeightView { dtype: DType::F32, shape: &[values.len()], data: &data };
            loader.backend().load_norm(NormKind::Rms, view, None, EPS)
        };
        Ok(Self { head: norm(&vec![1.0; head_dim])?, factors: norm(&factors)?, n_heads })
    }

    /// Queries and keys, `[n_rows, n_heads·head_dim]` each, whose products are cosines times the factors and `head_dim`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn apply(&self, backend: &B, [q, k]: [B::Tensor; 2]) -> Result<[B::Tensor; 2], ModelError> {
        let q = norm_parts(backend, q, &self.head, self.n_heads)?;
        Ok([backend.norm(&q, &self.factors)?, norm_parts(backend, k, &self.head, self.n_heads)?])
    }
}

/// Biases `[n_offsets, n_heads]` of the offsets in windows of `side` rows, as the network `name` makes them of offsets in units of
/// windows of `measured` rows.
///
/// # Errors
/// [`ModelError`] for a tensor that is missing or has another shape.
pub(super) fn offset_biases<B: Backend>(
    loader: &Loader<'_, B>,
    name: &str,
    [side, measured]: [usize; 2],
    n_heads: usize,
) -> Result<Vec<f32>, ModelError> {
    let values = |part: &str, shape: &[usize]| loader.bare_values(&format!("{name}.{part}"), shape);
    let network = Network {
        inner: values("0.weight", &[INNER, 2])?,
        bias: values("0.bias", &[INNER])?,
        outer: values("2.weight", &[n_heads, INNER])?,
    };
    let mut biases = Vec::with_capacity(n_offsets([side; 2]) * n_heads);
    let offsets =
        || (0..(2 * side).saturating_sub(1)).map(|i| measure(i as f32 + 1.0 - side as f32, measured));
    for (down, across) in offsets().flat_map(|down| offsets().map(move |across| (down, across))) {
        biases.extend(network.biases([down, across]));
    }
    Ok(biases)
}

/// An offset on a logarithmic scale, on which that across a window of `measured` rows is `log₈ 9`.
fn measure(offset: f32, measured: usize) -> f32 {
    let relative = if measured > 1 { offset / (measured as f32 - 1.0) } else { offset };
    (8.0 * relative.abs() + 1.0).log2() / 3.0 * relative.signum()
}

struct Network {
    /// `[INNER, 2]`.
    inner: Vec<f32>,
    /// `[INNER]`.
    bias: Vec<f32>,
    /// `[n_heads, INNER]`.
    outer: Vec<f32>,
}

impl Network {
    /// Bias of each head.
    fn biases(&self, [down, across]: [f32; 2]) -> impl Iterator<Item = f32> {
        let (weights, _) = self.inner.as_chunks::<2>();
        let inner =
            weights.iter().zip(&self.bias).map(|([y, x], bias)| (y * down + x * across + bias).max(0.0));
        let inner: Vec<f32> = inner.collect();
        self.outer.chunks_exact(INNER).map(move |row| {
            let sum: f32 = row.iter().zip(&inner).map(|(a, b)| a * b).sum();
            MOST_BIAS / (1.0 + (-sum).exp())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_measured_by_the_window_of_the_training() {
        let check = |offset, measured, expect: f32| {
            let got = measure(offset, measured);
            assert!((got - expect).abs() < 1e-6, "{offset} by {measured}: {got}");
        };
        check(0.0, 8, 0.0);
        check(7.0, 8, 9.0_f32.ln() / 8.0_f32.ln());
        check(-7.0, 8, -9.0_f32.ln() / 8.0_f32.ln());
        check(15.0, 8, (1.0 + 8.0 * 15.0 / 7.0_f32).ln() / 8.0_f32.ln());
        check(0.0, 1, 0.0);
    }

    #[test]
    fn a_bias_is_between_zero_and_the_largest() {
        let mut inner = vec![0.0; 2 * INNER];
        inner[0] = 1.0;
        let network =
            Network { inner, bias: vec![0.0; INNER], outer: [vec![1.0; INNER], vec![-1.0; INNER]].concat() };
        let at = |down| network.biases([down, 5.0]).collect::<Vec<f32>>();
        assert_eq!(at(-3.0), [8.0, 8.0], "the first layer gives no negative value");
        let [above, below] = at(3.0)[..] else { unreachable!("two heads") };
        assert!(
            (above - 16.0 / (1.0 + (-3.0_f32).exp())).abs() < 1e-5 && (above + below - 16.0).abs() < 1e-5
        );
    }
}
