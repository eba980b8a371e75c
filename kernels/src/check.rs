//! Shape and index checks, the same for every back end.
//!
//! Each function takes what an op was called with and gives the sizes that the op works with, so that a back
//! end cannot compute with a number nobody checked. Nothing here touches a value of a tensor.

use triptych_core::shape::KV_BLOCK_TOKENS;

use crate::ops::{AttentionShape, KernelError, KvLayout, Mask, PagedBatch, Result, Unfold, Varlen};

/// `(n_tokens, width)` of an activation.
pub(crate) type Dims = (usize, usize);

/// An error unless `actual` is `expected`.
pub(crate) fn same(op: &'static str, what: &'static str, actual: &[usize], expected: &[usize]) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(KernelError::Shape { op, what, expected: expected.to_vec(), actual: actual.to_vec() })
}

/// An error unless `value` is a whole number of `unit`s, which is at least one; returns how many.
pub(crate) fn divides(op: &'static str, what: &'static str, unit: usize, value: usize) -> Result<usize> {
    if unit == 0 || !value.is_multiple_of(unit) {
        return Err(KernelError::Shape { op, what, expected: vec![unit], actual: vec![value] });
    }
    Ok(value / unit)
}

/// An error unless every index is below `len`.
pub(crate) fn indices(op: &'static str, what: &'static str, indices: &[u32], len: usize) -> Result<()> {
    match indices.iter().find(|&&index| index as usize >= len) {
        Some(&index) => Err(KernelError::Index { op, what, index: index as usize, len }),
        None => Ok(()),
    }
}

/// An error unless `offsets` starts at 0, never falls and ends at `len`. Returns the number of sequences.
pub(crate) fn offsets(op: &'static str, what: &'static str, offsets: &[u32], len: usize) -> Result<usize> {
    let ends =
        offsets.first().map(|&o| o as usize) == Some(0) && offsets.last().map(|&o| o as usize) == Some(len);
    if !ends || offsets.windows(2).any(|pair| pair[1] < pair[0]) {
        let actual = offsets.iter().map(|&o| o as usize).collect();
        return Err(KernelError::Shape { op, what, expected: vec![0, len], actual });
    }
    Ok(offsets.len() - 1)
}

/// Checks of `upload`.
pub(crate) fn upload(n_values: usize, n_tokens: usize, width: usize) -> Result<()> {
    same("upload", "values", &[n_values], &[n_tokens.saturating_mul(width)])
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
pub(crate) fn scatter_rows(x: Dims, rows: &[u32], src: Dims) -> Result<()> {
    same("scatter_rows", "src", &[src.0, src.1], &[rows.len(), x.1])?;
    indices("scatter_rows", "row", rows, x.0)
}

/// Checks of `linear`.
pub(crate) fn linear(x: Dims, in_out: Dims, residual: Option<Dims>) -> Result<()> {
    same("linear", "x width", &[x.1], &[in_out.0])?;
    match residual {
        Some(r) => same("linear", "residual", &[r.0, r.1], &[x.0, in_out.1]),
        None => Ok(()),
    }
}

/// Checks of `rope`.
pub(crate) fn rope(x: Dims, head_dim: usize, cos: usize, sin: usize) -> Result<()> {
    divides("rope", "head_dim", 2, head_dim)?;
    divides("rope", "x width", head_dim, x.1)?;
    same("rope", "cos and sin", &[cos, sin], &[x.0.saturating_mul(head_dim / 2); 2])
}

/// Sizes of an unfold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Rows of a sequence.
    pub(crate) t: usize,
    /// Windows of a sequence.
    pub(crate) t_out: usize,
    /// Values of a window.
    pub(crate) width: usize,
}

/// Checks of `unfold`. A sequence too short for one window has none.
pub(crate) fn unfold(x: Dims, conv: Unfold) -> Result<Windows> {
    let error = |what, actual| KernelError::Shape { op: "unfold", what, expected: vec![], actual };
    if conv.kernel == 0 || conv.stride == 0 {
        return Err(error("kernel and stride", vec![conv.kernel, conv.stride]));
    }
    let t = if conv.n_seqs == 0 && x.0 == 0 { 0 } else { divides("unfold", "rows", conv.n_seqs, x.0)? };
    let padded = conv.padding.checked_mul(2).and_then(|p| p.checked_add(t));
    let t_out = padded.map(|p| if p < conv.kernel { 0 } else { (p - conv.kernel) / conv.stride + 1 });
    let width = x.1.checked_mul(conv.kernel);
    let n_values = t_out.and_then(|n| n.checked_mul(conv.n_seqs)).and_then(|n| n.checked_mul(width?));
    match (t_out, width, n_values) {
        (Some(t_out), Some(width), Some(n)) if n <= isize::MAX as usize / 4 => {
            Ok(Windows { t, t_out, width })
        }
        _ => Err(error("padding and kernel", vec![conv.padding, conv.kernel])),
    }
}

/// Checks that heads divide and widths fit.
fn heads(op: &'static str, shape: AttentionShape, q_width: usize) -> Result<()> {
    if shape.n_kv_heads == 0 || shape.head_dim == 0 {
        let actual = vec![shape.n_kv_heads, shape.head_dim];
        return Err(KernelError::Shape { op, what: "n_kv_heads and head_dim", expected: vec![1, 1], actual });
    }
    divides(op, "n_heads", shape.n_kv_heads, shape.n_heads)?;
    same(op, "q width", &[q_width], &[shape.n_heads.saturating_mul(shape.head_dim)])
}

