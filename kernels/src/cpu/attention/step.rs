//! A step of attention: queries, the pages they read, and the sizes that follow.

use std::ops::Range;

use triptych_core::shape::KV_BLOCK_TOKENS;

use crate::cpu::cell::PANEL;
use crate::cpu::kv::Columns;
use crate::host::{BiasSlices, HostMask};
use crate::ops::{AttentionShape, PagedBatch};

/// Keys whose scores a tile holds at a time: their pages of a head fit the L2 cache.
pub(super) const STRETCH: usize = STRETCH_PAGES * KV_BLOCK_TOKENS;

/// Pages of a stretch.
pub(super) const STRETCH_PAGES: usize = 8;

/// Pages of a quantization group: their weights have one scale where they are integers.
pub(super) const GROUP_PAGES: usize = 2;

/// Quantization groups of a stretch.
pub(super) const GROUPS: usize = STRETCH_PAGES / GROUP_PAGES;

/// Keys of a segment.
pub(super) const SEGMENT: usize = 2 * STRETCH;

/// Arguments of attention over a cache.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    /// `[Σq, n_heads·head_dim]`.
    pub(crate) q: Columns<'a>,
    pub(crate) layer: usize,
    pub(crate) mask: HostMask<'a>,
    pub(crate) bias: BiasSlices<'a>,
    pub(crate) shape: AttentionShape,
    pub(crate) batch: PagedBatch<'a>,
    /// `true` if pages may be in several tables.
    pub(crate) may_share: bool,
}

/// Queries and keys of each sequence.
pub(super) fn lens<'a>(step: &'a Step<'_>) -> impl Iterator<Item = (usize, usize)> + 'a {
    let seq_lens = step.batch.seq_lens.iter().enumerate();
    seq_lens.map(|(seq, &n_keys)| (queries(step, seq).len(), n_keys as usize))
}

/// Rows of a sequence that share a key head.
pub(super) fn n_rows(step: &Step<'_>, seq: usize) -> usize {
    queries(step, seq).len() * (step.shape.n_heads / step.shape.n_kv_heads)
}

/// Range of the keys that a row of a sequence sees. Neither end falls from one row to the next.
pub(super) fn visible(step: &Step<'_>, seq: usize, row: usize) -> Range<usize> {
    let (rows, n_keys) = (queries(step, seq), step.batch.seq_lens[seq] as usize);
    let group = step.shape.n_heads / step.shape.n_kv_heads;
    let n_queries = rows.len();
    step.mask.of_rows(rows).visible([n_queries, n_keys], row / group)
}

/// The width of a head in whole panels.
pub(super) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

/// Rows of `q` of a sequence.
pub(super) fn queries(step: &Step<'_>, seq: usize) -> Range<usize> {
    let offsets = step.batch.query_start_loc;
    offsets[seq] as usize..offsets[seq + 1] as usize
}
