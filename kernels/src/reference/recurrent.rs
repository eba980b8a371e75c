//! Reference ops over recurrent states: the formulas, value by value.

use candle_core::Tensor;

use super::rows::activation;
use super::tensor::{InOp, dims, matrix, values};
use crate::check::Dims;
use crate::ops::{Activation, DeltaRows, PADDING_SLOT, RecurrentBatch, Result};
use crate::states::{HostStates, matrix_of};
use crate::stored::{Decays, Taps};

/// States of a layer, and the sequences that have them.
pub(super) struct At<'a> {
    pub(super) states: &'a mut HostStates,
    pub(super) layer: usize,
    pub(super) batch: RecurrentBatch<'a>,
}

impl At<'_> {
    /// Rows and slot of each sequence that is not padding.
    fn seqs(&self) -> Vec<(std::ops::Range<usize>, u32)> {
        let rows = self.batch.query_start_loc.windows(2).map(|at| at[0] as usize..at[1] as usize);
        rows.zip(self.batch.slots.iter().copied()).filter(|(_, slot)| *slot != PADDING_SLOT).collect()
    }
}

/// `act(bias + Σⱼ weight[j] · x[t − kernel + 1 + j])`, `[n_tokens, channels]`.
pub(super) fn causal_conv(x: &Tensor, w: &Taps, act: Activation, at: At<'_>) -> Result<Tensor> {
    let (op, (n_tokens, channels)) = ("causal_conv", dims(x));
    let (rows, kept) = (values(op, x)?, w.kernel[1] - 1);
    let mut out = vec![0.0; n_tokens * channels];
    for (seq, slot) in at.seqs() {
        let mut history = at.states.conv(at.layer, slot).to_vec();
        history.extend(&rows[seq.start * channels..seq.end * channels]);
        for (t, row) in seq.clone().enumerate() {
            for channel in 0..channels {
                let taps = (0..=kept)
                    .map(|j| w.weight[j * channels + channel] * history[(t + j) * channels + channel]);
                let bias = w.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                out[row * channels + channel] = taps.fold(bias, |sum, term| sum + term);
            }
        }
        let last = history.len() - kept * channels;
        at.states.conv_mut(at.layer, slot).copy_from_slice(&history[last..]);
    }
    let out = activation(&matrix(op, out, (n_tokens, channels))?, act).op(op)?;
    padded_with_zeros(op, &out, at.batch)
}

/// The same with zeros in the rows of padding: an activation of zero need not be zero.
fn padded_with_zeros(op: &'static str, x: &Tensor, batch: RecurrentBatch<'_>) -> Result<Tensor> {
    let (mut out, width) = (values(op, x)?, dims(x).1);
    for (rows, slot) in batch.query_start_loc.windows(2).zip(batch.slots) {
        if *slot == PADDING_SLOT {
            out[rows[0] as usize * width..rows[1] as usize * width].fill(0.0);
        }
    }
    matrix(op, out, dims(x))
}

/// The gated delta rule, `[n_tokens, n_heads · value_dim]`.
pub(super) fn gated_delta_rule(
    rows: DeltaRows<'_, Tensor>,
    decay: &Decays,
    out: Dims,
    at: At<'_>,
) -> Result<Tensor> {
    let (op, layout) = ("gated_delta_rule", at.states.layout());
    let (n_heads, key_dim, value_dim) = (layout.n_heads, layout.key_dim, layout.value_dim);
    let (qkv, beta_decay) = (values(op, rows.qkv)?, values(op, rows.beta_decay)?);
    let (width, key_width) = (dims(rows.qkv).1, rows.n_key_heads * key_dim);
    let mut sums = vec![0.0; out.0 * out.1];
    for (seq, slot) in at.seqs() {
        for (t, head) in seq.flat_map(|t| (0..n_heads).map(move |head| (t, head))) {
            let row = &qkv[t * width..][..width];
            let key_head = head / (n_heads / rows.n_key_heads) * key_dim;
            let q = unit(&row[key_head..][..key_dim], 1.0 / (key_dim as f32).sqrt());
            let k = unit(&row[key_width + key_head..][..key_dim], 1.0);
            let v = &row[2 * key_width + head * value_dim..][..value_dim];
            let [b, a] = [head, n_heads + head].map(|i| beta_decay[t * 2 * n_heads + i]);
            let [beta, decayed] = gates(decay, head, [b, a]);
            let state = &mut at.states.values_mut()[matrix_of(layout, [at.layer, head], slot)];
            state.iter_mut().for_each(|value| *value *= decayed);
            let sum = &mut sums[t * out.1 + head * value_dim..][..value_dim];
            for column in 0..value_dim {
                let at = |key: usize| key * value_dim + column;
                let known: f32 = (0..key_dim).map(|key| state[at(key)] * k[key]).sum();
                let delta = beta * (v[column] - known);
                (0..key_dim).for_each(|key| state[at(key)] += k[key] * delta);
                sum[column] = (0..key_dim).map(|key| state[at(key)] * q[key]).sum();
            }
        }
    }
    matrix(op, sums, out)
}

/// A vector over its L2 norm, times a factor.
fn unit(x: &[f32], factor: f32) -> Vec<f32> {
    let square: f32 = x.iter().map(|x| x * x).sum();
    let factor = factor / (square + 1e-6).sqrt();
    x.iter().map(|x| x * factor).collect()
}

/// Weight of a head's update and factor on its state, from the two inputs of a token.
fn gates(decay: &Decays, head: usize, [b, a]: [f32; 2]) -> [f32; 2] {
    let step = a + decay.dt_bias[head];
    // Above 20 the logarithm is the step itself in f32.
    let softplus = if step > 20.0 { step } else { step.exp().ln_1p() };
    [1.0 / (1.0 + (-b).exp()), (decay.rates[head] * softplus).exp()]
}
