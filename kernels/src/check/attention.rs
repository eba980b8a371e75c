//! Checks of attention and of the paged cache.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::{Dims, below, divides, ends, indices, rope, same};
use crate::ops::{
    AttentionShape, BiasDims, ChosenHeads, Indices, KernelError, KvLayout, LoadedDims, Mask, PagedSequences,
    Result, Rotation, SeqLens, Sequences,
};

/// Checks that heads divide and widths fit.
fn heads(op: &'static str, shape: AttentionShape, q_width: usize) -> Result<()> {
    if shape.n_kv_heads == 0 || shape.head_dim == 0 {
        let actual = vec![shape.n_kv_heads, shape.head_dim];
        return Err(KernelError::Shape { op, what: "n_kv_heads and head_dim", expected: vec![1, 1], actual });
    }
    divides(op, "n_heads", shape.n_kv_heads, shape.n_heads)?;
    same(op, "q width", &[q_width], &[shape.n_heads.saturating_mul(shape.head_dim)])
}

/// A causal query must see at least its own key, and each of `n_queries` knows how far it sees.
fn mask(op: &'static str, mask: Mask, lens: SeqLens, n_queries: usize) -> Result<()> {
    let Some(bounds) = mask.bounds() else { return Ok(()) };
    if let Some((n_queries, n_keys)) = lens.short {
        let (expected, actual) = (vec![n_queries], vec![n_keys]);
        return Err(KernelError::Shape { op, what: "keys of a causal sequence", expected, actual });
    }
    bounds.ahead.map_or(Ok(()), |ahead| same(op, "keys ahead of queries", &[ahead.len()], &[n_queries]))
}

/// Sequences of attention, as far as checks look at them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attended<S> {
    pub(crate) seqs: S,
    pub(crate) mask: Mask,
    pub(crate) bias: BiasDims,
}

/// Checks of `attention`; `dims` are those of q, k and v.
pub(crate) fn attention(
    [q, k, v]: [Dims; 3],
    shape: AttentionShape,
    seqs: Attended<Sequences>,
) -> Result<()> {
    same("attention", "v", &[v.0, v.1], &[k.0, k.1])?;
    queries_and_keys("attention", [q, k], shape, seqs)
}

/// Checks of `attention_weights`; `dims` are those of q and k.
pub(crate) fn attention_weights(
    dims: [Dims; 2],
    chosen: ChosenHeads,
    seqs: Attended<Sequences>,
) -> Result<()> {
    let op = "attention_weights";
    below(op, "head", chosen.heads, chosen.shape.n_heads)?;
    queries_and_keys(op, dims, chosen.shape, seqs)
}

/// Checks of what makes scores.
fn queries_and_keys(
    op: &'static str,
    [q, k]: [Dims; 2],
    shape: AttentionShape,
    seqs: Attended<Sequences>,
) -> Result<()> {
    heads(op, shape, q.1)?;
    same(op, "k width", &[k.1], &[shape.n_kv_heads.saturating_mul(shape.head_dim)])?;
    ends(op, "rows of queries", seqs.seqs.queries, q.0)?;
    ends(op, "rows of keys", seqs.seqs.keys, k.0)?;
    mask(op, seqs.mask, seqs.seqs.lens, q.0)?;
    bias(op, seqs.bias, shape.n_heads, seqs.seqs.lens)
}

/// An error unless a bias has a value for every score of sequences of these lengths.
fn bias(op: &'static str, bias: BiasDims, n_heads: usize, lens: SeqLens) -> Result<()> {
    match bias {
        BiasDims::None => Ok(()),
        BiasDims::Loaded(LoadedDims::Heads(of_bias)) => same(op, "heads of the bias", &[of_bias], &[n_heads]),
        BiasDims::Materialized(n_values) => {
            same(op, "values of the bias", &[n_values], &[n_heads.saturating_mul(lens.n_scores)])
        }
        BiasDims::Loaded(LoadedDims::Tables([n_tables, of_one @ ..])) => {
            same(op, "bias tables", &[n_tables], &[1])?;
            table(op, of_one, n_heads, lens)
        }
        BiasDims::Chosen(LoadedDims::Tables([n_tables, of_one @ ..]), table_of) => {
            same(op, "table_of", &[table_of.len()], &[lens.n_seqs])?;
            below(op, "bias table", table_of, n_tables)?;
            table(op, of_one, n_heads, lens)
        }
        BiasDims::Chosen(LoadedDims::Heads(_), table_of) => same(op, "table_of", &[table_of.len()], &[]),
    }
}

