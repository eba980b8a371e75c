//! Attention over pages, for the cache and for plain keys alike.
//!
//! The rows that share keys (the queries of a sequence, times the query heads of a key head) are taken in runs
//! of a few register tiles. For each stretch of keys a tile computes its scores, turns them into weights with
//! a running maximum and sum, and adds the weighted values (Milakov and Gimelshein 2018, "Online normalizer
//! calculation for softmax"; Dao 2022, FlashAttention). A matrix of all scores never exists. Stretches are
//! counted from the first key of the sequence, so what a row computes does not depend on who shares its tile:
//! keys that only others see weigh exactly zero.
//!
//! Sequences whose tables name the same pages, as beams over one encoder output and prompts that begin alike have them, are
//! read together ([`segments`]): a page once for all their rows.
//!
//! Plain keys and values are first laid into pages of their own.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::cell::{Cell, FloatMath, Word};
use super::context::Context;
use super::kv::{Columns, PageOrder, PagedCells};
use super::matrix::{CpuTensor, unwritten};
use super::pool::Shared;
use crate::host::HostVarlen;
use crate::ops::{AttentionShape, KvLayout, PagedBatch, Result};

mod bias;
mod centre;
mod head;
mod part;
mod segments;
mod softmax;
mod step;
mod task;
mod weights;
mod whole;

use bias::RowBias;
use head::HeadRows;
use segments::{Joined, Plan};
pub(super) use step::Step;
use step::{lens, n_rows};
use task::{Member, Task, alone, runs};
use weights::HeadWeights;
pub(super) use whole::Int8Pages;
use whole::PageMath;

/// Register tiles in a task: so many rows read a stretch of keys while it is in the L2 cache.
const TASK_TILES: usize = 4;

