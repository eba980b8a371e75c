//! Shape and index checks, the same for every back end.
//!
//! Each function takes what an op was called with and gives the sizes that the op works with, so that a back
//! end cannot compute with a number nobody checked. Nothing here touches a value of a tensor.

use triptych_core::EncodedRows;

use crate::ops::{Angles, CarriedToken, ChooseBatch, Indices, KernelError, Offsets, Result, RopeShape};

mod attention;
mod conv;
mod recurrent;
pub(crate) mod sizes;

pub(crate) use attention::{
    Attended, attention, attention_weights, bias_tables, copy_blocks, fused_qkv, kv_layout, layer, paged,
    same_heads, swap, write_kv,
};
pub(crate) use conv::{Planes, Windows, depthwise2d, unfold, unfold2d};
pub(crate) use recurrent::{
    StatesAt, causal_conv, copy_states, gated_delta_rule, multiply_gated, reset_states, state_layout,
};
pub(crate) use sizes::{divides, indices, same};

/// `(n_tokens, width)` of an activation.
pub(crate) type Dims = (usize, usize);

/// An error unless every index is below `len`, which the largest of them tells.
pub(crate) fn below(op: &'static str, what: &'static str, indices: Indices, len: usize) -> Result<()> {
    match indices.bound() {
        bound if bound <= len => Ok(()),
        bound => Err(KernelError::Index { op, what, index: bound - 1, len }),
    }
}

/// An error unless offsets end at `len`.
pub(crate) fn ends(op: &'static str, what: &'static str, offsets: Offsets, len: usize) -> Result<()> {
    same(op, what, &[offsets.n_rows()], &[len])
}

/// Checks of `upload`.
pub(crate) fn upload(n_values: usize, n_tokens: usize, width: usize) -> Result<()> {
    same("upload", "values", &[n_values], &[n_tokens.saturating_mul(width)])
}

