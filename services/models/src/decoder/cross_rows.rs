//! Layers with cross-attention in the place of self-attention: the rows of a step that go through them, and the cache
//! layers of their keys and values.
//!
//! A token skips such a layer if its sequence has no encoder rows, or if it comes before the first token that attends to
//! them. After the published code of Llama 3.2 Vision
//! (<https://github.com/meta-llama/llama-models/blob/v0.1.0/models/llama3/reference_impl/multimodal/model.py>).

use super::StepInput;
use crate::error::ModelError;
use crate::spec::{DecoderSpec, ItemsSpec, KvPlace};
use triptych_kernels::ops::{Indices, PagedSequences, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Indices of a decoder layer in the caches; `None` where it has nothing there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheLayers {
    /// Place in the self-attention cache.
    pub own: Option<KvPlace>,
    /// Layer of the cross-attention cache.
    pub cross: Option<usize>,
    /// Layer of the cache of recurrent states.
    pub recurrent: Option<usize>,
}

impl CacheLayers {
    /// Cache layers of decoder layer `idx`, whose keys of self-attention have the place `own`.
    pub fn of(spec: &DecoderSpec, idx: usize, own: Option<KvPlace>) -> Self {
        let cross = match &spec.items {
            ItemsSpec::CrossAttention(cross) => match cross.instead() {
                None => Some(idx),
                Some(instead) if instead.layers.contains(&idx) => {
                    Some(instead.layers.iter().filter(|layer| **layer < idx).count())
                }
                Some(_) => None,
            },
            ItemsSpec::Embedded { .. } => None,
        };
        let recurrent = spec.stack.layer(idx).recurrent.map(|_| spec.stack.n_recurrent_before(idx));
        Self { own, cross, recurrent }
    }
}

/// The rows of a step that attend to encoder rows, as they lie in the step.
#[derive(Clone, Copy, Debug)]
pub(super) enum CrossRows {
    /// No row does.
    Nobody,
    /// Every row does.
    All(PagedSequences),
    /// These rows do, as sequences of their own.
    Some(Indices, PagedSequences),
}

impl CrossRows {
    /// Adds the cross-attention of a checked step.
    ///
    /// # Errors
    /// [`KernelError`] for block tables that do not fit the sequences.
    pub fn stage(builder: &mut StageBuilder, step: &StepInput<'_>) -> Result<Self, KernelError> {
        match (step.cross_kv, step.cross_rows) {
            (None, _) | (_, Some([])) => Ok(Self::Nobody),
            (Some(kv), Some(rows)) if rows.len() < step.token_ids.len() => {
                Ok(Self::Some(builder.indices(rows)?, builder.paged(kv)?))
            }
            (Some(kv), _) => Ok(Self::All(builder.paged(kv)?)),
        }
    }

    /// The sequences of all rows, if every row cross-attends.
    pub fn of_all(self) -> Option<PagedSequences> {
        match self {
            Self::All(seqs) => Some(seqs),
            Self::Nobody | Self::Some(..) => None,
        }
    }

    /// Runs `layer` on these rows of `x: [n_tokens, hidden]`, with their own sequences; the other rows are unchanged.
    ///
    /// # Errors
    /// Those of `layer`, and of the back end.
    pub fn run<B: Backend>(
        self,
        backend: &B,
        step: &B::Step,
        mut x: B::Tensor,
        layer: impl FnOnce(&B::Tensor, Self) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Nobody => Ok(x),
            Self::All(_) => layer(&x, self),
            Self::Some(rows, seqs) => {
                let seen = layer(&backend.gather_rows(step, &x, rows)?, Self::All(seqs))?;
                backend.scatter_rows(step, &mut x, rows, &seen)?;
                Ok(x)
            }
        }
    }
}
