//! The rows of a step that have an adapter.

use crate::decoder::StepInput;
use crate::error::ModelError;
use crate::layers::AdapterGroup;
use crate::lora::Adapters;
use triptych_core::AdapterId;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Rows of a step by their adapters.
#[derive(Default)]
pub(super) struct StagedAdapters(Vec<(AdapterId, Indices)>);

/// The refusal of adapters for a decoder whose layers, or some of their weights, some rows skip.
pub(super) fn refused() -> ModelError {
    ModelError::Config {
        file: "config.json",
        key: "model_type".into(),
        actual: "a decoder with layers, or a visual expert, that some tokens skip".into(),
        expected: "a decoder of which every token goes through all weights, for LoRA adapters".into(),
    }
}

impl StagedAdapters {
    /// Adds the rows of a checked step.
    pub fn stage(builder: &mut StageBuilder, step: &StepInput<'_>) -> Result<Self, KernelError> {
        let staged = step.adapters.iter().map(|group| Ok((group.adapter, builder.indices(group.rows)?)));
        staged.collect::<Result<_, _>>().map(Self)
    }

    /// The groups of the step.
    pub fn groups<'a, B: Backend>(
        &self,
        adapters: &'a Adapters<B>,
    ) -> Result<Vec<AdapterGroup<'a, B>>, ModelError> {
        self.0.iter().map(|(id, rows)| adapters.group(*id, Some(*rows))).collect()
    }
}
