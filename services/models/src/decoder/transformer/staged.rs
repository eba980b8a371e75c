//! A step's input as the layers read it: every array on the back end, once.

use super::adapters::StagedAdapters;
use super::expert_rows::ExpertRows;
use super::staged_step::{StagedGroups, StagedStep, StepArrays, StepBounds};
use super::{EmbedRows, StepInput, TransformerDecoder};
use crate::decoder::cross_rows::CrossRows;
use crate::error::ModelError;
use crate::spec::ItemsSpec;
use triptych_kernels::ops::StageBuilder;
use triptych_kernels::{Backend, KernelError};

impl<B: Backend> TransformerDecoder<B> {
    /// Takes the arrays of a checked step to the back end.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a step whose parts do not fit each other.
    pub(super) fn stage(&self, input: &StepInput<'_>) -> Result<StagedStep<B::Step>, ModelError> {
        let mut builder = StageBuilder::new();
        let arrays = self.add(&mut builder, input, None)?;
        let adapters = StagedAdapters::stage(&mut builder, input)?;
        let logit_rows = builder.indices(input.logit_rows)?;
        Ok(StagedStep { step: self.backend.stage(builder)?, arrays, adapters, logit_rows })
    }

    /// Adds the arrays that the layers of a checked step read; within bounds for a forward that is captured.
    pub(super) fn add(
        &self,
        builder: &mut StageBuilder,
        input: &StepInput<'_>,
        bounds: Option<StepBounds>,
    ) -> Result<StepArrays, ModelError> {
        let ids = builder.indices(input.token_ids)?;
        let embed_rows = embed_rows(input.embeds);
        let embeds = if embed_rows.is_empty() { None } else { Some(builder.indices(&embed_rows)?) };
        let ahead = match self.has_mutual_items() && embeds.is_some() {
            true => Some(builder.indices(&rows_ahead(input))?),
            false => None,
        };
        let experts = match self.has_visual_experts() {
            true => ExpertRows::stage(builder, input.embeds, input.token_ids.len())?,
            false => ExpertRows::Nobody,
        };
        let rows = input.positions.iter().map(|[t, ..]| *t);
        let positions = self.input_layer.stage(builder, rows, input.positions)?;
        let own = StagedGroups::stage(builder, input.self_kv, bounds.map(|bounds| bounds.own))?;
        let cross = match (bounds, input.cross_kv) {
            (Some(bounds), Some(kv)) => CrossRows::All(builder.bounded_paged(kv, bounds.cross)?),
            _ => CrossRows::stage(builder, input)?,
        };
        let starts = input.sequences().query_start_loc;
        let states = match (input.state_slots, bounds) {
            (None, _) => None,
            (Some(slots), None) => Some(builder.recurrent(starts, slots)?),
            (Some(slots), Some(bounds)) => {
                Some(builder.bounded_recurrent(starts, slots, bounds.own.max_seqlen_q)?)
            }
        };
        Ok(StepArrays { ids, embeds, ahead, experts, positions, own, cross, states })
    }

    /// An error for a step whose parts do not fit each other.
    pub(super) fn check(&self, step: &StepInput<'_>) -> Result<(), KernelError> {
        let n_tokens = step.token_ids.len();
        let shape = |what, expected: usize, actual: usize| match expected == actual {
            true => Ok(()),
            false => Err(KernelError::Shape {
                op: "forward",
                what,
                expected: vec![expected],
                actual: vec![actual],
            }),
        };
        shape("positions", n_tokens, step.positions.len())?;
        shape("groups of self_kv", self.kv.groups.n_groups(), step.self_kv.len())?;
        let n_seqs = step.sequences().seq_lens.len();
        for group in step.self_kv {
            shape("slot_mapping", n_tokens, group.slot_mapping.len())?;
            shape("sequences of a group", n_seqs, group.tables.seq_lens.len())?;
        }
        let width = self.spec.stack.hidden * (1 + self.n_levels());
        for embed in step.embeds {
            shape("width of embeds", width, embed.rows.hidden())?;
        }
        let has_states = self.spec.stack.recurrent().is_some();
        shape("state_slots", has_states.into(), step.state_slots.is_some().into())?;
        if let Some(slots) = step.state_slots {
            shape("state_slots of sequences", n_seqs, slots.len())?;
        }
        match (step.cross_kv, step.cross_rows) {
            (Some(cross), None) => shape("cross_kv sequences", n_seqs, cross.seq_lens.len())?,
            (Some(cross), Some(rows)) => {
                let n_queries = cross.query_start_loc.last().map_or(0, |n| *n as usize);
                shape("cross_rows", n_queries, rows.len())?;
                shape("cross_rows that a step may have", self.is_cross_optional().into(), 1)?;
            }
            (None, _) => {}
        }
        match &self.spec.items {
            ItemsSpec::CrossAttention(_) if self.is_cross_optional() => Ok(()),
            ItemsSpec::CrossAttention(_) => shape("cross_kv", 1, step.cross_kv.is_some().into()),
            ItemsSpec::Embedded { .. } => shape("cross_kv", 0, step.cross_kv.is_some().into()),
        }
    }

    /// True if encoder rows of a span attend to each other.
    pub(super) fn has_mutual_items(&self) -> bool {
        matches!(self.spec.items, ItemsSpec::Embedded { is_mutual: true, .. })
    }

    /// True if layers have second weights for rows of images.
    pub(super) fn has_visual_experts(&self) -> bool {
        self.spec.stack.layers.iter().any(|layer| layer.visual_expert.is_some())
    }

    /// True if a sequence may have no encoder rows.
    pub(super) fn is_cross_optional(&self) -> bool {
        matches!(&self.spec.items, ItemsSpec::CrossAttention(cross) if cross.instead().is_some())
    }
}

/// Rows after its own that each row of a step attends to: those of the same span of encoder rows.
fn rows_ahead(step: &StepInput<'_>) -> Vec<u32> {
    let mut ahead = vec![0; step.token_ids.len()];
    for embed in step.embeds {
        let n_rows = embed.rows.n_rows();
        let of_span = ahead.iter_mut().skip(embed.first_row).take(n_rows);
        for (ahead, later) in of_span.zip((0..n_rows as u32).rev()) {
            *ahead = later;
        }
    }
    ahead
}

/// Rows of the step that encoder rows replace.
fn embed_rows(embeds: &[EmbedRows<'_>]) -> Vec<u32> {
    let rows = |embed: &EmbedRows<'_>| embed.first_row..embed.first_row + embed.rows.n_rows();
    embeds.iter().flat_map(rows).map(|row| row as u32).collect()
}
