//! Checks of recurrent states and of the ops over them.

use super::{Dims, divides, ends, indices, same};
use crate::ops::{KernelError, RecurrentSequences, Result, StateLayout};

/// An error if a cache of this layout cannot be addressed, or is of widths that no back end has. Returns its values.
pub(crate) fn state_layout(layout: StateLayout) -> Result<usize> {
    let StateLayout { n_layers, n_slots, conv_channels, conv_kernel, n_heads, key_dim, value_dim } = layout;
    let is_known = n_layers > 0
        && (1..=StateLayout::MAX_CONV_KERNEL).contains(&conv_kernel)
        && (1..=StateLayout::MAX_KEY_DIM).contains(&key_dim);
    // Sizes that saturate are refused with those that are too many.
    match layout.slot_values().checked_mul(n_slots.max(1)) {
        Some(n) if is_known && n <= isize::MAX as usize / 16 => Ok(layout.slot_values() * n_slots),
        _ => Err(KernelError::Shape {
            op: "state_cache",
            what: "layout",
            expected: vec![],
            actual: vec![n_layers, n_slots, conv_channels, conv_kernel, n_heads, key_dim, value_dim],
        }),
    }
}

/// Checks of `copy_states`.
pub(crate) fn copy_states(layout: StateLayout, pairs: &[(u32, u32)]) -> Result<()> {
    pairs.iter().try_for_each(|&(from, to)| indices("copy_states", "slot", &[from, to], layout.n_slots))
}

/// Checks of `reset_states`.
pub(crate) fn reset_states(layout: StateLayout, slots: &[u32]) -> Result<()> {
    indices("reset_states", "slot", slots, layout.n_slots)
}

/// States that an op is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatesAt {
    pub(crate) layout: StateLayout,
    pub(crate) layer: usize,
    pub(crate) seqs: RecurrentSequences,
}

/// An error unless the layer and the slots are of the cache, and the sequences are those of the rows.
fn states(op: &'static str, at: StatesAt, n_rows: usize) -> Result<()> {
    let StatesAt { layout, layer, seqs } = at;
    if layer >= layout.n_layers {
        return Err(KernelError::Index { op, what: "layer", index: layer, len: layout.n_layers });
    }
    if seqs.bound > layout.n_slots {
        return Err(KernelError::Index { op, what: "slot", index: seqs.bound - 1, len: layout.n_slots });
    }
    ends(op, "rows of the sequences", seqs.queries, n_rows)
}

/// Checks of `causal_conv`; `taps` are the kernel and channels of the weights.
pub(crate) fn causal_conv(x: Dims, taps: [usize; 2], at: StatesAt) -> Result<()> {
    let (op, layout) = ("causal_conv", at.layout);
    same(op, "kernel and channels", &taps, &[layout.conv_kernel, layout.conv_channels])?;
    same(op, "x width", &[x.1], &[layout.conv_channels])?;
    states(op, at, x.0)
}

/// Checks of `gated_delta_rule`; `[qkv, beta_decay]` and the heads of keys and of the decay. Returns the dimensions of the result.
pub(crate) fn gated_delta_rule(
    [qkv, beta_decay]: [Dims; 2],
    [n_key_heads, n_decays]: [usize; 2],
    at: StatesAt,
) -> Result<Dims> {
    let op = "gated_delta_rule";
    let StateLayout { n_heads, key_dim, value_dim, .. } = at.layout;
    same(op, "heads of the decay", &[n_decays], &[n_heads])?;
    divides(op, "value heads of a key head", n_key_heads, n_heads)?;
    let width = n_heads * value_dim;
    let key_width = n_key_heads.saturating_mul(2 * key_dim);
    same(op, "qkv width", &[qkv.1], &[key_width.saturating_add(width)])?;
    same(op, "beta and decay", &[beta_decay.0, beta_decay.1], &[qkv.0, 2 * n_heads])?;
    states(op, at, qkv.0)?;
    Ok((qkv.0, width))
}

/// Checks of `multiply_gated`.
pub(crate) fn multiply_gated(x: Dims, gate: Dims) -> Result<()> {
    same("multiply_gated", "gate", &[gate.0, gate.1], &[x.0, x.1])
}
