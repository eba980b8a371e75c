//! Sequences with recurrent states among the arrays of a step.

use std::ops::Range;

use super::{ArrayContent, Offsets, Place, StageBuilder, at_most, lens};
use crate::check::sizes;
use crate::ops::error::{KernelError, Result};

/// The slot of a sequence that pads a captured graph. No state is read or written for it, and its rows give zeros.
pub const PADDING_SLOT: u32 = u32::MAX;

/// Rows and slots of sequences in host memory: a staged [`RecurrentSequences`], as host back ends read it.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentBatch<'a> {
    /// Offsets of the sequences in the rows, `[n_seqs + 1]`.
    pub query_start_loc: &'a [u32],
    /// Slot of each sequence, or [`PADDING_SLOT`], `[n_seqs]`.
    pub slots: &'a [u32],
}

/// Sequences whose states are in slots of a cache: what [`StageBuilder::recurrent`] gives.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentSequences {
    /// Offsets of the sequences in the rows.
    pub(crate) queries: Offsets,
    pub(super) slots: Place,
    /// One more than the largest slot; 0 of none.
    pub(crate) bound: usize,
    /// Rows of a sequence, at most.
    pub(crate) max_seqlen_q: usize,
}

impl RecurrentSequences {
    /// Words of the two arrays of so many sequences, for [`StageBuilder::with_rooms`].
    pub fn rooms(n_seqs: usize) -> [usize; 2] {
        [n_seqs.saturating_add(1), n_seqs]
    }

    /// Sequences.
    pub fn n_seqs(self) -> usize {
        self.queries.n_seqs()
    }

    /// Words of the step: `query_start_loc`, slots.
    pub fn words(self) -> [Range<usize>; 2] {
        [self.queries.words(), self.slots.range()]
    }
}

impl StageBuilder {
    /// Adds sequences with recurrent states: their offsets in the rows, `[n_seqs + 1]`, and the slot of each, `[n_seqs]`. The slot
    /// [`PADDING_SLOT`] stands for padding.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for offsets that are not, another number of slots, or a slot that comes twice.
    pub fn recurrent(&mut self, query_start_loc: &[u32], slots: &[u32]) -> Result<RecurrentSequences> {
        let first = self.arrays.len();
        let queries = self.offsets(query_start_loc)?;
        sizes::same("stage", "slots of sequences", &[slots.len()], &[queries.n_seqs()])?;
        let mut used: Vec<u32> = slots.iter().copied().filter(|&slot| slot != PADDING_SLOT).collect();
        used.sort_unstable();
        if let Some(pair) = used.windows(2).find(|pair| pair[0] == pair[1]) {
            let (what, actual) = ("a slot that comes twice", vec![pair[0] as usize]);
            return Err(KernelError::Shape { op: "stage", what, expected: vec![], actual });
        }
        let bound = used.last().map_or(0, |&most| most as usize + 1);
        let slots = self.push(ArrayContent::StateSlots { bound }, slots.iter().copied())?;
        let max_seqlen_q = lens(query_start_loc).max().unwrap_or_default();
        self.bound_queries(first, max_seqlen_q);
        Ok(RecurrentSequences { queries, slots, bound, max_seqlen_q })
    }

    /// Adds such sequences of at most `max_seqlen_q` rows, whatever the longest of this batch has: a captured forward takes every
    /// batch of as many sequences and rows.
    ///
    /// # Errors
    /// As [`Self::recurrent`], and for a sequence that is longer.
    pub fn bounded_recurrent(
        &mut self,
        query_start_loc: &[u32],
        slots: &[u32],
        max_seqlen_q: usize,
    ) -> Result<RecurrentSequences> {
        let first = self.arrays.len();
        let mut seqs = self.recurrent(query_start_loc, slots)?;
        at_most("rows of a sequence", seqs.max_seqlen_q, max_seqlen_q)?;
        seqs.max_seqlen_q = max_seqlen_q;
        self.bound_queries(first, max_seqlen_q);
        Ok(seqs)
    }
}
