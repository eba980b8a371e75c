//! A layer over the rows of tiles, and the sequences that its attention runs over.

use super::rows::TileRows;
use crate::error::ModelError;
use crate::layers::{FeedForward, Loader, Residual, SelfAttention};
use crate::spec::EncoderSpec;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Mask, Qkv, ScoreBias, Varlen};

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
}

impl TileSequences {
    /// Sequences of the rows of a run.
    pub fn of(rows: &TileRows) -> Self {
        let mut sequences = Self { queries: vec![0], keys: vec![0], key_rows: Vec::new() };
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
            attention_norm: Residual::load(loader, names.attention.norm, stack)?,
            attention: SelfAttention::load_gated(loader, &names.attention, stack, on_attention)?,
            feed_forward_norm: Residual::load(loader, names.feed_forward_norm, stack)?,
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
        x: &B::Tensor,
        sequences: &TileSequences,
    ) -> Result<B::Tensor, ModelError> {
        let seqs = Varlen {
            cu_seqlens_q: &sequences.queries,
            cu_seqlens_k: &sequences.keys,
            mask: Mask::Full,
            bias: ScoreBias::None,
        };
        let x = self.attention_norm.around(backend, x, |input, residual| {
            let [q, k, v] = &self.attention.project(backend, input, None)?;
            let [k, v] =
                &[backend.gather_rows(k, &sequences.key_rows)?, backend.gather_rows(v, &sequences.key_rows)?];
            let context = backend.attention(Qkv { q, k, v }, self.attention.shape(), seqs)?;
            self.attention.output(backend, &context, residual)
        })?;
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))
    }
}
