//! Reference attention: a score matrix for each head of each sequence.

use candle_core::{D, Tensor};

use super::cache::ReferenceKvCache;
use super::rows::{product, softcap};
use super::tensor::{InOp, dims, matrix, values, zeros};
use crate::check;
use crate::host::{BiasSlices, HostMask, HostVarlen};
use crate::ops::{AttentionShape, PagedBatch, Qkv, RelativeBias, Result};

/// Attention inside each sequence: `q: [Σq, n_heads·head_dim]`, `k`, `v: [Σk, n_kv_heads·head_dim]`.
pub(super) fn block_diagonal(
    qkv: Qkv<'_, Tensor>,
    shape: AttentionShape,
    seqs: HostVarlen<'_>,
) -> Result<Tensor> {
    let mut outs = Vec::new();
    each_sequence([qkv.q, qkv.k, qkv.v], shape, seqs, |[q, k, v], (mask, bias)| {
        outs.push(sequence(q, &[k.clone(), v.clone()], shape, mask, bias)?);
        Ok(())
    })?;
    stack("attention", outs, dims(qkv.q))
}

/// Weights of some heads inside each sequence, `[heads, n_queries, n_keys]` one after another.
pub(super) fn chosen_weights(
    [q, k]: [&Tensor; 2],
    shape: AttentionShape,
    heads: &[u32],
    seqs: HostVarlen<'_>,
) -> Result<Vec<f32>> {
    let mut out = Vec::new();
    each_sequence([q, k, k], shape, seqs, |[q, k, _], (mask, bias)| {
        if dims(q).0 > 0 && dims(k).0 > 0 {
            for &head in heads {
                let weights = weights([q, k], shape, mask, bias, head as usize)?;
                out.extend(values("attention_weights", &weights)?);
            }
        }
        Ok(())
    })?;
    Ok(out)
}

/// Calls `each` with query, key, value, mask and bias of each sequence.
fn each_sequence<'a>(
    [q, k, v]: [&Tensor; 3],
    shape: AttentionShape,
    seqs: HostVarlen<'a>,
    mut each: impl FnMut([&Tensor; 3], (HostMask<'a>, SequenceBias<'a>)) -> Result<()>,
) -> Result<()> {
    let part = |x: &Tensor, cu: &[u32], i: usize| {
        x.narrow(0, cu[i] as usize, (cu[i + 1] - cu[i]) as usize).op("attention")
    };
    let mut biases = Biases::new(seqs.bias, shape);
    for i in 0..seqs.cu_seqlens_q.len() - 1 {
        let rows = seqs.cu_seqlens_q[i] as usize..seqs.cu_seqlens_q[i + 1] as usize;
        let q = part(q, seqs.cu_seqlens_q, i)?;
        let [k, v] = [part(k, seqs.cu_seqlens_k, i)?, part(v, seqs.cu_seqlens_k, i)?];
        let bias = biases.next(i, (dims(&q).0, dims(&k).0));
        each([&q, &k, &v], (seqs.mask.of_rows(rows), bias))?;
    }
    Ok(())
}

/// Sequences in a layer of a cache.
pub(super) struct Pages<'a> {
    pub(super) cache: &'a ReferenceKvCache,
    pub(super) layer: usize,
    pub(super) batch: PagedBatch<'a>,
}