/// Attention inside each sequence, `[Σq, n_heads·head_dim]`; the caller checked the arguments.
pub(super) fn block_diagonal<M: PageMath>(
    context: &Context,
    [q, k, v]: [Columns<'_>; 3],
    shape: AttentionShape,
    seqs: HostVarlen<'_>,
) -> Result<CpuTensor> {
    let width = shape.n_kv_heads * shape.head_dim;
    // Capped scores do not all move by what they had in common.
    let may_centre = M::IS_WHOLE && !seqs.mask.is_causal && shape.softcap.is_none();
    let centred = may_centre.then(|| centre::centred(context, k, width, seqs.cu_seqlens_k));
    let k = centred.as_ref().map_or(k, Columns::all);
    let plain = Plain::<M::Word>::new(context, [k, v], shape, seqs.cu_seqlens_k)?;
    Ok(paged::<M>(context, &plain.pages, plain.step(q, shape, seqs)))
}

/// Weights of some heads inside each sequence, `[heads, n_queries, n_keys]` one after another; the caller
/// checked the arguments.
pub(super) fn weights<M: FloatMath>(
    context: &Context,
    [q, k]: [Columns<'_>; 2],
    (shape, heads): (AttentionShape, &[u32]),
    seqs: HostVarlen<'_>,
) -> Result<Vec<f32>> {
    let plain = Plain::<M::Word>::new(context, [k, k], shape, seqs.cu_seqlens_k)?;
    let step = plain.step(q, shape, seqs);
    let group = step.shape.n_heads / step.shape.n_kv_heads;
    let alone = alone(&step);
    let (mut tasks, mut n_weights, mut cost_ns) = (Vec::new(), 0, 0);
    for (member, (n_queries, n_keys)) in alone.chunks(1).zip(lens(&step)) {
        for &head in heads {
            let (kv_head, rows) = (head as usize / group, 0..n_queries * group);
            let task = Task { members: member, kv_head, rows, part: None };
            tasks.push((task, head as usize % group, n_weights..n_weights + n_queries * n_keys));
            n_weights += n_queries * n_keys;
            cost_ns += n_queries * n_keys * step.shape.head_dim / 8;
        }
    }
    let mut out = vec![0.0; n_weights];
    let bias = &RowBias::new(step.bias, step.shape.n_heads, lens(&step));
    let shared = &Shared::new(&mut out);
    context.pool.run(tasks.len(), cost_ns, |i| {
        let (task, member, place) = &tasks[i];
        let rows = HeadRows::<M> { pages: &plain.pages, step: &step, bias, task, out: shared };
        M::run(context.isa, HeadWeights { rows, member: *member, place: place.clone() });
    });
    Ok(out)
}

/// Plain keys and values laid into pages, sequence after sequence.
struct Plain<C> {
    pages: PagedCells<C>,
    lens: Vec<u32>,
    table_start_loc: Vec<u32>,
    block_tables: Vec<u32>,
}

impl<C: Cell> Plain<C> {
    fn new(
        context: &Context,
        kv: [Columns<'_>; 2],
        shape: AttentionShape,
        cu_seqlens_k: &[u32],
    ) -> Result<Self> {
        let lens: Vec<u32> = cu_seqlens_k.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (mut slots, mut table_start_loc) = (Vec::with_capacity(kv[0].of.dims().0), vec![0_u32]);
        let mut n_blocks = 0;
        for &len in &lens {
            let first = n_blocks * KV_BLOCK_TOKENS as u32;
            slots.extend(first..first + len);
            n_blocks += len.div_ceil(KV_BLOCK_TOKENS as u32);
            table_start_loc.push(n_blocks);
        }
        let AttentionShape { n_kv_heads, head_dim, .. } = shape;
        let layout = KvLayout { n_layers: 1, n_blocks: n_blocks as usize, n_kv_heads, head_dim };
        let mut pages = PagedCells::<C>::new(layout, PageOrder::Heads)?;
        pages.write(context, 0, kv, &slots);
        Ok(Self { pages, lens, table_start_loc, block_tables: (0..n_blocks).collect() })
    }

    /// Arguments of attention over these pages.
    fn step<'a>(&'a self, q: Columns<'a>, shape: AttentionShape, seqs: HostVarlen<'a>) -> Step<'a> {
        let batch = PagedBatch {
            query_start_loc: seqs.cu_seqlens_q,
            table_start_loc: &self.table_start_loc,
            block_tables: &self.block_tables,
            seq_lens: &self.lens,
        };
        Step { q, layer: 0, mask: seqs.mask, bias: seqs.bias, shape, batch, may_share: false }
    }
}

/// Attention of each sequence over its pages, `[Σq, n_heads·head_dim]`; the caller checked the arguments.
pub(super) fn paged<M: PageMath>(
    context: &Context,
    pages: &PagedCells<M::Word>,
    step: Step<'_>,
) -> CpuTensor {
    let (n_tokens, width) = (step.q.of.dims().0, step.shape.n_heads * step.shape.head_dim);
    let mut attended = unwritten(n_tokens * width);
    let max_rows = TASK_TILES * context.isa.tile_rows();
    let alone = alone(&step);
    let (tasks, cost_ns) = tasks::<M::Word>(&step, &alone, max_rows);
    let bias = &RowBias::new(step.bias, step.shape.n_heads, lens(&step));
    let (step, out) = (&step, &Shared::new(&mut attended));
    let Some(plan) = Plan::new(context, step, tasks.len()) else {
        context.pool.run(tasks.len(), cost_ns, |i| {
            M::run(context.isa, HeadRows::<M> { pages, step, bias, task: &tasks[i], out });
        });
        return CpuTensor::new(attended, n_tokens, width);
    };
    let mut parts = vec![0.0; plan.len()];
    {
        let (of_segments, out) = (plan.tasks(step, max_rows), &Shared::new(&mut parts));
        context.pool.run(of_segments.len(), cost_ns, |i| {
            M::run(context.isa, HeadRows::<M> { pages, step, bias, task: &of_segments[i], out });
        });
    }
    context.pool.run(tasks.len(), plan.len(), |i| {
        let rows = HeadRows::<M> { pages, step, bias, task: &tasks[i], out };
        M::run(context.isa, Joined { rows, parts: &parts, places: plan.places() });
    });
    CpuTensor::new(attended, n_tokens, width)
}

/// Cuts a step into tasks of up to `max_rows` rows of a sequence, and estimates what they take together on one thread.
fn tasks<'a, C: Word>(step: &Step<'_>, alone: &'a [Member], max_rows: usize) -> (Vec<Task<'a>>, usize) {
    let AttentionShape { n_kv_heads, head_dim, .. } = step.shape;
    let (mut tasks, mut cost_ns) = (Vec::new(), 0);
    for (members, &n_keys) in alone.chunks(1).zip(step.batch.seq_lens) {
        let n_rows = n_rows(step, members[0].seq);
        // Two multiply-adds at about 1/50 ns, or two values from memory at about 1/8 ns.
        let values = n_kv_heads * head_dim * n_keys as usize;
        cost_ns += (values * n_rows / 25).max(values * n_rows.min(1) / 4 / C::STEPS);
        for kv_head in 0..n_kv_heads {
            let runs = runs(n_rows, max_rows);
            tasks.extend(runs.map(|rows| Task { members, kv_head, rows, part: None }));
        }
    }
    (tasks, cost_ns)
}
