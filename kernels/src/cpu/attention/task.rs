//! A task of attention: the rows that it computes.

use std::ops::Range;

use super::part::Segment;
use super::step::Step;

/// A sequence among those whose rows see the same pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) seq: usize,
    /// Rows of the members before it.
    pub(super) first_row: usize,
}

/// The rows of one task: some of those that share the pages of one key head.
#[derive(Clone, Debug)]
pub(super) struct Task<'a> {
    /// Sequences that the rows belong to: one, or several that see the same pages, one's rows after the other's.
    pub(super) members: &'a [Member],
    pub(super) kv_head: usize,
    /// Row `r` of a sequence is query `r / group`, head `kv_head · group + r % group`.
    pub(super) rows: Range<usize>,
    /// The segment of keys to read; `None` for all keys.
    pub(super) part: Option<Segment<'a>>,
}

/// Each sequence as a group of its own.
pub(super) fn alone(step: &Step<'_>) -> Vec<Member> {
    (0..step.batch.seq_lens.len()).map(|seq| Member { seq, first_row: 0 }).collect()
}

/// Runs of up to `max_rows` rows.
pub(super) fn runs(n_rows: usize, max_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_rows).step_by(max_rows).map(move |row| row..n_rows.min(row + max_rows))
}
