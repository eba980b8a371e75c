//! Cross-attention weights of chosen heads: one pass over known tokens, beside the caches.
//!
//! It is run layer by layer, so that steps can run between. The layers run over keys and values of this pass alone. The
//! back end returns the weights of the chosen heads beside their attention.

use super::align_pass::{AlignPass, StagedAlign};
use super::{AlignInput, DecoderLayer, TransformerDecoder};
use crate::error::ModelError;
use crate::layers::Adapted;
use crate::spec::ItemsSpec;
use std::ops::ControlFlow;
use triptych_kernels::ops::{ChosenHeads, Indices, Mask, Qkv, Rotation, ScoreBias, StageBuilder, Varlen};
use triptych_kernels::{Backend, KernelError};

/// Inputs of a layer in an alignment pass, beside its rows.
struct AlignContext<'a, B: Backend> {
    /// Encoder rows, `[n_rows, encoder_hidden]`.
    rows: &'a B::Tensor,
    staged: &'a StagedAlign<B::Step>,
    bias: ScoreBias<'a, B::Bias, B::Tensor>,
    rotation: Option<Rotation>,
    /// Cross-attention heads to report.
    heads: Indices,
}

impl<B: Backend> TransformerDecoder<B> {
    /// See [`Decoder::begin_align`](super::Decoder::begin_align).
    pub(super) fn begin_pass(&self, input: &AlignInput<'_>) -> Result<AlignPass<B>, ModelError> {
        self.check_align(input)?;
        let n_rows = input.rows.n_rows();
        let rows = self.backend.upload_rows(&[input.rows])?;
        let staged = self.stage_align(input, n_rows)?;
        let x = self.backend.embed(&staged.step, &self.tokens, staged.ids)?;
        let x = self.input_layer.forward(&self.backend, &staged.step, x, staged.positions)?;
        let n_heads = input.heads.len();
        let weights = vec![0.0; n_heads * input.tokens.len() * n_rows];
        Ok(AlignPass { rows, x, staged, next_layer: 0, n_heads, weights, adapter: input.adapter })
    }

    /// Runs the next layer that a head needs, if there is one. Returns the pass unless it was the last.
    pub(super) fn run_layer(
        &self,
        mut pass: AlignPass<B>,
    ) -> Result<ControlFlow<Vec<f32>, AlignPass<B>>, ModelError> {
        let idx = pass.next_layer;
        if let (Some(layer), Some((heads, places))) = (self.layers.get(idx), pass.staged.heads.get(idx)) {
            let bias = self.input_layer.score_bias(idx);
            let rotation = self.input_layer.rotation(idx, pass.staged.positions);
            let with = AlignContext { rows: &pass.rows, staged: &pass.staged, bias, rotation, heads: *heads };
            let groups = self.adapters.of_all(pass.adapter)?;
            let on = Adapted::new(&self.backend, &pass.staged.step, &groups);
            let (next, found) = layer.align(on, &pass.x, &with)?;
            pass.x = next;
            // A layer without cross-attention reports no weights.
            let size = pass.weights.len() / pass.n_heads.max(1);
            for (place, found) in places.iter().zip(found.chunks_exact(size)) {
                pass.weights[place * size..][..size].copy_from_slice(found);
            }
        }
        pass.next_layer += 1;
        Ok(if pass.next_layer < pass.staged.heads.len() {
            ControlFlow::Continue(pass)
        } else {
            ControlFlow::Break(pass.weights)
        })
    }

