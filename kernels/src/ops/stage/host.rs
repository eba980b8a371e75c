//! A step in host memory: what host back ends compute with, and what a device keeps beside its copy for sizes.

use super::{
    Angles, Indices, Offsets, PagedSequences, Place, RecurrentBatch, RecurrentSequences, StagedArray,
    WeightedRows,
};
use crate::ops::PagedBatch;
use crate::ops::error::{KernelError, Result};

/// The arrays of a step, or of an encoder batch.
#[derive(Debug)]
pub struct HostStep {
    id: u64,
    words: Vec<u32>,
    arrays: Vec<StagedArray>,
}

impl HostStep {
    pub(super) fn new(id: u64, words: Vec<u32>, arrays: Vec<StagedArray>) -> Self {
        Self { id, words, arrays }
    }

    /// All arrays, with what lies between them.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The arrays, in the order in which they were added.
    pub(crate) fn arrays(&self) -> &[StagedArray] {
        &self.arrays
    }

    /// The array of a handle; `op` is for the error.
    ///
    /// # Errors
    /// [`KernelError::Step`] for the handle of another step, here and in all that follow.
    pub fn indices(&self, op: &'static str, indices: Indices) -> Result<&[u32]> {
        self.read(op, indices.place)
    }

    /// The offsets of a handle.
    ///
    /// # Errors
    /// As [`Self::indices`].
    pub fn offsets(&self, op: &'static str, offsets: Offsets) -> Result<&[u32]> {
        self.read(op, offsets.place)
    }

    /// The sequences of a handle.
    ///
    /// # Errors
    /// As [`Self::indices`].
    pub fn paged(&self, op: &'static str, seqs: PagedSequences) -> Result<PagedBatch<'_>> {
        Ok(PagedBatch {
            query_start_loc: self.read(op, seqs.queries.place)?,
            table_start_loc: self.read(op, seqs.tables.place)?,
            block_tables: self.read(op, seqs.blocks.place)?,
            seq_lens: self.read(op, seqs.seq_lens)?,
        })
    }

    /// The sequences of a handle, with the slots of their states.
    ///
    /// # Errors
    /// As [`Self::indices`].
    pub fn recurrent(&self, op: &'static str, seqs: RecurrentSequences) -> Result<RecurrentBatch<'_>> {
        Ok(RecurrentBatch {
            query_start_loc: self.read(op, seqs.queries.place)?,
            slots: self.read(op, seqs.slots)?,
        })
    }

    /// The cosines and sines of a handle.
    ///
    /// # Errors
    /// As [`Self::indices`].
    pub fn angles(&self, op: &'static str, angles: Angles) -> Result<[&[f32]; 2]> {
        Ok([floats(self.read(op, angles.cos)?), floats(self.read(op, angles.sin)?)])
    }

    /// The rows and weights of a handle.
    ///
    /// # Errors
    /// As [`Self::indices`].
    pub fn weighted(&self, op: &'static str, rows: WeightedRows) -> Result<(&[u32], &[f32])> {
        Ok((self.read(op, rows.rows.place)?, floats(self.read(op, rows.weights)?)))
    }

    fn read(&self, op: &'static str, place: Place) -> Result<&[u32]> {
        if place.step != self.id {
            return Err(KernelError::Step { op });
        }
        self.words.get(place.range()).ok_or(KernelError::Step { op })
    }
}

/// Words as the values whose bits they are.
fn floats(words: &[u32]) -> &[f32] {
    // SAFETY: u32 and f32 have one size and alignment, every u32 is the bits of an f32, and the slice borrows `words`.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}
