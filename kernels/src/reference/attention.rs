//! Reference attention: a score matrix for each head of each sequence.

use candle_core::{D, Tensor};

use super::cache::ReferenceKvCache;
use super::rows::product;
use super::{InOp, dims, matrix, zeros};
use crate::check;
use crate::ops::{
    AttentionShape, KvLayer, Mask, PagedBatch, Qkv, RelativeBias, Result, ScoreBias, SharedBias, Varlen,
};

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
    let mut biases = Biases::new(seqs.bias, shape);
    let outs = (0..n_seqs).map(|i| {
        let q = part(qkv.q, seqs.cu_seqlens_q, i)?;
        let kv = [part(qkv.k, seqs.cu_seqlens_k, i)?, part(qkv.v, seqs.cu_seqlens_k, i)?];
        let bias = biases.next(i, (dims(&q).0, dims(&kv[0]).0));
        sequence(&q, &kv, shape, (seqs.mask, bias))
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
    check::paged(dims(q), kv.cache.layout, shape, (kv.mask, kv.bias), batch)?;
    let range = |offsets: &[u32], i: usize| offsets[i] as usize..offsets[i + 1] as usize;
    let mut biases = Biases::new(kv.bias, shape);
    let outs = (0..batch.seq_lens.len()).map(|i| {
        let rows = range(batch.query_start_loc, i);
        let table = &batch.block_tables[range(batch.table_start_loc, i)];
        let keys = kv.cache.gather(kv.layer, table, batch.seq_lens[i] as usize)?;
        let bias = biases.next(i, (rows.len(), batch.seq_lens[i] as usize));
        sequence(&q.narrow(0, rows.start, rows.len()).op(op)?, &keys, shape, (kv.mask, bias))
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
fn sequence(
    q: &Tensor,
    kv: &[Tensor; 2],
    shape: AttentionShape,
    (mask, bias): (Mask, SequenceBias<'_>),
) -> Result<Tensor> {
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
        let scores = match bias.head(i, n_queries, n_keys) {
            Some(bias) => scores.add(&Tensor::from_vec(bias, (n_queries, n_keys), q.device())?)?,
            None => scores,
        };
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

/// Softmax of each row; zeros for a row of minus infinity alone.
fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    let max = scores.max_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN))?;
    let exp = scores.broadcast_sub(&max)?.exp()?;
    // A row with a key has a weight of one, and no weight is more.
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN_POSITIVE))?)
}

/// The bias of each sequence in turn.
struct Biases<'a> {
    bias: ScoreBias<'a>,
    n_heads: usize,
    /// Numbers taken by the sequences before.
    taken: usize,
}

/// What is added to the scores of one sequence.
#[derive(Clone, Copy)]
enum SequenceBias<'a> {
    None,
    Relative(&'a RelativeBias),
    Alibi(&'a [f32]),
    /// `[n_heads, n_queries, n_keys]`.
    Values(&'a [f32]),
}

impl<'a> Biases<'a> {
    fn new(bias: ScoreBias<'a>, shape: AttentionShape) -> Self {
        Self { bias, n_heads: shape.n_heads, taken: 0 }
    }

    /// That of sequence `i`, which has so many queries and keys.
    fn next(&mut self, i: usize, (n_queries, n_keys): (usize, usize)) -> SequenceBias<'a> {
        let n = self.n_heads * n_queries * n_keys;
        match self.bias {
            ScoreBias::None => SequenceBias::None,
            ScoreBias::Relative(relative) => SequenceBias::Relative(relative),
            ScoreBias::Alibi(slopes) => SequenceBias::Alibi(slopes),
            ScoreBias::Materialized(values) => {
                self.taken += n;
                SequenceBias::Values(&values[self.taken - n..self.taken])
            }
            ScoreBias::Shared(SharedBias { tables, table_of }) => {
                SequenceBias::Values(&tables[table_of[i] as usize * n..][..n])
            }
        }
    }
}

impl SequenceBias<'_> {
    /// `[n_queries, n_keys]` of a head.
    fn head(self, head: usize, n_queries: usize, n_keys: usize) -> Option<Vec<f32>> {
        let distances = |of_distance: &dyn Fn(isize) -> f32| {
            let row = |query: usize| {
                let position = (n_keys + query) as isize - n_queries as isize;
                (0..n_keys as isize).map(move |key| of_distance(key - position))
            };
            (0..n_queries).flat_map(row).collect()
        };
        match self {
            Self::None => None,
            Self::Relative(relative) => {
                let (max, values) = (relative.max_distance() as isize, relative.head(head));
                Some(distances(&|distance| values[(distance.clamp(-max, max) + max) as usize]))
            }
            Self::Alibi(slopes) => Some(distances(&|distance| -slopes[head] * distance.abs() as f32)),
            Self::Values(values) => Some(values[head * n_queries * n_keys..][..n_queries * n_keys].to_vec()),
        }
    }
}