    /// Takes the arrays of a checked pass to the back end. Layers after the last with a head to report are left out.
    fn stage_align(&self, input: &AlignInput<'_>, n_rows: usize) -> Result<StagedAlign<B::Step>, ModelError> {
        let mut builder = StageBuilder::new();
        let ids = builder.indices(input.tokens)?;
        let n_tokens = input.tokens.len() as u32;
        let positions: Vec<[u32; 3]> = (0..n_tokens).map(|p| [p; 3]).collect();
        let positions = self.input_layer.stage(&mut builder, 0..n_tokens, &positions)?;
        let own = builder.self_sequences(&[0, n_tokens])?;
        let cross = builder.sequences(&[0, n_tokens], &[0, n_rows as u32])?;
        let n_layers = input.heads.iter().map(|(layer, _)| *layer + 1).max().unwrap_or(0);
        let of_layer = |idx: u32| {
            let places: Vec<usize> = (0..input.heads.len()).filter(|i| input.heads[*i].0 == idx).collect();
            let heads: Vec<u32> = places.iter().map(|i| input.heads[*i].1).collect();
            Ok((builder.indices(&heads)?, places))
        };
        let heads = (0..n_layers).map(of_layer).collect::<Result<_, KernelError>>()?;
        Ok(StagedAlign { step: self.backend.stage(builder)?, ids, positions, own, cross, heads })
    }

    fn check_align(&self, input: &AlignInput<'_>) -> Result<(), ModelError> {
        let shape = |what, expected: Vec<usize>, actual: Vec<usize>| {
            ModelError::from(KernelError::Shape { op: "align", what, expected, actual })
        };
        let ItemsSpec::CrossAttention(cross) = &self.spec.items else {
            return Err(shape("rows", vec![0], vec![input.rows.n_rows()]));
        };
        let width = cross.encoder_hidden;
        let (n_rows, hidden) = (input.rows.n_rows(), input.rows.hidden());
        if n_rows == 0 || hidden != width || input.tokens.is_empty() {
            return Err(shape("rows", vec![1, 1, width], vec![input.tokens.len(), n_rows, hidden]));
        }
        let sizes = [self.layers.len(), cross.attention.shape.n_heads];
        let inside = |(layer, head): &(u32, u32)| (*layer as usize) < sizes[0] && (*head as usize) < sizes[1];
        match input.heads.iter().find(|head| !inside(head)) {
            Some((layer, head)) => Err(shape("heads", sizes.to_vec(), vec![*layer as usize, *head as usize])),
            None => Ok(()),
        }
    }
}

impl<B: Backend> DecoderLayer<B> {
    /// Runs the layer over known tokens `x: [n_tokens, hidden]` and encoder rows. Returns its output and the
    /// cross-attention weights of the chosen heads, `[n_heads, n_tokens, n_rows]`.
    fn align(
        &self,
        on: Adapted<'_, B>,
        x: &B::Tensor,
        with: &AlignContext<'_, B>,
    ) -> Result<(B::Tensor, Vec<f32>), ModelError> {
        let backend = on.backend;
        let StagedAlign { step, own, cross: cross_seqs, .. } = with.staged;
        let mut x = x.clone();
        if let Some((norm, attention, _)) = &self.attention {
            x = norm.around(backend, &x, |input, residual| {
                let [q, k, v] = &attention.project(on, step, input, with.rotation)?;
                let seqs = Varlen { seqs: *own, mask: self.mask(None), bias: with.bias };
                let context = backend.attention(step, Qkv { q, k, v }, attention.shape(), seqs)?;
                attention.output(on, &context, residual)
            })?;
        }
        let mut weights = Vec::new();
        if let Some((norm, cross, _)) = &self.cross {
            x = norm.around(backend, &x, |input, residual| {
                let q = &cross.query(on, input)?;
                let [k, v] = &cross.keys_values(on, with.rows)?;
                let seqs = Varlen { seqs: *cross_seqs, mask: Mask::Full, bias: ScoreBias::None };
                if with.heads.len() > 0 {
                    let chosen = ChosenHeads { shape: cross.shape(), heads: with.heads };
                    weights = backend.attention_weights(step, [q, k], chosen, seqs)?;
                }
                let context = backend.attention(step, Qkv { q, k, v }, cross.shape(), seqs)?;
                cross.output(on, &context, residual)
            })?;
        }
        let x = self
            .feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(on, input, residual))?;
        Ok((x, weights))
    }
}
