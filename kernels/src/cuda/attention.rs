//! Attention inside sequences, over pages, and the weights of chosen heads.
//!
//! In bf16 a sequence of few queries in a step (decoding) goes to the kernel that splits its keys among blocks, any other to
//! the one that keeps a tile of queries. Each sequence is judged by itself, so what a row gives depends on its own sequence.
//! Sequences that have the pages of a split in common share a block for it ([`sharing`](super::sharing)).
//!
//! Launches over sequences with bounds follow from the bounds: a captured graph repeats them over any sequences within.

use std::num::NonZeroU32;

use super::arguments::{Heads, PagedKeys, PagedSequences, Parts, RaggedKeys, bias_kind};
use super::bias::{CudaBias, LaunchBias, Lens, ScoreShape};
use super::device::{F32_SHARED_BYTES, Function};
use super::element::Element;
use super::kv::CudaKvCache;
use super::queue::{Argument, Launch, Queue};
use super::sharing::SPLIT_KEYS;
use super::tensor::{CudaStep, CudaTensor, StagedSharing};
use crate::ops::{
    AttentionShape, ChosenHeads, KernelError, KvLayer, Mask, MaskBounds, PagedBounds,
    PagedSequences as StagedPages, Result, Sequences, Varlen,
};

/// Rows, queries times heads that share a key head, of one block of the decoding kernel.
const DECODE_ROWS: usize = 16;

/// The widest head that tiles have room for. Inside sequences, wider ones have a kernel of their own.
const MAX_HEAD: usize = 256;

/// Rows of queries, keys and values; strides in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct QkvRows {
    /// Rows of queries.
    pub(super) n_queries: usize,
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) q_stride: usize,
    pub(super) kv_stride: usize,
}

fn check_head(op: &'static str, head_dim: usize) -> Result<()> {
    if head_dim <= MAX_HEAD {
        return Ok(());
    }
    Err(KernelError::Shape { op, what: "head_dim", expected: vec![MAX_HEAD], actual: vec![head_dim] })
}

fn heads(op: &'static str, step: &CudaStep, shape: AttentionShape, mask: Mask) -> Result<Heads> {
    let MaskBounds { window, ahead } = mask.bounds().unwrap_or_default();
    Ok(Heads {
        n_heads: shape.n_heads as u32,
        n_kv_heads: shape.n_kv_heads as u32,
        head_dim: shape.head_dim as u32,
        scale: shape.scale,
        ahead: ahead.map_or(Ok(0), |ahead| step.indices(op, ahead))?,
        is_causal: u32::from(mask.bounds().is_some()),
        window: window.map_or(0, NonZeroU32::get),
        softcap: shape.softcap.unwrap_or(0.0),
        quotient: shape.softcap.map_or(0.0, |c| 2.0 / c),
    })
}

/// Kernel, threads, shared memory, and queries of a block of attention over tiles of queries.
fn tiles(queue: &Queue, shape: AttentionShape, is_paged: bool) -> (Function, u32, u32, usize) {
    let kernels = &queue.device().kernels;
    match (queue.element(), is_paged) {
        (Element::F32, false) => (kernels.attention_f32, 256, F32_SHARED_BYTES, 8),
        (Element::F32, true) => (kernels.paged_attention_f32, 256, F32_SHARED_BYTES, 8),
        (Element::Bf16, is_paged) => {
            let functions = if is_paged { &kernels.paged_attention_bf16 } else { &kernels.attention_bf16 };
            let (function, shared_bytes) = functions.of(shape);
            (function, 128, shared_bytes, 64)
        }
    }
}

/// Numbers of queries and keys of staged sequences.
fn ragged_lens(op: &'static str, step: &CudaStep, seqs: Sequences) -> Result<Lens> {
    let [queries, keys] = seqs.offsets();
    let [queries, keys] = [step.host().offsets(op, queries)?, step.host().offsets(op, keys)?];
    let len = |pair: &[u32]| (pair[1] - pair[0]) as usize;
    Ok(queries.windows(2).map(len).zip(keys.windows(2).map(len)).collect())
}

/// The same of sequences in pages.
fn paged_lens(op: &'static str, step: &CudaStep, seqs: StagedPages) -> Result<Lens> {
    let batch = step.host().paged(op, seqs)?;
    let queries = batch.query_start_loc.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
    Ok(queries.zip(batch.seq_lens.iter().map(|n| *n as usize)).collect())
}

