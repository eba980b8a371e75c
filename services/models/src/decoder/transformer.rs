//! The decoder of every family: token table, positions, transformer layers over paged KV, head, all by its spec.
//!
//! One file over 600 lines: loading, the step and its back half are one trait's methods over the same fields.

use super::cross_rows::{CacheLayers, CrossRows};
use super::head::{HeadTransform, load_ends};
use super::{
    AlignInput, DecodeGraphConfig, Decoder, DecoderInfo, EmbedRows, Pending, StepInput, no_align, no_states,
    no_step,
};
use crate::error::ModelError;
use crate::layers::{
    Adapted, CachedRows, CrossAttention, FeedForward, FeedForwardLayer, GatedDelta, InputLayer, LayerStates,
    Loader, Residual, SelfAttention, StackAndNames,
};
use crate::lora::{Adapters, LoraAdapter};
use crate::spec::{DecoderSpec, ItemsSpec, KvGroupLayers, KvPlace};
use crate::weights::Weights;
use std::collections::VecDeque;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use triptych_core::graph_stats::GraphStats;
use triptych_core::{AdapterId, EncodedRows};
use triptych_kernels::ops::{
    Activation, CarriedToken, Choices, ChooseBatch, Indices, KvLayer, KvLayout, KvSlots, Mask, MaskBounds,
    PendingChoices, Rotation, ScoreBias, StageBuilder, StateLayout, Submitted,
};
use triptych_kernels::{Backend, KernelError};

mod adapters;
mod align_pass;
mod expert_rows;
mod graphs;
mod item_rows;
mod padded;
mod staged_step;

mod align;
mod replay;
mod staged;

use adapters::StagedAdapters;
use align_pass::AlignPass;
use expert_rows::SubLayerRows;
use graphs::DecodeGraphs;
use item_rows::ItemRows;
use staged_step::{StagedKv, StagedStep, StepArrays};

/// A decoder of any family over any back end.
pub struct TransformerDecoder<B: Backend> {
    backend: B,
    spec: DecoderSpec,
    kv: KvGroupLayers,
    tokens: B::Table,
    input_layer: InputLayer<B>,
    layers: Vec<DecoderLayer<B>>,
    adapters: Adapters<B>,
    final_norm: Option<B::Norm>,
    head_transform: Option<HeadTransform<B>>,
    head: B::Linear,
    self_kv: B::KvCache,
    cross_kv: B::KvCache,
    /// Recurrent states; `None`: no layer has one.
    states: Option<B::StateCache>,
    host_kv: B::HostKvCache,
    align_pass: Option<AlignPass<B>>,
    graphs: DecodeGraphs<B>,
    /// Steps under way by their numbers, in order.
    pending: VecDeque<(u64, B::Pending)>,
    n_submitted: u64,
}

struct DecoderLayer<B: Backend> {
    // Absent where cross-attention or linear attention replaces it. The place is that in the self-attention cache.
    attention: Option<(Residual<B>, SelfAttention<B>, KvPlace)>,
    // The index is that in the cache of states.
    recurrent: Option<(Residual<B>, GatedDelta<B>, usize)>,
    // The index is that in the cross-attention cache.
    cross: Option<(Residual<B>, CrossAttention<B>, usize)>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForwardLayer<B>,
    visual: Option<VisualExpert<B>>,
    // Keys that a query of self-attention attends to at most.
    window: Option<NonZeroU32>,
}

/// Second weights of a layer, for rows of images.
struct VisualExpert<B: Backend> {
    attention: SelfAttention<B>,
    feed_forward: FeedForward<B>,
}

