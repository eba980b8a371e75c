//! Layers with cross-attention in the place of self-attention: the rows of a step that go through them, and the cache
//! layers of their keys and values.
//!
//! A token skips such a layer if its sequence has no encoder rows, or if it comes before the first token that attends to
//! them. After the published code of Llama 3.2 Vision
//! (<https://github.com/meta-llama/llama-models/blob/v0.1.0/models/llama3/reference_impl/multimodal/model.py>).

use super::StepInput;
use crate::error::ModelError;
use crate::spec::{CrossSpec, DecoderSpec, ItemsSpec, StackSpec};
use triptych_kernels::ops::{Indices, PagedBatch, PagedSequences, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Indices of a decoder layer in the caches; `None` where it has nothing there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheLayers {
    /// Layer of the self-attention cache.
    pub own: Option<usize>,
    /// Layer of the cross-attention cache.
    pub cross: Option<usize>,
    /// Layer of the cache of recurrent states.
    pub recurrent: Option<usize>,
}

impl CacheLayers {
    /// Cache layers of decoder layer `idx`.
    pub fn of(spec: &DecoderSpec, idx: usize) -> Self {
        match &spec.items {
            ItemsSpec::CrossAttention(cross) => Self::of_cross(cross, idx),
            ItemsSpec::Embedded { .. } => Self::of_stack(&spec.stack, idx),
        }
    }

    fn of_stack(stack: &StackSpec, idx: usize) -> Self {
        let before = stack.n_recurrent_before(idx);
        match stack.layer(idx).recurrent {
            Some(_) => Self { recurrent: Some(before), ..Self::default() },
            None => Self { own: Some(idx - before), ..Self::default() },
        }
    }

    fn of_cross(cross: &CrossSpec, idx: usize) -> Self {
        let Some(instead) = cross.instead() else {
            return Self { own: Some(idx), cross: Some(idx), recurrent: None };
        };
        let before = instead.layers.iter().filter(|layer| **layer < idx).count();
        match instead.layers.contains(&idx) {
            true => Self { cross: Some(before), ..Self::default() },
            false => Self { own: Some(idx - before), ..Self::default() },
        }
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
    /// Adds the cross-attention of a checked step. `is_optional`: rows may come before their image, or have none.
    ///
    /// # Errors
    /// [`KernelError`] for block tables that do not fit the sequences.
    pub fn stage(
        builder: &mut StageBuilder,
        step: &StepInput<'_>,
        is_optional: bool,
    ) -> Result<Self, KernelError> {
        let Some(kv) = step.cross_kv else { return Ok(Self::Nobody) };
        if !is_optional {
            return Ok(Self::All(builder.paged(kv)?));
        }
        let seen = SeenRows::of(step);
        if seen.rows.is_empty() {
            return Ok(Self::Nobody);
        }
        let seqs = builder.paged(PagedBatch { query_start_loc: &seen.query_start_loc, ..kv })?;
        Ok(match seen.rows.len() == step.token_ids.len() {
            true => Self::All(seqs),
            false => Self::Some(builder.indices(&seen.rows)?, seqs),
        })
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

/// The rows of a step that come after the first token that cross-attends.
#[derive(Debug, PartialEq, Eq)]
struct SeenRows {
    rows: Vec<u32>,
    /// Offsets of the sequences in `rows`, `[n_seqs + 1]`.
    query_start_loc: Vec<u32>,
}

impl SeenRows {
    /// Selects the rows of a checked step.
    fn of(step: &StepInput<'_>) -> Self {
        let mut rows = Vec::new();
        let mut query_start_loc = vec![0];
        let n_seqs = step.self_kv.seq_lens.len();
        for i in 0..n_seqs {
            let [first, end] = [0, 1].map(|k| step.self_kv.query_start_loc.get(i + k).copied().unwrap_or(0));
            let n_queries = end.saturating_sub(first);
            let first_token = step.self_kv.seq_lens[i].saturating_sub(n_queries);
            let from = step.cross_from.map_or(0, |from| from[i]);
            let sees = step.cross_kv.is_some_and(|kv| kv.seq_lens[i] > 0);
            let blind = if sees { from.saturating_sub(first_token).min(n_queries) } else { n_queries };
            rows.extend(first + blind..end);
            query_start_loc.push(rows.len() as u32);
        }
        Self { rows, query_start_loc }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_kernels::ops::ChooseBatch;

    fn batch<'a>(query_start_loc: &'a [u32], seq_lens: &'a [u32]) -> PagedBatch<'a> {
        PagedBatch { query_start_loc, table_start_loc: &[], block_tables: &[], seq_lens }
    }

    /// Three sequences: tokens 2 to 4 of one that cross-attends from 3 on, a token far past its image, two of a text.
    #[test]
    fn tokens_before_the_image_and_texts_do_not_see() {
        let starts = [0, 3, 4, 6];
        let choose = ChooseBatch::default();
        let step = |cross_from| StepInput {
            token_ids: &[0; 6],
            positions: &[[0; 3]; 6],
            embeds: &[],
            slot_mapping: &[0; 6],
            self_kv: batch(&starts, &[5, 9, 2]),
            cross_kv: Some(batch(&starts, &[10, 10, 0])),
            cross_from,
            state_slots: None,
            adapters: &[],
            logit_rows: &[],
            choose: &choose,
        };
        let from = [3, 1, 0];
        let seen =
            |rows: &[u32], starts: &[u32]| SeenRows { rows: rows.into(), query_start_loc: starts.into() };
        assert_eq!(SeenRows::of(&step(Some(&from))), seen(&[1, 2, 3], &[0, 2, 3, 3]));
        assert_eq!(SeenRows::of(&step(None)), seen(&[0, 1, 2, 3], &[0, 3, 4, 4]));
        let nothing = StepInput { cross_kv: None, ..step(None) };
        assert!(SeenRows::of(&nothing).rows.is_empty());
    }
}
