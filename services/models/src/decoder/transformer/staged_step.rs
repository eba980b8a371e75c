//! The arrays of a step on a back end, as the layers read them.

use crate::decoder::cross_rows::CrossRows;
use crate::layers::StagedPositions;
use triptych_kernels::ops::{Indices, PagedSequences};

/// A step on a back end.
pub(crate) struct StagedStep<S> {
    /// The arrays that the handles are of.
    pub step: S,
    /// Token of each row.
    pub ids: Indices,
    /// Rows that are encoder rows, in their order; `None` of none.
    pub embeds: Option<Indices>,
    /// Positions of the rows.
    pub positions: StagedPositions,
    /// Self-attention slot of each row.
    pub slots: Indices,
    /// Sequences and their blocks of self-attention KV.
    pub own: PagedSequences,
    /// Rows that cross-attend.
    pub cross: CrossRows,
    /// Rows to compute logits of.
    pub logit_rows: Indices,
}