/// Attention inside each sequence; the arguments are checked.
pub(super) fn block_diagonal(
    queue: &Queue,
    step: &CudaStep,
    rows: QkvRows,
    shape: AttentionShape,
    seqs: Varlen<'_, CudaBias, CudaTensor>,
) -> Result<CudaTensor> {
    let op = "attention";
    let out_width = shape.n_heads * shape.head_dim;
    let out = CudaTensor::new(op, queue, (rows.n_queries, out_width))?;
    let lens = ragged_lens(op, step, seqs.seqs)?;
    let longest = seqs.seqs.lens.max_seqlen_q;
    let scores = ScoreShape { n_heads: shape.n_heads, lens: &lens };
    let bias = LaunchBias::new(op, queue, step, seqs.bias, scores)?;
    let keys = ragged_keys(op, step, seqs.seqs, rows, shape)?;
    let heads = heads(op, step, shape, seqs.mask)?;
    let [q_stride, out_stride] = [rows.q_stride, out_width].map(|n| n as u32);
    if shape.head_dim > MAX_HEAD {
        if let Some(recording) = queue.recording() {
            // Scratch has the size of the longest sequence.
            seqs.seqs.offsets().into_iter().for_each(|offsets| recording.keep(offsets.words().start));
        }
        let max_keys = lens.iter().map(|len| len.1).max().unwrap_or(0);
        let weights = CudaTensor::of(op, queue, Element::F32, (rows.n_queries * shape.n_heads, max_keys))?;
        let (weights, max_keys) = (weights.address(), max_keys as u32);
        let arguments: [&dyn Argument; 9] = [
            &out.address(),
            &weights,
            &rows.q,
            &keys,
            &heads,
            &bias.argument,
            &q_stride,
            &out_stride,
            &max_keys,
        ];
        let launch = Launch { grid: [longest, shape.n_heads, lens.len()], threads: 256, shared_bytes: 0 };
        queue.launch(op, queue.kernel(queue.device().kernels.attention_wide), launch, arguments)?;
        return Ok(out);
    }
    let (function, threads, shared_bytes, tile) = tiles(queue, shape, false);
    let grid = [longest.div_ceil(tile), shape.n_heads, lens.len()];
    let arguments: [&dyn Argument; 7] =
        [&out.address(), &rows.q, &keys, &heads, &bias.argument, &q_stride, &out_stride];
    queue.launch(op, function, Launch { grid, threads, shared_bytes }, arguments)?;
    Ok(out)
}

fn ragged_keys(
    op: &'static str,
    step: &CudaStep,
    seqs: Sequences,
    rows: QkvRows,
    shape: AttentionShape,
) -> Result<RaggedKeys> {
    let [queries, keys] = seqs.offsets();
    Ok(RaggedKeys {
        k: rows.k,
        v: rows.v,
        query_start: step.offsets(op, queries)?,
        key_start: step.offsets(op, keys)?,
        k_stride: rows.kv_stride as u32,
        v_stride: rows.kv_stride as u32,
        head_dim: shape.head_dim as u32,
        gap: 0,
    })
}

