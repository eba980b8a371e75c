//! Steps of decoding through their graphs: capture at the first use, padding, replay.

use super::adapters::StagedAdapters;
use super::graphs::{DecodeGraph, StepShape};
use super::padded::PaddedStep;
use super::staged_step::StepArrays;
use super::{StepInput, TransformerDecoder};
use crate::decoder::DecodeGraphConfig;
use crate::error::ModelError;
use triptych_kernels::ops::{CarriedToken, ForwardInputs, RecurrentSequences, StageBuilder};
use triptych_kernels::{Backend, KernelError};

impl<B: Backend> TransformerDecoder<B> {
    /// Output of the last layer for a checked step of decoding, `[n_tokens, hidden]`, by a graph. `None` if the step runs
    /// without one.
    pub(super) fn replay(
        &mut self,
        step: &StepInput<'_>,
        carried: &[CarriedToken],
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Some(config) = self.graphs.config else { return Ok(None) };
        let Some(shape) = StepShape::of(step) else { return Ok(None) };
        let padded = PaddedStep::new(step, shape.n_seqs, self.graphs.spare_block);
        let graph = match self.graphs.graphs.remove(&shape) {
            Some(graph) => graph,
            None if shape.n_seqs > config.max_sequences => None,
            // A capture runs its forward, and states would be advanced before the replay.
            None => {
                let stateless = PaddedStep::new(step, shape.n_seqs, self.graphs.spare_block).without_states();
                self.capture(shape, &stateless.input(step, &stateless.groups(step)), config)
            }
        };
        let Some(mut graph) = graph else {
            self.graphs.counts.eager += 1;
            self.graphs.graphs.insert(shape, None);
            return Ok(None);
        };
        let (inputs, _) = self.graph_inputs(shape, &padded.input(step, &padded.groups(step)))?;
        let n_rows = step.token_ids.len();
        let ids = graph.arrays.ids;
        let x =
            graph.forward.replay_on_device(inputs, n_rows, &mut |staged| self.carry(staged, ids, carried));
        match x {
            Ok(x) => {
                self.graphs.graphs.insert(shape, Some(graph));
                let counts = &mut self.graphs.counts;
                counts.replays += 1;
                counts.tokens += shape.n_seqs as u64;
                counts.padding_tokens += (shape.n_seqs - n_rows) as u64;
                Ok(Some(x))
            }
            Err(error @ KernelError::DeviceLost { .. }) => Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, sequences = shape.n_seqs, "steps of this size run without a graph");
                self.graphs.graphs.insert(shape, None);
                self.graphs.counts.eager += 1;
                Ok(None)
            }
        }
    }

    /// Captures a step of a shape; `None` if that fails, or there is no memory left for it.
    fn capture(
        &mut self,
        shape: StepShape,
        step: &StepInput<'_>,
        config: DecodeGraphConfig,
    ) -> Option<DecodeGraph<B>> {
        let n_bytes = self.graphs.stats().n_bytes;
        if n_bytes >= config.max_bytes {
            tracing::info!(n_bytes, sequences = shape.n_seqs, "no memory is left for another decode graph");
            return None;
        }
        let captured = self.graph_inputs(shape, step).and_then(|(inputs, arrays)| {
            let backend = self.backend.clone();
            let mut forward = |backend: &B, staged: &B::Step, _: &B::Tensor| {
                self.layers(backend, staged, (arrays, &StagedAdapters::default()), &[])
            };
            Ok(DecodeGraph { forward: backend.capture(inputs, &mut forward)?, arrays })
        });
        match captured {
            Ok(graph) => {
                let bytes = graph.forward.n_bytes();
                tracing::debug!(sequences = shape.n_seqs, keys = shape.max_keys, bytes, "step captured");
                Some(graph)
            }
            Err(ModelError::Kernel(error @ KernelError::NotCapturable { .. })) => {
                tracing::info!(%error, "this decoder runs without graphs");
                self.graphs.config = None;
                None
            }
            Err(error) => {
                tracing::warn!(%error, sequences = shape.n_seqs, "steps of this size run without a graph");
                None
            }
        }
    }

    /// Inputs of a captured step of a shape, and the handles of their arrays.
    fn graph_inputs(
        &self,
        shape: StepShape,
        step: &StepInput<'_>,
    ) -> Result<(ForwardInputs, StepArrays), ModelError> {
        let n = shape.n_seqs;
        let bounds = shape.bounds();
        let mut rooms = vec![n];
        rooms.extend(self.input_layer.rooms(n));
        for _ in step.self_kv {
            rooms.push(n);
            rooms.extend(bounds.own.rooms(n));
        }
        if shape.max_cross_keys.is_some() {
            rooms.extend(bounds.cross.rooms(n));
        }
        if step.state_slots.is_some() {
            rooms.extend(RecurrentSequences::rooms(n));
        }
        let mut builder = StageBuilder::with_rooms(rooms);
        let arrays = self.add(&mut builder, step, Some(bounds))?;
        let features =
            ForwardInputs { arrays: builder, features: Vec::new(), dims: (0, self.spec.stack.hidden) };
        Ok((features, arrays))
    }
}