/// A causal query must see at least its own key.
fn enough_keys(op: &'static str, mask: Mask, n_queries: usize, n_keys: usize) -> Result<()> {
    if mask == Mask::Causal && n_keys < n_queries {
        let (expected, actual) = (vec![n_queries], vec![n_keys]);
        return Err(KernelError::Shape { op, what: "keys of a causal sequence", expected, actual });
    }
    Ok(())
}

/// Checks of `attention`; `dims` are those of q, k and v.
pub(crate) fn attention(dims: [Dims; 3], shape: AttentionShape, seqs: Varlen<'_>) -> Result<()> {
    let (op, [q, k, v]) = ("attention", dims);
    heads(op, shape, q.1)?;
    same(op, "k width", &[k.1], &[shape.n_kv_heads.saturating_mul(shape.head_dim)])?;
    same(op, "v", &[v.0, v.1], &[k.0, k.1])?;
    let n_seqs = offsets(op, "cu_seqlens_q", seqs.cu_seqlens_q, q.0)?;
    same(op, "n_seqs", &[offsets(op, "cu_seqlens_k", seqs.cu_seqlens_k, k.0)?], &[n_seqs])?;
    let lens = |cu: &[u32], i: usize| (cu[i + 1] - cu[i]) as usize;
    (0..n_seqs)
        .try_for_each(|i| enough_keys(op, seqs.mask, lens(seqs.cu_seqlens_q, i), lens(seqs.cu_seqlens_k, i)))
}

/// An error if a cache of this layout cannot be addressed. Returns its slots, all layers together.
pub(crate) fn kv_layout(layout: KvLayout) -> Result<usize> {
    let KvLayout { n_layers, n_blocks, n_kv_heads, head_dim } = layout;
    let slots = n_layers.checked_mul(n_blocks).and_then(|n| n.checked_mul(KV_BLOCK_TOKENS));
    let padded = head_dim.checked_next_multiple_of(KV_BLOCK_TOKENS);
    let values = slots.and_then(|n| n.checked_mul(n_kv_heads)).and_then(|n| n.checked_mul(padded?));
    let fits = values.is_some_and(|n| n <= isize::MAX as usize / 16);
    match slots {
        Some(slots) if fits && head_dim > 0 && n_kv_heads > 0 => Ok(slots),
        _ => Err(KernelError::Shape {
            op: "kv_cache",
            what: "layout",
            expected: vec![],
            actual: vec![n_layers, n_blocks, n_kv_heads, head_dim],
        }),
    }
}

/// An error unless the layer is one of the cache's.
pub(crate) fn layer(op: &'static str, layer: usize, layout: KvLayout) -> Result<()> {
    if layer >= layout.n_layers {
        return Err(KernelError::Index { op, what: "layer", index: layer, len: layout.n_layers });
    }
    Ok(())
}

/// Checks of `write_kv`; `dims` are those of k and v. The layer is checked by [`layer`].
pub(crate) fn write_kv(dims: [Dims; 2], layout: KvLayout, slots: &[u32]) -> Result<()> {
    let width = layout.n_kv_heads * layout.head_dim;
    for (what, (n_tokens, actual)) in [("k", dims[0]), ("v", dims[1])] {
        same("write_kv", what, &[n_tokens, actual], &[slots.len(), width])?;
    }
    indices("write_kv", "slot", slots, layout.n_blocks * KV_BLOCK_TOKENS)
}

/// Checks of `copy_blocks`.
pub(crate) fn copy_blocks(layout: KvLayout, pairs: &[(u32, u32)]) -> Result<()> {
    pairs.iter().try_for_each(|&(from, to)| indices("copy_blocks", "block", &[from, to], layout.n_blocks))
}

/// Checks of `paged_attention`; the layer is checked by [`layer`].
pub(crate) fn paged(
    q: Dims,
    layout: KvLayout,
    shape: AttentionShape,
    mask: Mask,
    batch: PagedBatch<'_>,
) -> Result<()> {
    let op = "paged_attention";
    heads(op, shape, q.1)?;
    let (cache, asked) = ([layout.n_kv_heads, layout.head_dim], [shape.n_kv_heads, shape.head_dim]);
    same(op, "kv heads and head_dim", &asked, &cache)?;
    let n_seqs = offsets(op, "query_start_loc", batch.query_start_loc, q.0)?;
    same(
        op,
        "table_start_loc",
        &[offsets(op, "table_start_loc", batch.table_start_loc, batch.block_tables.len())?],
        &[n_seqs],
    )?;
    same(op, "seq_lens", &[batch.seq_lens.len()], &[n_seqs])?;
    indices(op, "block", batch.block_tables, layout.n_blocks)?;
    for i in 0..n_seqs {
        let n_keys = batch.seq_lens[i] as usize;
        let n_blocks = (batch.table_start_loc[i + 1] - batch.table_start_loc[i]) as usize;
        if n_keys > n_blocks * KV_BLOCK_TOKENS {
            return Err(KernelError::Index {
                op,
                what: "key",
                index: n_keys,
                len: n_blocks * KV_BLOCK_TOKENS,
            });
        }
        enough_keys(op, mask, (batch.query_start_loc[i + 1] - batch.query_start_loc[i]) as usize, n_keys)?;
    }
    Ok(())
}
