//! The arrays of a step on a back end, as the layers read them.

use super::adapters::StagedAdapters;
use super::expert_rows::ExpertRows;
use crate::decoder::cross_rows::CrossRows;
use crate::decoder::{GroupKv, MAX_KV_GROUPS};
use crate::layers::StagedPositions;
use triptych_kernels::KernelError;
use triptych_kernels::ops::{Indices, PagedBounds, PagedSequences, RecurrentSequences, StageBuilder};

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
    /// Self-attention KV of each group.
    pub own: StagedGroups,
    /// Rows that cross-attend.
    pub cross: CrossRows,
    /// Sequences and their slots of recurrent states; `None`: no layer has one.
    pub states: Option<RecurrentSequences>,
}

/// Self-attention KV of each group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StagedGroups([Option<StagedKv>; MAX_KV_GROUPS]);

/// Self-attention KV of the layers of one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StagedKv {
    /// Slot of each row.
    pub slots: Indices,
    /// Sequences and their blocks.
    pub seqs: PagedSequences,
}

impl StagedGroups {
    /// Adds the groups of a checked step, within bounds for a forward that is captured.
    ///
    /// # Errors
    /// [`KernelError`] for block tables that do not fit the sequences, or more groups than there may be.
    pub fn stage(
        builder: &mut StageBuilder,
        groups: &[GroupKv<'_>],
        bounds: Option<PagedBounds>,
    ) -> Result<Self, KernelError> {
        let mut staged = Self::default();
        if groups.len() > staged.0.len() {
            return Err(no_group(groups.len()));
        }
        for (place, group) in staged.0.iter_mut().zip(groups) {
            let slots = builder.indices(group.slot_mapping)?;
            let seqs = match bounds {
                Some(bounds) => builder.bounded_paged(group.tables, bounds)?,
                None => builder.paged(group.tables)?,
            };
            *place = Some(StagedKv { slots, seqs });
        }
        Ok(staged)
    }

    /// The KV of a group.
    ///
    /// # Errors
    /// [`KernelError::Index`] for one that the step has not.
    pub fn group(&self, idx: usize) -> Result<StagedKv, KernelError> {
        self.0.get(idx).copied().flatten().ok_or_else(|| no_group(idx))
    }
}

/// The refusal of a step for want of KV of a group.
fn no_group(index: usize) -> KernelError {
    KernelError::Index { op: "forward", what: "KV cache group", index, len: MAX_KV_GROUPS }
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
