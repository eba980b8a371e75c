//! Causal convolutions of channels, whose last rows stay in a cache.

use super::context::Context;
use super::math::activate;
use super::matrix::{CpuTensor, unwritten};
use super::simd::{Kernel, Simd};
use crate::ops::{Activation, PADDING_SLOT, RecurrentBatch, StateLayout};
use crate::states::HostStates;
use crate::stored::Taps;

/// Taps of a causal convolution.
#[derive(Debug)]
pub struct CpuCausalConv(pub(super) Taps);

/// States of a layer, and the sequences that have them.
pub(super) struct At<'a> {
    pub(super) states: &'a mut HostStates,
    pub(super) layer: usize,
    pub(super) batch: RecurrentBatch<'a>,
}

/// `act(bias + Σⱼ weight[j] · x[t − kernel + 1 + j])`, `[n_tokens, channels]`.
pub(super) fn causal_conv(
    context: &Context,
    x: &CpuTensor,
    w: &CpuCausalConv,
    act: Activation,
    at: At<'_>,
) -> CpuTensor {
    let (n_tokens, channels) = x.dims();
    let At { states, layer, batch } = at;
    let n_taps = w.0.kernel[1];
    let mut out = unwritten(n_tokens * channels);
    let row_ns = (channels * n_taps).div_ceil(4);
    context.pool.rows(&mut out, channels, row_ns, |first, rows| {
        for (t, out) in (first..).zip(rows.chunks_exact_mut(channels)) {
            let seq = batch.query_start_loc.partition_point(|&start| start as usize <= t) - 1;
            let (start, slot) = (batch.query_start_loc[seq] as usize, batch.slots[seq]);
            if slot == PADDING_SLOT {
                out.fill(0.0);
                continue;
            }
            let before = states.conv(layer, slot);
            let mut taps: [&[f32]; StateLayout::MAX_CONV_KERNEL] = [&[]; _];
            for (tap, row) in taps.iter_mut().zip(t - start..).take(n_taps) {
                *tap = match row.checked_sub(n_taps - 1) {
                    Some(row) => x.row(start + row),
                    None => &before[row * channels..][..channels],
                };
            }
            context.isa.run(ConvolveRow { taps: &taps[..n_taps], w: &w.0, act, out });
        }
    });
    for (rows, &slot) in batch.query_start_loc.windows(2).zip(batch.slots) {
        if slot != PADDING_SLOT {
            keep_last(
                states.conv_mut(layer, slot),
                &x.data()[rows[0] as usize * channels..rows[1] as usize * channels],
            );
        }
    }
    CpuTensor::new(out, n_tokens, channels)
}

/// Keeps the last values of a state and the rows after it.
fn keep_last(state: &mut [f32], rows: &[f32]) {
    let n_new = rows.len().min(state.len());
    state.copy_within(n_new.., 0);
    let n_old = state.len() - n_new;
    state[n_old..].copy_from_slice(&rows[rows.len() - n_new..]);
}

/// One row of a convolution.
struct ConvolveRow<'a> {
    /// Rows under the taps, `[channels]` each.
    taps: &'a [&'a [f32]],
    w: &'a Taps,
    act: Activation,
    /// `[channels]`.
    out: &'a mut [f32],
}

impl Kernel for ConvolveRow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (channels, mut at) = (self.w.channels, 0);
        // Indices: what an iterator over several slices calls is not inlined everywhere.
        while at < channels {
            let end = channels.min(at + S::LANES);
            let mut sum = match &self.w.bias {
                Some(bias) => s.load_or(&bias[at..end], 0.0),
                None => s.splat(0.0),
            };
            for tap in 0..self.taps.len() {
                let (x, w) = (&self.taps[tap][at..end], &self.w.weight[tap * channels..][at..end]);
                sum = s.fma(s.load_or(x, 0.0), s.load_or(w, 0.0), sum);
            }
            s.store_some(&mut self.out[at..end], activate(s, self.act, sum));
            at = end;
        }
    }
}