impl<B: Backend> TransformerDecoder<B> {
    /// Loads the decoder's tensors, and no others; caches have no blocks until they are allocated.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(spec: &DecoderSpec, weights: &Weights, backend: &B) -> Result<Self, ModelError> {
        let stack = &spec.stack;
        let names = spec.names;
        let is_inputs_first = names.stack.attention.qkv.is_inputs_first();
        let loader = Loader::new(backend, weights, names.prefixes).inputs_first(is_inputs_first);
        let input_layer = InputLayer::load(
            &loader,
            &spec.positions,
            names.positions,
            StackAndNames { spec: stack, names: &names.stack },
        )?;
        let (tokens, head) = load_ends(backend, spec, weights)?;
        let transform = |spec| HeadTransform::load(backend, weights, spec, stack.hidden);
        let head_transform = spec.head.transform.as_ref().map(transform).transpose()?;
        let final_norm = match stack.final_norm {
            true => Some(loader.norm(names.stack.final_norm, stack.norm, stack.hidden)?),
            false => None,
        };
        let kv = spec.kv_groups();
        let layer = |(i, own): (usize, &Option<KvPlace>)| DecoderLayer::load(&loader, spec, i, *own);
        let layers = kv.places.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
        Ok(Self {
            tokens,
            input_layer,
            layers,
            adapters: Adapters::new(loader.sites()),
            final_norm,
            head_transform,
            head,
            self_kv: backend.kv_cache(self_layout(spec, &kv, 0))?,
            cross_kv: backend.kv_cache(cross_layout(spec, 0))?,
            states: None,
            host_kv: backend.host_kv_cache(self_layout(spec, &kv, 0))?,
            kv,
            align_pass: None,
            graphs: DecodeGraphs::default(),
            pending: VecDeque::new(),
            n_submitted: 0,
            spec: spec.clone(),
            backend: backend.clone(),
        })
    }

    /// Levels of encoder rows that are among the tokens, beyond the first.
    fn n_levels(&self) -> usize {
        match self.spec.items {
            ItemsSpec::Embedded { levels, .. } => levels,
            ItemsSpec::CrossAttention(_) => 0,
        }
    }

    /// Output of the last layer, `[n_tokens, hidden]`.
    fn layers(
        &mut self,
        backend: &B,
        step: &B::Step,
        (arrays, adapters): (StepArrays, &StagedAdapters),
        embeds: &[EmbedRows<'_>],
    ) -> Result<B::Tensor, ModelError> {
        let groups = adapters.groups(&self.adapters)?;
        let on = Adapted::new(backend, step, &groups);
        let mut x = backend.embed(step, &self.tokens, arrays.ids)?;
        let mut items = None;
        if let Some(rows) = arrays.embeds {
            let stored: Vec<EncodedRows<'_>> = embeds.iter().map(|embed| embed.rows).collect();
            let values = ItemRows::new(backend.upload_rows(&stored)?, rows, self.spec.stack.hidden);
            values.replace(backend, step, &mut x)?;
            items = Some(values);
        }
        let n_levels = self.n_levels();
        x = self.input_layer.forward(backend, step, x, arrays.positions)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let states = self.states.as_mut();
            let caches = LayerCaches { own: &mut self.self_kv, cross: &self.cross_kv, states };
            let bias = self.input_layer.score_bias(i);
            let rotation = self.input_layer.rotation(i, arrays.positions);
            let rows = StepContext { step, arrays, cross: arrays.cross, bias, rotation };
            let is_cross_only = layer.attention.is_none() && layer.recurrent.is_none();
            x = match is_cross_only {
                // The rows of such a layer are others, and no decoder that has one takes adapters.
                true => arrays.cross.run(backend, step, x, |x, cross| {
                    layer.forward(backend.into(), x, caches, StepContext { cross, ..rows })
                })?,
                false => layer.forward(on, &x, caches, rows)?,
            };
            if let (Some(items), true) = (&items, i < n_levels) {
                items.add_level(backend, step, &mut x, i + 1)?;
            }
        }
        Ok(x)
    }

    /// Logits of rows of the last layer's output `x: [n_tokens, hidden]`: `[rows, vocab]`.
    fn logits(&self, step: &B::Step, rows: Indices, x: &B::Tensor) -> Result<B::Tensor, ModelError> {
        let mut x = self.backend.gather_rows(step, x, rows)?;
        if let Some(norm) = &self.final_norm {
            x = self.backend.norm(&x, norm)?;
        }
        if let Some(transform) = &self.head_transform {
            x = transform.forward(&self.backend, &x)?;
        }
        let mut logits = self.backend.linear(&x, &self.head, Activation::None, None)?;
        if let Some(c) = self.spec.head.softcap {
            self.backend.softcap(&mut logits, c)?;
        }
        Ok(logits)
    }

    /// The layers of a step, and its logits `[logit_rows, vocab]`; `None` if nobody asks for them.
    fn run(
        &mut self,
        step: &StepInput<'_>,
        carried: &[CarriedToken],
    ) -> Result<Option<B::Tensor>, ModelError> {
        self.check(step)?;
        let asks = !step.logit_rows.is_empty() || *step.choose != ChooseBatch::default();
        if let Some(x) = self.replay(step, carried)? {
            let mut builder = StageBuilder::new();
            let rows = builder.indices(step.logit_rows)?;
            let staged = self.backend.stage(builder)?;
            return asks.then(|| self.logits(&staged, rows, &x)).transpose();
        }
        let StagedStep { step: staged, arrays, adapters, logit_rows } = self.stage(step)?;
        self.carry(&staged, arrays.ids, carried)?;
        let backend = self.backend.clone();
        let x = match self.layers(&backend, &staged, (arrays, &adapters), step.embeds) {
            // States that were advanced cannot be advanced again.
            Err(ModelError::Kernel(error @ KernelError::OutOfMemory { .. }))
                if self.graphs.make_room() && self.states.is_none() =>
            {
                tracing::warn!(%error, "decode graphs are dropped to make room; this decoder runs without");
                // What was written to the caches is written again.
                self.layers(&backend, &staged, (arrays, &adapters), step.embeds)?
            }
            other => other?,
        };
        asks.then(|| self.logits(&staged, logit_rows, &x)).transpose()
    }

    /// Projects encoder rows for sequences with an adapter, or without one.
    fn project(
        &mut self,
        adapter: Option<AdapterId>,
        rows: &[EncodedRows<'_>],
        slots: &[u32],
    ) -> Result<(), ModelError> {
        let ItemsSpec::CrossAttention(cross) = &self.spec.items else {
            let expected = vec![0];
            let actual = vec![slots.len()];
            return Err(KernelError::Shape { op: "project_cross", what: "slots", expected, actual }.into());
        };
        let rows = self.backend.upload_rows(rows)?;
        let actual = self.backend.dims(&rows);
        if actual != (slots.len(), cross.encoder_hidden) {
            let expected = vec![slots.len(), cross.encoder_hidden];
            let actual = vec![actual.0, actual.1];
            return Err(KernelError::Shape { op: "project_cross", what: "rows", expected, actual }.into());
        }
        let mut builder = StageBuilder::new();
        let slots = builder.indices(slots)?;
        let step = self.backend.stage(builder)?;
        let groups = self.adapters.of_all(adapter)?;
        let on = Adapted::new(&self.backend, &step, &groups);
        for (_, cross, cache_layer) in self.layers.iter().filter_map(|layer| layer.cross.as_ref()) {
            let to = KvSlots { cache: &mut self.cross_kv, layer: *cache_layer, slots };
            cross.write_keys_values(on, &step, &rows, to)?;
        }
        Ok(())
    }

    /// Replaces ids of a staged step by tokens that the step before chooses.
    fn carry(&self, step: &B::Step, ids: Indices, carried: &[CarriedToken]) -> Result<(), KernelError> {
        match (carried, self.pending.back()) {
            ([], _) => Ok(()),
            (_, Some((_, before))) => before.carry_tokens(step, ids, carried),
            (_, None) => Err(no_step("submit")),
        }
    }
}

