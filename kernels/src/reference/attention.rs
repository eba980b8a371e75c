//! Reference attention: a score matrix for each head of each sequence, and a cache of plain rows.

use candle_core::{D, Tensor};
use triptych_core::shape::KV_BLOCK_TOKENS;

use super::rows::product;
use super::{InOp, dims, matrix, values, zeros};
use crate::check;
use crate::ops::{AttentionShape, KvLayer, KvLayout, Mask, PagedBatch, Qkv, Result, Varlen};

/// Keys and values of all layers, each `[n_layers, n_blocks · KV_BLOCK_TOKENS, n_kv_heads · head_dim]`.
#[derive(Debug)]
pub struct ReferenceKvCache {
    layout: KvLayout,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl ReferenceKvCache {
    /// Zeros.
    pub(super) fn new(layout: KvLayout) -> Result<Self> {
        let n_values = check::kv_layout(layout)? * layout.n_kv_heads * layout.head_dim;
        Ok(Self { layout, k: vec![0.0; n_values], v: vec![0.0; n_values] })
    }

    /// Bytes of a block in all layers.
    pub(super) fn block_bytes(layout: KvLayout) -> usize {
        2 * size_of::<f32>() * layout.n_layers * KV_BLOCK_TOKENS * layout.n_kv_heads * layout.head_dim
    }

    /// Where a slot's row starts.
    fn row(&self, layer: usize, slot: usize) -> usize {
        (layer * self.layout.n_blocks * KV_BLOCK_TOKENS + slot) * self.width()
    }

    /// Values of one token's keys.
    fn width(&self) -> usize {
        self.layout.n_kv_heads * self.layout.head_dim
    }

    /// Writes rows to their slots.
    pub(super) fn write(&mut self, layer: usize, kv: [&Tensor; 2], slots: &[u32]) -> Result<()> {
        check::layer("write_kv", layer, self.layout)?;
        check::write_kv(kv.map(dims), self.layout, slots)?;
        let (width, [k, v]) = (self.width(), kv);
        let (k, v) = (values("write_kv", k)?, values("write_kv", v)?);
        for (i, &slot) in slots.iter().enumerate() {
            let (from, to) = (i * width, self.row(layer, slot as usize));
            self.k[to..][..width].copy_from_slice(&k[from..][..width]);
            self.v[to..][..width].copy_from_slice(&v[from..][..width]);
        }
        Ok(())
    }

    /// Copies blocks in all layers, one pair after the other.
    pub(super) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_blocks(self.layout, pairs)?;
        let len = KV_BLOCK_TOKENS * self.width();
        for layer in 0..self.layout.n_layers {
            for &(from, to) in pairs {
                let [from, to] = [from, to].map(|block| self.row(layer, block as usize * KV_BLOCK_TOKENS));
                self.k.copy_within(from..from + len, to);
                self.v.copy_within(from..from + len, to);
            }
        }
        Ok(())
    }

    /// Keys and values of a sequence, gathered: `[n_keys, n_kv_heads · head_dim]` each.
    fn gather(&self, layer: usize, table: &[u32], n_keys: usize) -> Result<[Tensor; 2]> {
        let width = self.width();
        let gather = |from: &[f32]| {
            let rows = (0..n_keys).flat_map(|i| {
                let slot = table[i / KV_BLOCK_TOKENS] as usize * KV_BLOCK_TOKENS + i % KV_BLOCK_TOKENS;
                let row = self.row(layer, slot);
                from[row..row + width].iter().copied()
            });
            matrix("paged_attention", rows.collect(), (n_keys, width))
        };
        Ok([gather(&self.k)?, gather(&self.v)?])
    }
}