/// Dimensions of the result of `upload_rows`.
pub(crate) fn upload_rows(rows: &[EncodedRows<'_>]) -> Result<Dims> {
    let width = rows.first().map_or(0, |rows| rows.hidden());
    rows.iter().try_for_each(|rows| same("upload_rows", "width", &[rows.hidden()], &[width]))?;
    Ok((rows.iter().map(|rows| rows.n_rows()).sum(), width))
}

/// An error unless columns `start .. start + width` exist.
pub(crate) fn columns(dims: Dims, start: usize, width: usize) -> Result<()> {
    match start.checked_add(width) {
        Some(end) if end <= dims.1 => Ok(()),
        end => Err(KernelError::Index {
            op: "columns",
            what: "end",
            index: end.unwrap_or(usize::MAX),
            len: dims.1,
        }),
    }
}

/// Dimensions of the result of `merge_rows`.
pub(crate) fn merge_rows(dims: Dims, group: usize) -> Result<Dims> {
    Ok((divides("merge_rows", "rows", group, dims.0)?, dims.1.saturating_mul(group)))
}

/// Checks of `scatter_rows`.
pub(crate) fn scatter_rows(x: Dims, rows: Indices, src: Dims) -> Result<()> {
    same("scatter_rows", "src", &[src.0, src.1], &[rows.len(), x.1])?;
    below("scatter_rows", "row", rows, x.0)
}

/// Checks of `linear`.
pub(crate) fn linear(x: Dims, in_out: Dims, residual: Option<Dims>) -> Result<()> {
    same("linear", "x width", &[x.1], &[in_out.0])?;
    match residual {
        Some(r) => same("linear", "residual", &[r.0, r.1], &[x.0, in_out.1]),
        None => Ok(()),
    }
}

/// Checks of `load_experts`, by `(n_in, n_out)` of both layers of each expert. Returns those of the experts.
pub(crate) fn experts(mut layers: impl Iterator<Item = [Dims; 2]>) -> Result<[Dims; 2]> {
    let op = "load_experts";
    let Some(first) = layers.next() else {
        return Err(KernelError::Shape { op, what: "experts", expected: vec![1], actual: vec![0] });
    };
    let [(hidden, inner), (width, out)] = first;
    same(op, "gate and up, and what comes out", &[inner, out], &[2 * width, hidden])?;
    layers.try_for_each(|[gate_up, down]| {
        same(op, "gate and up", &[gate_up.0, gate_up.1], &[hidden, inner])?;
        same(op, "down", &[down.0, down.1], &[width, out])
    })?;
    Ok(first)
}

/// Checks of `fused_experts` but of the layers, whose dimensions those of its products are checked against; a token goes to `top_k`
/// experts, `most` of them at most.
pub(crate) fn fused_experts(
    x: Dims,
    logits: Dims,
    n_experts: usize,
    [top_k, most]: [usize; 2],
) -> Result<()> {
    let op = "fused_experts";
    same(op, "logits", &[logits.0, logits.1], &[x.0, n_experts])?;
    let most = most.min(n_experts);
    match top_k {
        k if (1..=most).contains(&k) => Ok(()),
        k => Err(KernelError::Index { op, what: "experts of a token", index: k, len: most + 1 }),
    }
}

/// Checks of `choose`.
pub(crate) fn choose(logits: Dims, batch: &ChooseBatch) -> Result<()> {
    let op = "choose";
    let rows: Vec<u32> = batch.choices.iter().map(|asked| asked.row).collect();
    indices(op, "row", &rows, logits.0)?;
    indices(op, "whole row", &batch.whole, logits.0)?;
    if let Some(pair) = batch.whole.windows(2).find(|pair| pair[1] <= pair[0]) {
        let expected = vec![pair[0] as usize + 1];
        let actual = vec![pair[1] as usize];
        return Err(KernelError::Shape { op, what: "whole rows that ascend", expected, actual });
    }
    let n_words = logits.1.div_ceil(u32::BITS as usize);
    let masks = batch.choices.iter().filter_map(|asked| asked.mask.as_ref());
    masks.into_iter().try_for_each(|mask| same(op, "words of a mask", &[mask.len()], &[n_words]))
}

/// Checks of `carry_tokens`; the earlier step made `n_choices`.
pub(crate) fn carry_tokens(ids: Indices, carried: &[CarriedToken], n_choices: usize) -> Result<()> {
    let (rows, choices): (Vec<u32>, Vec<u32>) = carried.iter().map(|one| (one.row, one.choice)).unzip();
    indices("carry_tokens", "row", &rows, ids.len())?;
    indices("carry_tokens", "choice", &choices, n_choices)
}

/// Dimensions of the result of `split_rows`.
pub(crate) fn split_rows(dims: Dims, parts: usize) -> Result<Dims> {
    Ok((dims.0.saturating_mul(parts), divides("split_rows", "x width", parts, dims.1)?))
}

/// Sizes of a transpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transposed {
    /// Rows of a sequence.
    pub(crate) t: usize,
    /// Dimensions of the result.
    pub(crate) dims: Dims,
}

/// Checks of `transpose`.
pub(crate) fn transpose(x: Dims, n_seqs: usize) -> Result<Transposed> {
    let t = if n_seqs == 0 && x.0 == 0 { 0 } else { divides("transpose", "rows", n_seqs, x.0)? };
    Ok(Transposed { t, dims: (n_seqs.saturating_mul(x.1), t) })
}

/// Checks of `rope`.
pub(crate) fn rope(x: Dims, shape: RopeShape, angles: Angles) -> Result<()> {
    let RopeShape { head_dim, rotary_dim, .. } = shape;
    divides("rope", "x width", head_dim, x.1)?;
    divides("rope", "rotary_dim", 2, rotary_dim)?;
    if rotary_dim > head_dim {
        let (expected, actual) = (vec![head_dim], vec![rotary_dim]);
        return Err(KernelError::Shape { op: "rope", what: "rotary_dim", expected, actual });
    }
    let half = rotary_dim / 2;
    same("rope", "angles", &[angles.len(), angles.n_pairs], &[x.0.saturating_mul(half), half])
}

/// Checks of `group_norm`.
pub(crate) fn group_norm(x: Dims, norm_width: usize, seqs: Offsets) -> Result<()> {
    same("group_norm", "x width", &[x.1], &[norm_width])?;
    ends("group_norm", "rows of the sequences", seqs, x.0)
}