impl<B: Backend> Decoder for TransformerDecoder<B> {
    fn info(&self) -> DecoderInfo {
        let spec = &self.spec;
        let bytes = |layout| self.backend.kv_block_bytes(layout);
        let (encoder_hidden, cross_block_bytes) = match &spec.items {
            ItemsSpec::Embedded { levels, .. } => (spec.stack.hidden * (1 + levels), None),
            ItemsSpec::CrossAttention(cross) => (cross.encoder_hidden, Some(bytes(cross_layout(spec, 1)))),
        };
        DecoderInfo {
            vocab: spec.vocab,
            n_readable: spec.vocab + spec.head.input_only,
            encoder_hidden,
            embedded_hidden: spec.embedded_hidden(),
            max_context: spec.max_context,
            cross_attention: cross_block_bytes.is_some(),
            cross_optional: self.is_cross_optional(),
            mutual_items: self.has_mutual_items(),
            kv_groups: self.kv.groups,
            self_block_bytes: bytes(self_layout(spec, &self.kv, 1)),
            cross_block_bytes: cross_block_bytes.unwrap_or_default(),
            state_slot_bytes: state_layout(spec, 1)
                .and_then(|layout| NonZeroUsize::new(self.backend.state_slot_bytes(layout))),
            cross_rows_per_token: spec.cross_rows_per_token(),
        }
    }

    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        // Old caches go first, so that memory need not hold both generations at once, and with them what addresses them.
        self.graphs.start(self_blocks);
        self.self_kv = self.backend.kv_cache(self_layout(&self.spec, &self.kv, 0))?;
        self.cross_kv = self.backend.kv_cache(cross_layout(&self.spec, 0))?;
        let n_blocks = self_blocks + self.graphs.n_spare_blocks();
        self.self_kv = self.backend.kv_cache(self_layout(&self.spec, &self.kv, n_blocks))?;
        self.cross_kv = self.backend.kv_cache(cross_layout(&self.spec, cross_blocks))?;
        Ok(())
    }

    fn allocate_states(&mut self, n_slots: usize) -> Result<(), ModelError> {
        self.graphs.graphs.clear();
        self.states = None;
        self.states =
            state_layout(&self.spec, n_slots).map(|layout| self.backend.state_cache(layout)).transpose()?;
        Ok(())
    }

    fn copy_states(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        let states = self.states.as_mut().ok_or_else(|| no_states("copy_states"))?;
        Ok(self.backend.copy_states(states, pairs)?)
    }

    fn reset_states(&mut self, slots: &[u32]) -> Result<(), ModelError> {
        let states = self.states.as_mut().ok_or_else(|| no_states("reset_states"))?;
        Ok(self.backend.reset_states(states, slots)?)
    }

    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.host_kv = self.backend.host_kv_cache(self_layout(&self.spec, &self.kv, 0))?;
        self.host_kv = self.backend.host_kv_cache(self_layout(&self.spec, &self.kv, n_blocks))?;
        Ok(())
    }

    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        self.project(None, rows, slots)
    }

    fn project_cross_adapted(
        &mut self,
        adapter: AdapterId,
        rows: &[EncodedRows<'_>],
        slots: &[u32],
    ) -> Result<(), ModelError> {
        self.project(Some(adapter), rows, slots)
    }

    fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        match self.is_cross_optional() || self.has_visual_experts() {
            true => Err(adapters::refused()),
            false => self.adapters.load(&self.backend, adapter),
        }
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.unload(id);
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        match self.run(step, &[])? {
            Some(logits) => Ok(self.backend.choose(logits, step.choose)?),
            None => Ok(Choices::default()),
        }
    }

    fn submit(&mut self, step: &StepInput<'_>, carried: &[CarriedToken]) -> Result<Pending, ModelError> {
        let logits = match self.run(step, carried)? {
            Some(logits) => logits,
            None => self.backend.zeros(0, self.spec.vocab)?,
        };
        Ok(match self.backend.submit_choices(logits, step.choose)? {
            Submitted::Done(choices) => Pending::Done(choices),
            Submitted::UnderWay(pending) => {
                self.n_submitted += 1;
                self.pending.push_back((self.n_submitted, pending));
                Pending::UnderWay(self.n_submitted)
            }
        })
    }

    fn wait(&mut self, pending: Pending) -> Result<Choices, ModelError> {
        let number = match pending {
            Pending::Done(choices) => return Ok(choices),
            Pending::UnderWay(number) => number,
        };
        while let Some((found, pending)) = self.pending.pop_front() {
            if found == number {
                return Ok(pending.wait()?);
            }
        }
        Err(no_step("wait").into())
    }

    fn use_graphs(&mut self, config: Option<DecodeGraphConfig>) {
        // Rows that skip layers are others in each step.
        if self.backend.captures() && !self.is_cross_optional() {
            self.graphs.set(config);
        }
    }

    fn graph_stats(&self) -> GraphStats {
        self.graphs.stats()
    }

    fn begin_align(&mut self, input: &AlignInput<'_>) -> Result<(), ModelError> {
        // An earlier pass goes first, also if this one is refused.
        self.align_pass = None;
        self.align_pass = Some(self.begin_pass(input)?);
        Ok(())
    }

    fn align_layer(&mut self) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(pass) = self.align_pass.take() else { return Err(no_align("no pass has begun")) };
        Ok(match self.run_layer(pass)? {
            ControlFlow::Continue(pass) => {
                self.align_pass = Some(pass);
                None
            }
            ControlFlow::Break(weights) => Some(weights),
        })
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(self.backend.copy_blocks(&mut self.self_kv, pairs)?)
    }

    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(self.backend.swap_out(&self.self_kv, &mut self.host_kv, pairs)?)
    }

    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(self.backend.swap_in(&self.host_kv, &mut self.self_kv, pairs)?)
    }
}

