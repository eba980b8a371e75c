//! The decoder of every family: token table, positions, transformer layers over paged KV, head, all by its spec.

use super::cross_rows::{CacheLayers, CrossRows};
use super::head::load_ends;
use super::{AlignInput, Decoder, DecoderInfo, EmbedRows, StepInput};
use crate::error::ModelError;
use crate::layers::{
    CrossAttention, CrossSlots, FeedForward, InputLayer, Loader, Residual, RotaryTables, SelfAttention,
    StackAndNames,
};
use crate::spec::{DecoderSpec, ItemsSpec};
use crate::weights::Weights;
use triptych_kernels::ops::{Activation, KvLayer, KvLayout, Mask, PagedBatch, ScoreBias};
use triptych_kernels::{Backend, KernelError};

mod align;

/// A decoder of any family over any back end.
pub struct TransformerDecoder<B: Backend> {
    backend: B,
    spec: DecoderSpec,
    tokens: B::Table,
    input_layer: InputLayer<B>,
    layers: Vec<DecoderLayer<B>>,
    final_norm: Option<B::Norm>,
    head: B::Linear,
    self_kv: B::KvCache,
    cross_kv: B::KvCache,
    host_kv: B::HostKvCache,
}

struct DecoderLayer<B: Backend> {
    // Absent where cross-attention replaces it. The index is that in the self-attention cache.
    attention: Option<(Residual<B>, SelfAttention<B>, usize)>,
    // The index is that in the cross-attention cache.
    cross: Option<(Residual<B>, CrossAttention<B>, usize)>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
}

impl<B: Backend> TransformerDecoder<B> {
    /// Loads the decoder's tensors, and no others; caches have no blocks until they are allocated.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(spec: &DecoderSpec, weights: &Weights, backend: &B) -> Result<Self, ModelError> {
        let loader = Loader::new(backend, weights, spec.names.prefixes);
        let stack = &spec.stack;
        let names = spec.names;
        let input_layer = InputLayer::load(
            &loader,
            &spec.positions,
            names.positions,
            StackAndNames { spec: stack, names: &names.stack },
        )?;
        let (tokens, head) = load_ends(backend, spec, weights)?;
        let final_norm = match stack.final_norm {
            true => Some(loader.norm(names.stack.final_norm, stack.norm, stack.hidden)?),
            false => None,
        };
        Ok(Self {
            tokens,
            input_layer,
            layers: (0..stack.n_layers)
                .map(|i| DecoderLayer::load(&loader, spec, i))
                .collect::<Result<_, _>>()?,
            final_norm,
            head,
            self_kv: backend.kv_cache(self_layout(spec, 0))?,
            cross_kv: backend.kv_cache(cross_layout(spec, 0))?,
            host_kv: backend.host_kv_cache(self_layout(spec, 0))?,
            spec: spec.clone(),
            backend: backend.clone(),
        })
    }

    /// Token embeddings, encoder rows in the place of some: `[n_tokens, hidden]`.
    fn embed(&self, token_ids: &[u32], embeds: &[EmbedRows<'_>]) -> Result<B::Tensor, ModelError> {
        let hidden = self.spec.stack.hidden;
        let mut x = self.backend.embed(&self.tokens, token_ids)?;
        let n_rows: usize = embeds.iter().map(|e| e.values.len() / hidden).sum();
        if n_rows == 0 {
            return Ok(x);
        }
        let mut rows = Vec::with_capacity(n_rows);
        let mut values = Vec::with_capacity(n_rows * hidden);
        for embed in embeds {
            let n = embed.values.len() / hidden;
            rows.extend((embed.first_row..embed.first_row + n).map(|row| row as u32));
            values.extend_from_slice(&embed.values[..n * hidden]);
        }
        let values = self.backend.upload(values, n_rows, hidden)?;
        self.backend.scatter_rows(&mut x, &rows, &values)?;
        Ok(x)
    }

    /// Logits of `rows` of the last layer's output `x: [n_tokens, hidden]`: `[rows.len(), vocab]`.
    fn logits(&self, x: &B::Tensor, rows: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut x = self.backend.gather_rows(x, rows)?;
        if let Some(norm) = &self.final_norm {
            x = self.backend.norm(&x, norm)?;
        }
        let logits = self.backend.linear(&x, &self.head, Activation::None, None)?;
        Ok(self.backend.take_values(logits)?)
    }

    fn check(&self, step: &StepInput<'_>) -> Result<(), KernelError> {
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
        shape("slot_mapping", n_tokens, step.slot_mapping.len())?;
        for embed in step.embeds {
            shape("embeds", 0, embed.values.len() % self.spec.stack.hidden)?;
        }
        let n_seqs = step.self_kv.seq_lens.len();
        if let Some(from) = step.cross_from {
            shape("cross_from", n_seqs, from.len())?;
        }
        if let Some(cross) = step.cross_kv {
            shape("cross_kv sequences", n_seqs, cross.seq_lens.len())?;
        }
        match &self.spec.items {
            ItemsSpec::CrossAttention(cross) if cross.instead().is_some() => Ok(()),
            ItemsSpec::CrossAttention(_) => shape("cross_kv", 1, step.cross_kv.is_some().into()),
            ItemsSpec::Embedded => shape("cross_kv", 0, step.cross_kv.is_some().into()),
        }
    }
}

