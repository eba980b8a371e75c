//! A layer over the rows of tiles, and the sequences that its attention runs over.

use super::rows::TileRows;
use crate::error::ModelError;
use crate::layers::{FeedForward, Loader, Residual, SelfAttention};
use crate::spec::EncoderSpec;
use triptych_kernels::ops::{Indices, Mask, Qkv, ScoreBias, Sequences, StageBuilder, Varlen};
use triptych_kernels::{Backend, KernelError};

/// A layer with its weights, multiplied by its gates.
pub(super) struct TiledLayer<B: Backend> {
    attention_norm: Residual<B>,
    attention: SelfAttention<B>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
}

/// Attention sequences of a run, two for each image. Rows of tiles that the image has attend to all its rows; the rest
/// attend to the rows of those tiles only.
pub(super) struct TileSequences {
    queries: Vec<u32>,
    keys: Vec<u32>,
    /// Rows of the keys; those of tiles occur twice.
    key_rows: Vec<u32>,
    /// Queries of a sequence, at most, in a captured forward.
    max_seqlen: Option<usize>,
}

/// Attention sequences of a run in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedTileSequences {
    seqs: Sequences,
    key_rows: Indices,
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

impl<B: Backend> TiledLayer<B> {
    /// Loads the layer under `loader`, with the gates of these names, on attention and feed-forward.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        spec: &EncoderSpec,
        gates: Option<[&str; 2]>,
    ) -> Result<Self, ModelError> {
        let stack = &spec.stack;
        let names = &spec.names.stack;
        let [on_attention, on_feed_forward] = match gates {
            Some([first, second]) => [loader.gate(first)?, loader.gate(second)?],
            None => [1.0; 2],
        };
        Ok(Self {
            attention_norm: Residual::of_attention(loader, names.attention.norm, stack)?,
            attention: SelfAttention::load_gated(loader, &names.attention, stack, on_attention)?,
            feed_forward_norm: Residual::of_feed_forward(loader, names.feed_forward_norm, stack)?,
            feed_forward: FeedForward::load_gated(loader, names, stack, on_feed_forward)?,
        })
    }

    /// Runs the layer on `x: [n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for rows that `sequences` does not describe.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        sequences: StagedTileSequences,
    ) -> Result<B::Tensor, ModelError> {
        let StagedTileSequences { seqs, key_rows } = sequences;
        let seqs = Varlen { seqs, mask: Mask::Full, bias: ScoreBias::None };
        let x = self.attention_norm.around(backend, x, |input, residual| {
            let [q, k, v] = &self.attention.project(backend, step, input, None)?;
            let [k, v] = &[backend.gather_rows(step, k, key_rows)?, backend.gather_rows(step, v, key_rows)?];
            let context = backend.attention(step, Qkv { q, k, v }, self.attention.shape(), seqs)?;
            self.attention.output(backend, &context, residual)
        })?;
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))
    }
}
