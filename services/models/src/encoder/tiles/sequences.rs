//! The sequences that attention runs over in images of tiles.

use super::rows::TileRows;
use triptych_kernels::KernelError;
use triptych_kernels::ops::{Indices, Sequences, StageBuilder};

/// Attention sequences of a run, two for each image. Rows of tiles that the image has attend to all its rows; the rest
/// attend to the rows of those tiles only.
pub(in crate::encoder) struct TileSequences {
    queries: Vec<u32>,
    keys: Vec<u32>,
    /// Rows of the keys; those of tiles occur twice.
    key_rows: Vec<u32>,
    /// Queries of a sequence, at most, in a captured forward.
    max_seqlen: Option<usize>,
}

/// Attention sequences of a run in a step.
#[derive(Clone, Copy, Debug)]
pub(in crate::encoder) struct StagedTileSequences {
    /// Queries and keys.
    pub seqs: Sequences,
    /// Rows of the keys.
    pub key_rows: Indices,
}

impl TileSequences {
    /// Adds the sequences to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(&self, builder: &mut StageBuilder) -> Result<StagedTileSequences, KernelError> {
        let seqs = match self.max_seqlen {
            None => builder.sequences(&self.queries, &self.keys)?,
            Some(max_seqlen) => builder.bounded_sequences(&self.queries, &self.keys, max_seqlen)?,
        };
        Ok(StagedTileSequences { seqs, key_rows: builder.indices(&self.key_rows)? })
    }

    /// The same with as many keys as images of so many rows can have: those of padding are a last sequence's, which has no
    /// queries.
    pub fn padded(rows: &TileRows, n_seen: usize) -> Self {
        let mut sequences = Self::of(rows);
        let n_image = rows.images.iter().map(|[_, n_rows]| *n_rows).max().unwrap_or(0);
        sequences.key_rows.resize(rows.images.len() * (n_image + n_seen), 0);
        sequences.queries.push(rows.n_rows as u32);
        sequences.keys.push(sequences.key_rows.len() as u32);
        Self { max_seqlen: Some(n_image), ..sequences }
    }

    /// Sequences of the rows of a run.
    pub fn of(rows: &TileRows) -> Self {
        let mut sequences = Self { queries: vec![0], keys: vec![0], key_rows: Vec::new(), max_seqlen: None };
        let mut first = 0;
        for [n_seen, n_rows] in &rows.images {
            let seen = first + *n_seen as u32;
            let end = first + *n_rows as u32;
            sequences.key_rows.extend(first..end);
            sequences.queries.push(seen);
            sequences.keys.push(sequences.key_rows.len() as u32);
            sequences.key_rows.extend(first..seen);
            sequences.queries.push(end);
            sequences.keys.push(sequences.key_rows.len() as u32);
            first = end;
        }
        sequences
    }
}