/// Softmax weights of chosen heads, in host memory; the arguments are checked.
pub(super) fn weights(
    queue: &Queue,
    [q, k]: [&CudaTensor; 2],
    step: &CudaStep,
    chosen: ChosenHeads,
    seqs: Varlen<'_, CudaBias, CudaTensor>,
) -> Result<Vec<f32>> {
    let (op, shape) = ("attention_weights", chosen.shape);
    check_head(op, shape.head_dim)?;
    let lens = ragged_lens(op, step, seqs.seqs)?;
    let n_chosen = chosen.heads.len();
    let n_weights = lens.iter().map(|(n_q, n_k)| n_chosen * n_q * n_k).sum();
    let out = CudaTensor::of(op, queue, Element::F32, (1, n_weights))?;
    let longest = lens.iter().map(|len| len.0).max().unwrap_or(0);
    if n_weights > 0 {
        let scores = ScoreShape { n_heads: shape.n_heads, lens: &lens };
        let bias = LaunchBias::new(op, queue, step, seqs.bias, scores)?;
        let of_chosen = ScoreShape { n_heads: n_chosen, lens: &lens };
        let starts = queue.upload(op, &of_chosen.starts())?;
        let rows = QkvRows {
            n_queries: q.dims().0,
            q: q.address(),
            k: k.address(),
            v: k.address(),
            q_stride: q.dims().1,
            kv_stride: k.dims().1,
        };
        let keys = ragged_keys(op, step, seqs.seqs, rows, shape)?;
        let (heads, of_result) = (heads(op, step, shape, seqs.mask)?, step.indices(op, chosen.heads)?);
        let q_stride = rows.q_stride as u32;
        let arguments: [&dyn Argument; 8] = [
            &out.address(),
            &rows.q,
            &keys,
            &heads,
            &bias.argument,
            &of_result,
            &starts.address(),
            &q_stride,
        ];
        let function = queue.kernel(queue.device().kernels.attention_weights);
        let launch = Launch { grid: [longest, n_chosen, lens.len()], threads: 256, shared_bytes: 0 };
        queue.launch(op, function, launch, arguments)?;
    }
    let mut values = Vec::with_capacity(n_weights);
    queue.download(op, out.address(), n_weights * size_of::<f32>(), |part| {
        Element::F32.decode(part, &mut values);
    })?;
    Ok(values)
}

/// Attention over the pages of each sequence; the arguments are checked.
pub(super) fn paged(
    queue: &Queue,
    step: &CudaStep,
    q: &CudaTensor,
    kv: KvLayer<'_, CudaKvCache, CudaBias, CudaTensor>,
    shape: AttentionShape,
) -> Result<CudaTensor> {
    let op = "paged_attention";
    check_head(op, shape.head_dim)?;
    let bounds = kv.seqs.bounds;
    if bounds.is_none() {
        // Its launches follow from lengths.
        queue.refuse_in_capture(op)?;
    }
    let out = CudaTensor::new(op, queue, q.dims())?;
    let lens = paged_lens(op, step, kv.seqs)?;
    let scores = ScoreShape { n_heads: shape.n_heads, lens: &lens };
    let bias = LaunchBias::new(op, queue, step, kv.bias, scores)?;
    if let Some(recording) = queue.recording() {
        if bias.argument.kind == bias_kind::MATRIX {
            // A table has the size of the captured sequences, not of those of a replay.
            return Err(KernelError::NotCapturable { op });
        }
        recording.limit(kv.seqs.blocks.words().start, kv.cache.layout().n_blocks);
    }
    let call = Paged {
        queue,
        q,
        out: &out,
        bias: &bias,
        heads: heads(op, step, shape, kv.mask)?,
        shape,
        pages: kv.cache.pages(kv.layer),
        n_seqs: lens.len(),
        arrays: step.paged(op, kv.seqs)?,
    };
    // Sequences whose rows fit into one block of the decoding kernel.
    let most_decoded = match queue.element() {
        Element::F32 => 0,
        Element::Bf16 => DECODE_ROWS / (shape.n_heads / shape.n_kv_heads.max(1)).max(1),
    };
    let [decoded, prefilled] = match bounds {
        Some(bounds) => longest_within(bounds, most_decoded),
        None => longest_of(&lens, most_decoded),
    };
    if let Some(longest) = decoded {
        // A plan follows from block tables, which no capture may read.
        let shared = match bounds {
            Some(_) => None,
            None => step.shared_splits(op, queue, kv.seqs, most_decoded)?,
        };
        call.decode(longest, most_decoded, shared.as_deref())?;
    }
    if let Some(longest) = prefilled {
        call.prefill(longest.max_seqlen_q, most_decoded + 1)?;
    }
    Ok(out)
}

/// Bounds of the sequences that are decoded, those of at most `most` queries, and of the others; `None` if there are none.
fn longest_of(lens: &Lens, most: usize) -> [Option<PagedBounds>; 2] {
    let longest = |is_taken: &dyn Fn(usize) -> bool| {
        let taken = || lens.iter().filter(|len| is_taken(len.0));
        let max_seqlen_q = taken().map(|len| len.0).max()?;
        Some(PagedBounds { max_seqlen_q, max_seqlen_k: taken().map(|len| len.1).max()? })
    };
    [longest(&|n_queries| (1..=most).contains(&n_queries)), longest(&|n_queries| n_queries > most)]
}

