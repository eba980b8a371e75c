//! Keys in segments: each gives its rows a part of their result, and parts are joined in order. Segments are counted from the
//! first key and joined alike by one task and by many: who computes them, and together with whom, does not change a bit.
//!
//! So few rows over many keys, as a step of one long sequence has, are shared by more threads than there are heads (Dao et
//! al. 2023, "Flash-Decoding for long-context inference"). And a segment whose pages are in the tables of several sequences
//! is read once for all of them (Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes"):
//! beams over one encoder output, or prompts with the same first 512 tokens.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::head::HeadRows;
use super::part::{Part, Places, Segment, n_segments};
use super::step::{SEGMENT, Step, n_rows, queries, visible};
use super::task::{Member, Task, runs};
use super::whole::PageMath;
use crate::cpu::context::Context;
use crate::cpu::simd::{Kernel, Simd};

/// Tasks that a thread should find: fewer are cut into segments.
const TASKS_PER_THREAD: usize = 2;

/// Sequences that see the same pages of a segment, or one that sees pages of its own.
#[derive(Debug)]
struct Group {
    segment: usize,
    members: Vec<Member>,
    n_rows: usize,
}

/// The keys of a segment that a sequence sees; equal for sequences that can be read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen<'a> {
    /// Keys up to the last that each of its rows sees; `None` where it is not the same for all.
    n_keys: Option<usize>,
    blocks: &'a [u32],
    seq: usize,
}

impl<'a> Seen<'a> {
    /// `None` for a sequence that has no such segment, or no rows.
    fn new(step: &Step<'a>, seq: usize, segment: usize) -> Option<Self> {
        const PAGES: usize = SEGMENT / KV_BLOCK_TOKENS;
        let (batch, first_key) = (&step.batch, segment * SEGMENT);
        if segment >= n_segments(batch.seq_lens[seq]) || queries(step, seq).is_empty() {
            return None;
        }
        let in_segment = |row| visible(step, seq, row).end.saturating_sub(first_key).min(SEGMENT);
        let [least, most] = [0, n_rows(step, seq) - 1].map(in_segment);
        let table = &batch.block_tables[batch.table_start_loc[seq] as usize..];
        let n_pages = (batch.seq_lens[seq] as usize).div_ceil(KV_BLOCK_TOKENS);
        let blocks = &table[segment * PAGES..n_pages.min((segment + 1) * PAGES)];
        Some(Self { n_keys: (least == most && most > 0).then_some(most), blocks, seq })
    }

    fn is_read_with(&self, other: &Self) -> bool {
        self.n_keys.is_some() && (self.n_keys, self.blocks) == (other.n_keys, other.blocks)
    }
}

/// Groups of sequences that see the same pages, for all segments of a step.
fn groups(step: &Step<'_>) -> Vec<Group> {
    let n_seqs = step.batch.seq_lens.len();
    let n_segments = step.batch.seq_lens.iter().map(|keys| n_segments(*keys)).max().unwrap_or(0);
    let mut groups = Vec::new();
    for segment in 0..n_segments {
        let mut seen: Vec<_> = (0..n_seqs).filter_map(|seq| Seen::new(step, seq, segment)).collect();
        if step.may_share {
            seen.sort_unstable();
        }
        groups.extend(seen.chunk_by(Seen::is_read_with).map(|together| {
            let mut group = Group { segment, members: Vec::with_capacity(together.len()), n_rows: 0 };
            for Seen { seq, .. } in together {
                group.members.push(Member { seq: *seq, first_row: group.n_rows });
                group.n_rows += n_rows(step, *seq);
            }
            group
        }));
    }
    groups
}

/// Division of a step into segments.
#[derive(Debug)]
pub(super) struct Plan {
    groups: Vec<Group>,
    places: Places,
}

impl Plan {
    /// `None` where it is not: no two sequences see the same pages of a segment, and there are tasks enough without, or no
    /// long sequence.
    pub(super) fn new(context: &Context, step: &Step<'_>, n_tasks: usize) -> Option<Self> {
        let (n_threads, seq_lens) = (context.pool.n_threads(), step.batch.seq_lens);
        let is_cut = n_threads > 1
            && n_tasks < TASKS_PER_THREAD * n_threads
            && seq_lens.iter().any(|keys| n_segments(*keys) > 1);
        let may_share = step.may_share && seq_lens.len() > 1;
        let groups = (is_cut || may_share).then(|| groups(step))?;
        let is_shared = groups.iter().any(|group| group.members.len() > 1);
        (is_cut || is_shared).then(|| Self { groups, places: Places::new(step) })
    }

    /// Values of all parts.
    pub(super) fn len(&self) -> usize {
        self.places.starts.last().copied().unwrap_or(0)
    }

    /// Places of the parts in memory.
    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    /// A task for each segment, key head, and run of rows that see the same pages.
    pub(super) fn tasks(&self, step: &Step<'_>, max_rows: usize) -> Vec<Task<'_>> {
        let mut tasks = Vec::new();
        for Group { segment, members, n_rows } in &self.groups {
            let part = Some(Segment { index: *segment, places: &self.places });
            for kv_head in 0..step.shape.n_kv_heads {
                tasks.extend(runs(*n_rows, max_rows).map(|rows| Task { members, kv_head, rows, part }));
            }
        }
        tasks
    }
}

/// A task whose segments other tasks have computed.
pub(super) struct Joined<'a, M: PageMath> {
    /// The task as it would be alone.
    pub(super) rows: HeadRows<'a, M>,
    /// Parts of all rows and segments.
    pub(super) parts: &'a [f32],
    /// Places of the parts in `parts`.
    pub(super) places: &'a Places,
}

impl<M: PageMath> Kernel for Joined<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, parts, places } = self;
        let (task, len) = (rows.task, places.part_len);
        // The rows of a task that is whole are of one sequence.
        let seq = task.members[0].seq;
        let of_row = |row| &parts[places.row(rows.step, task.kv_head, rows.of_seq(row))];
        let part = |i| Part::load((0..task.rows.len()).map(|row| &of_row(row)[i * len..(i + 1) * len]));
        let mut seen = part(0);
        for i in 1..places.n_segments[seq] {
            seen.join(s, &part(i), |row| rows.visible(row).end > i * SEGMENT);
        }
        rows.write(&seen);
    }
}