/// An error unless bias tables have as many values as their dimensions say.
pub(crate) fn bias_tables(n_values: usize, dims: [usize; 4]) -> Result<()> {
    let expected = dims.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim));
    if expected == Some(n_values) {
        return Ok(());
    }
    let (expected, actual) = (dims.to_vec(), vec![n_values]);
    Err(KernelError::Shape { op: "load_bias", what: "tables", expected, actual })
}

/// An error unless a table `[n_heads, n_q, n_k]` fits each sequence.
fn table(op: &'static str, dims: [usize; 3], n_heads: usize, lens: SeqLens) -> Result<()> {
    [lens.first, lens.other].into_iter().flatten().try_for_each(|(n_q, n_k)| {
        same(op, "heads, queries and keys of a bias table", &dims, &[n_heads, n_q, n_k])
    })
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
pub(crate) fn write_kv(dims: [Dims; 2], layout: KvLayout, slots: Indices) -> Result<()> {
    let width = layout.n_kv_heads * layout.head_dim;
    for (what, (n_tokens, actual)) in [("k", dims[0]), ("v", dims[1])] {
        same("write_kv", what, &[n_tokens, actual], &[slots.len(), width])?;
    }
    below("write_kv", "slot", slots, layout.n_blocks * KV_BLOCK_TOKENS)
}

/// Checks of rows that have queries, keys and values side by side, and of their rotation.
pub(crate) fn fused_qkv(
    op: &'static str,
    rows: Dims,
    shape: AttentionShape,
    rotation: Option<Rotation>,
) -> Result<()> {
    let [q, kv] = shape.widths();
    heads(op, shape, q)?;
    same(op, "qkv width", &[rows.1], &[q + 2 * kv])?;
    match rotation {
        Some(rotation) => {
            same(op, "head_dim of the rotation", &[rotation.shape.head_dim], &[shape.head_dim])?;
            rope((rows.0, q), rotation.shape, rotation.angles)
        }
        None => Ok(()),
    }
}

/// An error unless a cache has the key heads of an attention.
pub(crate) fn same_heads(op: &'static str, layout: KvLayout, shape: AttentionShape) -> Result<()> {
    let (cache, asked) = ([layout.n_kv_heads, layout.head_dim], [shape.n_kv_heads, shape.head_dim]);
    same(op, "kv heads and head_dim", &asked, &cache)
}

/// Checks of `copy_blocks`.
pub(crate) fn copy_blocks(layout: KvLayout, pairs: &[(u32, u32)]) -> Result<()> {
    pairs.iter().try_for_each(|&(from, to)| indices("copy_blocks", "block", &[from, to], layout.n_blocks))
}

/// Checks of a copy of blocks from one cache to another.
pub(crate) fn swap(op: &'static str, [from, to]: [KvLayout; 2], pairs: &[(u32, u32)]) -> Result<()> {
    let rest = |layout: KvLayout| [layout.n_layers, layout.n_kv_heads, layout.head_dim];
    same(op, "layers, kv heads and head_dim", &rest(from), &rest(to))?;
    pairs.iter().try_for_each(|&(block, other)| {
        indices(op, "block to read", &[block], from.n_blocks)?;
        indices(op, "block to write", &[other], to.n_blocks)
    })
}

/// Checks of `paged_attention`; the layer is checked by [`layer`].
pub(crate) fn paged(
    q: Dims,
    layout: KvLayout,
    shape: AttentionShape,
    kv: Attended<PagedSequences>,
) -> Result<()> {
    let op = "paged_attention";
    heads(op, shape, q.1)?;
    same_heads(op, layout, shape)?;
    ends(op, "rows of queries", kv.seqs.queries, q.0)?;
    below(op, "block", kv.seqs.blocks, layout.n_blocks)?;
    mask(op, kv.mask, kv.seqs.lens, q.0)?;
    bias(op, kv.bias, shape.n_heads, kv.seqs.lens)
}