/// The caches as one layer uses them.
struct LayerCaches<'a, C, S> {
    own: &'a mut C,
    cross: &'a C,
    states: Option<&'a mut S>,
}

/// Inputs of a layer beside its rows.
struct StepContext<'a, B: Backend> {
    step: &'a B::Step,
    arrays: StepArrays,
    // Of the rows that the layer is given.
    cross: CrossRows,
    bias: ScoreBias<'a, B::Bias, B::Tensor>,
    rotation: Option<Rotation>,
}

impl<B: Backend> DecoderLayer<B> {
    fn load(
        loader: &Loader<'_, B>,
        spec: &DecoderSpec,
        idx: usize,
        own: Option<KvPlace>,
    ) -> Result<Self, ModelError> {
        let stack = &spec.stack;
        let names = &spec.names.stack;
        let loader = loader.layer(names.layers, idx);
        let place = CacheLayers::of(spec, idx, own);
        let instead = match &spec.items {
            ItemsSpec::CrossAttention(cross) => cross.instead(),
            ItemsSpec::Embedded { .. } => None,
        };
        let cross = match (&spec.items, &names.cross, place.cross) {
            (ItemsSpec::CrossAttention(cross), Some(names), Some(cache_layer)) => Some((
                Residual::of_attention(&loader, names.norm, stack)?,
                CrossAttention::load(&loader, names, stack, cross)?,
                cache_layer,
            )),
            _ => None,
        };
        let attention = match place.own {
            Some(place) => Some((
                Residual::of_attention(&loader, names.attention.norm, stack)?,
                SelfAttention::load_low_rank(
                    &loader,
                    &names.attention,
                    stack,
                    stack.layer(idx).low_rank_query,
                )?,
                place,
            )),
            None => None,
        };
        let recurrent = match (stack.layer(idx).recurrent, place.recurrent) {
            (Some(recurrent), Some(cache_layer)) => Some((
                Residual::of_attention(&loader, names.attention.norm, stack)?,
                GatedDelta::load(&loader, &recurrent, stack.hidden)?,
                cache_layer,
            )),
            _ => None,
        };
        let visual = match stack.layer(idx).visual_expert {
            Some(names) => Some(VisualExpert {
                attention: SelfAttention::load(&loader, &names.attention, stack)?,
                feed_forward: FeedForward::load(&loader, names, stack)?,
            }),
            None => None,
        };
        let gate = match instead.filter(|_| attention.is_none()) {
            Some(instead) => loader.gate(instead.names.gates[1])?,
            None => 1.0,
        };
        Ok(Self {
            attention,
            recurrent,
            cross,
            feed_forward_norm: Residual::of_feed_forward(&loader, names.feed_forward_norm, stack)?,
            feed_forward: FeedForwardLayer::load(&loader, names, stack, (idx, gate))?,
            visual,
            window: stack.layer(idx).window,
        })
    }

