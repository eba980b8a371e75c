//! The arrays of a step on a back end, as the layers read them.

use super::adapters::StagedAdapters;
use super::expert_rows::ExpertRows;
use crate::decoder::cross_rows::CrossRows;
use crate::layers::StagedPositions;
use triptych_kernels::ops::{Indices, PagedBounds, PagedSequences, RecurrentSequences};

/// Handles of the arrays that the layers of a step read.
#[derive(Clone, Copy)]
pub(crate) struct StepArrays {
    /// Token of each row.
    pub ids: Indices,
    /// Rows that are encoder rows, in their order; `None` of none.
    pub embeds: Option<Indices>,
    /// Rows after its own that each row attends to as well; `None`: none.
    pub ahead: Option<Indices>,
    /// Rows that go through a visual expert.
    pub experts: ExpertRows,
    /// Positions of the rows.
    pub positions: StagedPositions,
    /// Self-attention slot of each row.
    pub slots: Indices,
    /// Sequences and their blocks of self-attention KV.
    pub own: PagedSequences,
    /// Rows that cross-attend.
    pub cross: CrossRows,
    /// Sequences and their slots of recurrent states; `None`: no layer has one.
    pub states: Option<RecurrentSequences>,
}

/// Queries and keys of the sequences of a step, at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepBounds {
    /// Self-attention.
    pub own: PagedBounds,
    /// Cross-attention.
    pub cross: PagedBounds,
}

/// A step on a back end.
pub(crate) struct StagedStep<S> {
    /// The arrays that the handles are of.
    pub step: S,
    /// Those of the layers.
    pub arrays: StepArrays,
    /// Rows with adapters.
    pub adapters: StagedAdapters,
    /// Rows to compute logits of.
    pub logit_rows: Indices,
}