impl<B: Backend> Decoder for TransformerDecoder<B> {
    fn info(&self) -> DecoderInfo {
        let spec = &self.spec;
        let bytes = |layout| self.backend.kv_block_bytes(layout);
        let (encoder_hidden, cross_block_bytes) = match &spec.items {
            ItemsSpec::Embedded => (spec.stack.hidden, None),
            ItemsSpec::CrossAttention(cross) => (cross.encoder_hidden, Some(bytes(cross_layout(spec, 1)))),
        };
        DecoderInfo {
            vocab: spec.vocab,
            n_readable: spec.vocab + spec.head.input_only,
            encoder_hidden,
            max_context: spec.max_context,
            cross_attention: cross_block_bytes.is_some(),
            cross_optional: matches!(&spec.items, ItemsSpec::CrossAttention(c) if c.instead().is_some()),
            self_block_bytes: bytes(self_layout(spec, 1)),
            cross_block_bytes: cross_block_bytes.unwrap_or_default(),
        }
    }

    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        // Old caches go first, so that memory need not hold both generations at once.
        self.self_kv = self.backend.kv_cache(self_layout(&self.spec, 0))?;
        self.cross_kv = self.backend.kv_cache(cross_layout(&self.spec, 0))?;
        self.self_kv = self.backend.kv_cache(self_layout(&self.spec, self_blocks))?;
        self.cross_kv = self.backend.kv_cache(cross_layout(&self.spec, cross_blocks))?;
        Ok(())
    }

    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.host_kv = self.backend.host_kv_cache(self_layout(&self.spec, 0))?;
        self.host_kv = self.backend.host_kv_cache(self_layout(&self.spec, n_blocks))?;
        Ok(())
    }

    fn project_cross(&mut self, rows: Vec<f32>, slots: &[u32]) -> Result<(), ModelError> {
        let ItemsSpec::CrossAttention(cross) = &self.spec.items else {
            let expected = vec![0];
            let actual = vec![slots.len()];
            return Err(KernelError::Shape { op: "project_cross", what: "slots", expected, actual }.into());
        };
        let rows = self.backend.upload(rows, slots.len(), cross.encoder_hidden)?;
        for (_, cross, cache_layer) in self.layers.iter().filter_map(|layer| layer.cross.as_ref()) {
            let to = CrossSlots { cache: &mut self.cross_kv, layer: *cache_layer, slots };
            cross.write_keys_values(&self.backend, &rows, to)?;
        }
        Ok(())
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Vec<f32>, ModelError> {
        self.check(step)?;
        let mut x = self.embed(step.token_ids, step.embeds)?;
        x = self.input_layer.forward(&self.backend, x, step.positions.iter().map(|[t, ..]| *t))?;
        let rotary = self.input_layer.rotary(step.positions);
        let cross_rows = self.info().cross_optional.then(|| CrossRows::of(step));
        for (i, layer) in self.layers.iter().enumerate() {
            let caches = LayerCaches { own: &mut self.self_kv, cross: &self.cross_kv };
            let bias = self.input_layer.score_bias(i);
            let rows = StepContext { step, cross: step.cross_kv, rotary: rotary.as_ref(), bias };
            x = match (&layer.attention, &cross_rows) {
                (None, Some(cross_rows)) => cross_rows.run(&self.backend, x, |x, batch| {
                    layer.forward(&self.backend, x, caches, StepContext { cross: batch, ..rows })
                })?,
                _ => layer.forward(&self.backend, &x, caches, rows)?,
            };
        }
        if step.logit_rows.is_empty() {
            return Ok(Vec::new());
        }
        self.logits(&x, step.logit_rows)
    }

    fn align(&mut self, input: &AlignInput<'_>) -> Result<Vec<f32>, ModelError> {
        self.attention_of_heads(input)
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
struct LayerCaches<'a, C> {
    own: &'a mut C,
    cross: &'a C,
}

/// Inputs of a layer beside its rows.
#[derive(Clone, Copy)]
struct StepContext<'a> {
    step: &'a StepInput<'a>,
    cross: Option<PagedBatch<'a>>,
    rotary: Option<&'a RotaryTables>,
    bias: ScoreBias<'a>,
}

