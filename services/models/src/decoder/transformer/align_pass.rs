//! An alignment pass between two of its layers.

use crate::layers::StagedPositions;
use triptych_core::AdapterId;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Indices, Sequences};

/// The arrays of an alignment pass.
pub(crate) struct StagedAlign<S> {
    pub step: S,
    pub ids: Indices,
    pub positions: StagedPositions,
    // Tokens among themselves, and with the encoder rows as keys.
    pub own: Sequences,
    pub cross: Sequences,
    /// Cross-attention heads to report in each layer, with the places of their weights.
    pub heads: Vec<(Indices, Vec<usize>)>,
}

/// A pass between two of its layers.
pub(crate) struct AlignPass<B: Backend> {
    /// Encoder rows, `[n_rows, encoder_hidden]`.
    pub rows: B::Tensor,
    /// Output of the layers so far, `[n_tokens, hidden]`.
    pub x: B::Tensor,
    pub staged: StagedAlign<B::Step>,
    /// Adapter of the tokens.
    pub adapter: Option<AdapterId>,
    pub next_layer: usize,
    pub n_heads: usize,
    /// Weights of the heads, `[n_heads, n_tokens, n_rows]`; zeros where a layer is still to come.
    pub weights: Vec<f32>,
}