/// The same of sequences that are known by their bounds alone.
fn longest_within(bounds: PagedBounds, most: usize) -> [Option<PagedBounds>; 2] {
    let max_seqlen_q = bounds.max_seqlen_q.min(most);
    [
        (max_seqlen_q > 0).then_some(PagedBounds { max_seqlen_q, ..bounds }),
        (bounds.max_seqlen_q > most).then_some(bounds),
    ]
}

/// An attention over pages, whichever kernels compute it.
struct Paged<'a> {
    queue: &'a Queue,
    q: &'a CudaTensor,
    out: &'a CudaTensor,
    bias: &'a LaunchBias,
    heads: Heads,
    shape: AttentionShape,
    pages: super::arguments::Pages,
    n_seqs: usize,
    /// `query_start_loc`, `table_start_loc`, `block_tables`, `seq_lens`.
    arrays: [u64; 4],
}

impl Paged<'_> {
    /// Sequences of so many queries; a kernel leaves out the others.
    fn keys(&self, [min_queries, max_queries]: [usize; 2]) -> PagedKeys {
        let [query_start, table_start, block_tables, seq_lens] = self.arrays;
        let [min_queries, max_queries] =
            [min_queries, max_queries].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let sequences =
            PagedSequences { query_start, seq_lens, table_start, block_tables, min_queries, max_queries };
        PagedKeys { pages: self.pages, sequences, query_start }
    }

    /// Sequences of at least so many queries.
    fn prefill(&self, longest: usize, least: usize) -> Result<()> {
        let op = "paged_attention";
        let (function, threads, shared_bytes, tile) = tiles(self.queue, self.shape, true);
        let keys = self.keys([least, usize::MAX]);
        let width = self.q.dims().1 as u32;
        let arguments: [&dyn Argument; 7] =
            [&self.out.address(), &self.q.address(), &keys, &self.heads, &self.bias.argument, &width, &width];
        let grid = [longest.div_ceil(tile), self.shape.n_heads, self.n_seqs];
        self.queue.launch(op, function, Launch { grid, threads, shared_bytes }, arguments)
    }

    /// Sequences of at most `most` queries, of which the longest have these numbers of queries and keys. `shared`: the splits
    /// that some of them have in common, and all others.
    fn decode(&self, longest: PagedBounds, most: usize, shared: Option<&StagedSharing>) -> Result<()> {
        let (op, shape, queue) = ("paged_attention", self.shape, self.queue);
        let (n_rows, width) = self.q.dims();
        let n_splits = longest.max_seqlen_k.div_ceil(SPLIT_KEYS);
        let scratch = |n: usize| CudaTensor::of(op, queue, Element::F32, (n_rows * shape.n_heads, n));
        let (largest, sum) = (scratch(n_splits)?, scratch(n_splits)?);
        let sums = scratch(n_splits * shape.head_dim)?;
        let parts = Parts {
            largest: largest.address(),
            sum: sum.address(),
            out: sums.address(),
            n_splits: n_splits as u32,
            gap: 0,
        };
        let keys = self.keys([1, most]);
        let kernels = &queue.device().kernels;
        let (width, q) = (width as u32, self.q.address());
        let arguments: [&dyn Argument; 6] = [&parts, &q, &keys, &self.heads, &self.bias.argument, &width];
        match shared {
            None => {
                let (function, shared_bytes) = kernels.decode_bf16.of(shape);
                let grid = [n_splits, shape.n_kv_heads, self.n_seqs];
                queue.launch(op, function, Launch { grid, threads: 128, shared_bytes }, arguments)?;
            }
            Some(plan) => {
                let (function, shared_bytes) = kernels.decode_shared_bf16.of(shape);
                let grid = [plan.n_splits(), shape.n_kv_heads, 1];
                let [parts, q, keys, heads, bias, width] = arguments;
                let arguments = [parts, q, keys, heads, bias, width, &plan.argument() as &dyn Argument];
                queue.launch(op, function, Launch { grid, threads: 128, shared_bytes }, arguments)?;
            }
        }
        let arguments: [&dyn Argument; 5] =
            [&self.out.address(), &parts, &keys.sequences, &self.heads, &width];
        let grid = [longest.max_seqlen_q, shape.n_heads, self.n_seqs];
        let launch = Launch { grid, threads: 128, shared_bytes: 0 };
        queue.launch(op, kernels.join_splits_bf16, launch, arguments)
    }
}