impl<B: Backend> DecoderLayer<B> {
    fn load(loader: &Loader<'_, B>, spec: &DecoderSpec, idx: usize) -> Result<Self, ModelError> {
        let stack = &spec.stack;
        let names = &spec.names.stack;
        let loader = loader.layer(names.layers, idx);
        let (instead, place) = match &spec.items {
            ItemsSpec::CrossAttention(cross) => (cross.instead(), CacheLayers::of(cross, idx)),
            ItemsSpec::Embedded => (None, CacheLayers { own: Some(idx), cross: None }),
        };
        let cross = match (&spec.items, &names.cross, place.cross) {
            (ItemsSpec::CrossAttention(cross), Some(names), Some(cache_layer)) => Some((
                Residual::load(&loader, names.norm, stack)?,
                CrossAttention::load(&loader, names, stack, cross)?,
                cache_layer,
            )),
            _ => None,
        };
        let attention = match place.own {
            Some(cache_layer) => Some((
                Residual::load(&loader, names.attention.norm, stack)?,
                SelfAttention::load(&loader, &names.attention, stack)?,
                cache_layer,
            )),
            None => None,
        };
        let gate = match instead.filter(|_| attention.is_none()) {
            Some(instead) => loader.gate(instead.names.gates[1])?,
            None => 1.0,
        };
        Ok(Self {
            attention,
            cross,
            feed_forward_norm: Residual::load(&loader, names.feed_forward_norm, stack)?,
            feed_forward: FeedForward::load_gated(&loader, names, stack, gate)?,
        })
    }

    fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        caches: LayerCaches<'_, B::KvCache>,
        StepContext { step, cross, rotary, bias }: StepContext<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let LayerCaches { own, cross: cross_cache } = caches;
        let mut x = x.clone();
        if let Some((norm, attention, layer)) = &self.attention {
            x = norm.around(backend, &x, |input, residual| {
                let [q, k, v] = attention.project(backend, input, rotary)?;
                backend.write_kv(own, *layer, [&k, &v], step.slot_mapping)?;
                let kv = KvLayer { cache: &*own, layer: *layer, mask: Mask::Causal, bias };
                let context = backend.paged_attention(&q, kv, attention.shape(), step.self_kv)?;
                attention.output(backend, &context, residual)
            })?;
        }
        if let (Some((norm, cross, layer)), Some(batch)) = (&self.cross, cross) {
            x = norm.around(backend, &x, |input, residual| {
                let q = cross.query(backend, input)?;
                let kv =
                    KvLayer { cache: cross_cache, layer: *layer, mask: Mask::Full, bias: ScoreBias::None };
                let context = backend.paged_attention(&q, kv, cross.shape(), batch)?;
                cross.output(backend, &context, residual)
            })?;
        }
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))
    }
}

/// Layout of the self-attention cache.
fn self_layout(spec: &DecoderSpec, n_blocks: usize) -> KvLayout {
    let shape = spec.stack.attention.shape;
    let n_cross = match &spec.items {
        ItemsSpec::CrossAttention(cross) => cross.instead().map_or(0, |i| i.layers.len()),
        ItemsSpec::Embedded => 0,
    };
    KvLayout {
        n_layers: spec.stack.n_layers - n_cross,
        n_blocks,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    }
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
        ItemsSpec::Embedded => KvLayout { n_layers: 0, ..self_layout(spec, n_blocks) },
    }
}