/// Attention of each sequence over its keys in the cache; the caller checked the arguments. `q: [Σq, n_heads·head_dim]`.
pub(super) fn paged(
    q: &Tensor,
    Pages { cache, layer, batch }: Pages<'_>,
    shape: AttentionShape,
    (mask, bias): (HostMask<'_>, BiasSlices<'_>),
) -> Result<Tensor> {
    let op = "paged_attention";
    let range = |offsets: &[u32], i: usize| offsets[i] as usize..offsets[i + 1] as usize;
    let mut biases = Biases::new(bias, shape);
    let outs = (0..batch.seq_lens.len()).map(|i| {
        let rows = range(batch.query_start_loc, i);
        let table = &batch.block_tables[range(batch.table_start_loc, i)];
        let keys = cache.gather(layer, table, batch.seq_lens[i] as usize)?;
        let bias = biases.next(i, (rows.len(), batch.seq_lens[i] as usize));
        let q = q.narrow(0, rows.start, rows.len()).op(op)?;
        sequence(&q, &keys, shape, mask.of_rows(rows), bias)
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
    mask: HostMask<'_>,
    bias: SequenceBias<'_>,
) -> Result<Tensor> {
    let ((n_queries, _), (n_keys, _)) = (dims(q), dims(&kv[0]));
    if n_queries == 0 || n_keys == 0 || shape.n_heads == 0 {
        return zeros("attention", dims(q));
    }
    let one = |i: usize| {
        let v = head_columns(&kv[1], shape, i * shape.n_kv_heads / shape.n_heads).op("attention")?;
        product(&weights([q, &kv[0]], shape, mask, bias, i)?, &v).op("attention")
    };
    let heads = (0..shape.n_heads).map(one).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&heads, 1).op("attention")
}

/// Softmax weights of a head for the keys of a sequence, `[n_queries, n_keys]`; neither is zero.
fn weights(
    [q, k]: [&Tensor; 2],
    shape: AttentionShape,
    mask: HostMask<'_>,
    bias: SequenceBias<'_>,
    head: usize,
) -> Result<Tensor> {
    let ((n_queries, _), (n_keys, _)) = (dims(q), dims(k));
    let hidden = hidden_keys(n_queries, n_keys, mask)?;
    let weights = || -> candle_core::Result<Tensor> {
        let q = head_columns(q, shape, head)?;
        let k = head_columns(k, shape, head * shape.n_kv_heads / shape.n_heads)?;
        let scores = product(&q, &k.t()?.contiguous()?)?.affine(f64::from(shape.scale), 0.0)?;
        let scores = match shape.softcap {
            Some(c) => softcap(&scores, c)?,
            None => scores,
        };
        let scores = match bias.head(head, n_queries, n_keys) {
            Some(bias) => scores.add(&Tensor::from_vec(bias, (n_queries, n_keys), q.device())?)?,
            None => scores,
        };
        softmax(&scores.add(&hidden)?)
    };
    weights().op("attention")
}

/// The columns of a head.
fn head_columns(x: &Tensor, shape: AttentionShape, head: usize) -> candle_core::Result<Tensor> {
    x.narrow(1, head * shape.head_dim, shape.head_dim)?.contiguous()
}

/// The mask as values added to the scores, `-inf` for a key that the query does not see: `[n_queries, n_keys]`.
fn hidden_keys(n_queries: usize, n_keys: usize, mask: HostMask<'_>) -> Result<Tensor> {
    let row = |query: usize| {
        let visible = mask.visible([n_queries, n_keys], query);
        (0..n_keys).map(move |key| if visible.contains(&key) { 0.0 } else { f32::NEG_INFINITY })
    };
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
    bias: BiasSlices<'a>,
    n_heads: usize,
    /// Numbers taken by the sequences before.
    taken: usize,
}

/// The bias added to the scores of one sequence.
#[derive(Clone, Copy)]
enum SequenceBias<'a> {
    None,
    Relative(&'a RelativeBias),
    Alibi(&'a [f32]),
    /// `[n_heads, n_queries, n_keys]`.
    Values(&'a [f32]),
}

impl<'a> Biases<'a> {
    fn new(bias: BiasSlices<'a>, shape: AttentionShape) -> Self {
        Self { bias, n_heads: shape.n_heads, taken: 0 }
    }

    /// The bias of sequence `i`, of `(n_queries, n_keys)`.
    fn next(&mut self, i: usize, (n_queries, n_keys): (usize, usize)) -> SequenceBias<'a> {
        let n = self.n_heads * n_queries * n_keys;
        match self.bias {
            BiasSlices::None => SequenceBias::None,
            BiasSlices::Relative(relative) => SequenceBias::Relative(relative),
            BiasSlices::Alibi(slopes) => SequenceBias::Alibi(slopes),
            BiasSlices::Materialized(values) => {
                self.taken += n;
                SequenceBias::Values(&values[self.taken - n..self.taken])
            }
            BiasSlices::Tables { tables, table_of } => {
                let table = table_of.map_or(0, |table_of| table_of[i] as usize);
                SequenceBias::Values(&tables[table * n..][..n])
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