    /// The mask of self-attention; `ahead`: keys after its own that each query attends to as well.
    fn mask(&self, ahead: Option<Indices>) -> Mask {
        Mask::causal(MaskBounds { window: self.window, ahead })
    }

    fn forward(
        &self,
        on: Adapted<'_, B>,
        x: &B::Tensor,
        caches: LayerCaches<'_, B::KvCache, B::StateCache>,
        StepContext { step, arrays, cross, bias, rotation }: StepContext<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        let backend = on.backend;
        let LayerCaches { own, cross: cross_cache, states } = caches;
        let mut x = x.clone();
        if let Some((norm, attention, place)) = &self.attention {
            let (layer, StagedKv { slots, seqs }) = (place.layer, arrays.own.group(place.group)?);
            x = norm.around(backend, &x, |input, residual| {
                let to = KvSlots { cache: &mut *own, layer, slots };
                let rows = CachedRows { to, rotation };
                let q = match &self.visual {
                    None => attention.write_keys_values(on, step, input, rows)?,
                    Some(visual) => {
                        let parts = SubLayerRows { x: input, residual: None };
                        let fused = arrays.experts.run(
                            (backend, step),
                            parts,
                            |x, _| attention.fused(on, x),
                            |x, _| visual.attention.fused(backend, x),
                        )?;
                        attention.write_fused(backend, step, &fused, rows)?
                    }
                };
                let kv = KvLayer { cache: &*own, layer, seqs, mask: self.mask(arrays.ahead), bias };
                let mut context = backend.paged_attention(step, &q, kv, attention.shape())?;
                attention.apply_gate(on, input, &mut context)?;
                match &self.visual {
                    None => attention.output(on, &context, residual),
                    Some(visual) => arrays.experts.run(
                        (backend, step),
                        SubLayerRows { x: &context, residual },
                        |x, residual| attention.output(on, x, residual),
                        |x, residual| visual.attention.output(backend, x, residual),
                    ),
                }
            })?;
        }
        if let Some((norm, recurrent, layer)) = &self.recurrent {
            let (Some(cache), Some(seqs)) = (states, arrays.states) else { return Err(no_states("forward")) };
            let states = LayerStates { cache, layer: *layer, seqs };
            x = norm.around(backend, &x, |input, residual| {
                recurrent.forward(backend, step, (input, residual), states)
            })?;
        }
        if let (Some((norm, cross, layer)), Some(seqs)) = (&self.cross, cross.of_all()) {
            x = norm.around(backend, &x, |input, residual| {
                let q = cross.query(on, input)?;
                let (layer, bias) = (*layer, ScoreBias::None);
                let kv = KvLayer { cache: cross_cache, layer, seqs, mask: Mask::Full, bias };
                let context = backend.paged_attention(step, &q, kv, cross.shape())?;
                cross.output(on, &context, residual)
            })?;
        }
        self.feed_forward_norm.around(backend, &x, |input, residual| match &self.visual {
            None => self.feed_forward.forward(on, input, residual),
            Some(visual) => arrays.experts.run(
                (backend, step),
                SubLayerRows { x: input, residual },
                |x, residual| self.feed_forward.forward(on, x, residual),
                |x, residual| visual.feed_forward.forward(backend, x, residual),
            ),
        })
    }
}

/// Layout of the self-attention cache.
fn self_layout(spec: &DecoderSpec, kv: &KvGroupLayers, n_blocks: usize) -> KvLayout {
    let shape = spec.stack.attention.shape;
    KvLayout { n_layers: kv.n_layers, n_blocks, n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim }
}

/// Layout of the cache of recurrent states; `None`: no layer has one.
fn state_layout(spec: &DecoderSpec, n_slots: usize) -> Option<StateLayout> {
    spec.stack.recurrent().map(|(recurrent, n_layers)| recurrent.layout(n_layers, n_slots))
}

/// Layout of the cross-attention cache; no layers without cross-attention.
fn cross_layout(spec: &DecoderSpec, n_blocks: usize) -> KvLayout {
    match &spec.items {
        ItemsSpec::CrossAttention(cross) => KvLayout {
            n_layers: cross.instead().map_or(spec.stack.n_layers, |i| i.layers.len()),
            n_blocks,
            n_kv_heads: cross.attention.shape.n_kv_heads,
            head_dim: cross.attention.shape.head_dim,
        },
        ItemsSpec::Embedded { .. } => {
            let shape = spec.stack.attention.shape;
            KvLayout { n_layers: 0, n_blocks, n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim }
        }
    }
}