/// Attention inside each sequence.
pub(super) fn block_diagonal(
    qkv: Qkv<'_, Tensor>,
    shape: AttentionShape,
    seqs: Varlen<'_>,
) -> Result<Tensor> {
    let op = "attention";
    let part =
        |x: &Tensor, cu: &[u32], i: usize| x.narrow(0, cu[i] as usize, (cu[i + 1] - cu[i]) as usize).op(op);
    let n_seqs = seqs.cu_seqlens_q.len() - 1;
    let outs = (0..n_seqs).map(|i| {
        let q = part(qkv.q, seqs.cu_seqlens_q, i)?;
        let kv = [part(qkv.k, seqs.cu_seqlens_k, i)?, part(qkv.v, seqs.cu_seqlens_k, i)?];
        sequence(&q, &kv, shape, seqs.mask)
    });
    stack(op, outs.collect::<Result<_>>()?, dims(qkv.q))
}

/// Attention of each sequence over its keys in the cache.
pub(super) fn paged(
    q: &Tensor,
    kv: KvLayer<'_, ReferenceKvCache>,
    shape: AttentionShape,
    batch: PagedBatch<'_>,
) -> Result<Tensor> {
    let op = "paged_attention";
    check::layer(op, kv.layer, kv.cache.layout)?;
    check::paged(dims(q), kv.cache.layout, shape, kv.mask, batch)?;
    let range = |offsets: &[u32], i: usize| offsets[i] as usize..offsets[i + 1] as usize;
    let outs = (0..batch.seq_lens.len()).map(|i| {
        let rows = range(batch.query_start_loc, i);
        let table = &batch.block_tables[range(batch.table_start_loc, i)];
        let keys = kv.cache.gather(kv.layer, table, batch.seq_lens[i] as usize)?;
        sequence(&q.narrow(0, rows.start, rows.len()).op(op)?, &keys, shape, kv.mask)
    });
    stack(op, outs.collect::<Result<_>>()?, dims(q))
}

/// Puts the sequences' results one under another.
fn stack(op: &'static str, outs: Vec<Tensor>, dims: check::Dims) -> Result<Tensor> {
    let outs: Vec<Tensor> = outs.into_iter().filter(|out| out.elem_count() > 0).collect();
    if outs.is_empty() { zeros(op, dims) } else { Tensor::cat(&outs, 0).op(op) }
}

/// One sequence: `q: [n_queries, n_heads·head_dim]`, `kv: [n_keys, n_kv_heads·head_dim]`. Queries that see no
/// key get zeros.
fn sequence(q: &Tensor, kv: &[Tensor; 2], shape: AttentionShape, mask: Mask) -> Result<Tensor> {
    let ((n_queries, _), (n_keys, _)) = (dims(q), dims(&kv[0]));
    if n_queries == 0 || n_keys == 0 || shape.n_heads == 0 {
        return zeros("attention", dims(q));
    }
    let hidden = hidden_keys(n_queries, n_keys, mask)?;
    let group = shape.n_heads / shape.n_kv_heads;
    let head = |x: &Tensor, i: usize| x.narrow(1, i * shape.head_dim, shape.head_dim)?.contiguous();
    let one = |i: usize| -> candle_core::Result<Tensor> {
        let (q, k, v) = (head(q, i)?, head(&kv[0], i / group)?, head(&kv[1], i / group)?);
        let scores = product(&q, &k.t()?.contiguous()?)?.affine(f64::from(shape.scale), 0.0)?;
        product(&softmax(&scores.add(&hidden)?)?, &v)
    };
    let heads = (0..shape.n_heads).map(one).collect::<candle_core::Result<Vec<_>>>().op("attention")?;
    Tensor::cat(&heads, 1).op("attention")
}

/// What is added to the scores: `-inf` for a key that the query does not see. `[n_queries, n_keys]`.
fn hidden_keys(n_queries: usize, n_keys: usize, mask: Mask) -> Result<Tensor> {
    let visible = |query: usize| match mask {
        Mask::Full => n_keys,
        Mask::Causal => n_keys - n_queries + query + 1,
    };
    let row = |query| (0..n_keys).map(move |key| if key < visible(query) { 0.0 } else { f32::NEG_INFINITY });
    matrix("attention", (0..n_queries).flat_map(row).collect(), (n_queries, n_keys))
}

/// Softmax of each row.
fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    let exp = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}
