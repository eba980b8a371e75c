//! Cross-attention weights of chosen heads: one pass over known tokens, beside the caches.
//!
//! The layers run over keys and values of this pass alone. The back end returns the weights of the chosen heads beside
//! their attention.

use super::{AlignInput, DecoderLayer, TransformerDecoder};
use crate::error::ModelError;
use crate::layers::RotaryTables;
use crate::spec::{CrossSpec, ItemsSpec};
use triptych_kernels::ops::{ChosenHeads, Mask, Qkv, ScoreBias, Varlen};
use triptych_kernels::{Backend, KernelError};

/// Inputs of a layer in an alignment pass, beside its rows.
struct AlignContext<'a, T> {
    /// Encoder rows, `[n_rows, encoder_hidden]`.
    rows: &'a T,
    rotary: Option<&'a RotaryTables>,
    bias: ScoreBias<'a>,
    /// Cross-attention heads to report.
    heads: &'a [u32],
}

impl<B: Backend> TransformerDecoder<B> {
    /// See [`Decoder::align`](super::Decoder::align).
    pub(super) fn attention_of_heads(&self, input: &AlignInput<'_>) -> Result<Vec<f32>, ModelError> {
        let cross = self.check_align(input)?;
        let n_rows = input.rows.len() / cross.encoder_hidden;
        let rows = self.backend.upload(input.rows.to_vec(), n_rows, cross.encoder_hidden)?;
        let n_tokens = input.tokens.len();
        let positions: Vec<[u32; 3]> = (0..n_tokens as u32).map(|p| [p; 3]).collect();
        let x = self.backend.embed(&self.tokens, input.tokens)?;
        let mut x = self.input_layer.forward(&self.backend, x, positions.iter().map(|[t, ..]| *t))?;
        let rotary = self.input_layer.rotary(&positions);
        let size = n_tokens * n_rows;
        let mut weights = vec![0.0; input.heads.len() * size];
        let n_layers = input.heads.iter().map(|(layer, _)| *layer as usize + 1).max().unwrap_or(0);
        for (idx, layer) in self.layers.iter().enumerate().take(n_layers) {
            let places: Vec<usize> =
                (0..input.heads.len()).filter(|i| input.heads[*i].0 as usize == idx).collect();
            let heads: Vec<u32> = places.iter().map(|i| input.heads[*i].1).collect();
            let bias = self.input_layer.score_bias(idx);
            let (next, found) = layer.align(
                &self.backend,
                &x,
                &AlignContext { rows: &rows, rotary: rotary.as_ref(), bias, heads: &heads },
            )?;
            x = next;
            // A layer without cross-attention reports no weights.
            for (place, found) in places.into_iter().zip(found.chunks_exact(size)) {
                weights[place * size..][..size].copy_from_slice(found);
            }
        }
        Ok(weights)
    }

    fn check_align(&self, input: &AlignInput<'_>) -> Result<&CrossSpec, ModelError> {
        let shape = |what, expected: Vec<usize>, actual: Vec<usize>| {
            ModelError::from(KernelError::Shape { op: "align", what, expected, actual })
        };
        let ItemsSpec::CrossAttention(cross) = &self.spec.items else {
            return Err(shape("rows", vec![0], vec![input.rows.len()]));
        };
        let width = cross.encoder_hidden;
        if input.rows.is_empty() || !input.rows.len().is_multiple_of(width) || input.tokens.is_empty() {
            return Err(shape("rows", vec![width], vec![input.tokens.len(), input.rows.len()]));
        }
        let sizes = [self.layers.len(), cross.attention.shape.n_heads];
        let inside = |(layer, head): &(u32, u32)| (*layer as usize) < sizes[0] && (*head as usize) < sizes[1];
        match input.heads.iter().find(|head| !inside(head)) {
            Some((layer, head)) => Err(shape("heads", sizes.to_vec(), vec![*layer as usize, *head as usize])),
            None => Ok(cross),
        }
    }
}

impl<B: Backend> DecoderLayer<B> {
    /// Runs the layer over known tokens `x: [n_tokens, hidden]` and encoder rows. Returns its output and the
    /// cross-attention weights of the chosen heads, `[n_heads, n_tokens, n_rows]`.
    fn align(
        &self,
        backend: &B,
        x: &B::Tensor,
        with: &AlignContext<'_, B::Tensor>,
    ) -> Result<(B::Tensor, Vec<f32>), ModelError> {
        let tokens = [0, backend.dims(x).0 as u32];
        let rows = [0, backend.dims(with.rows).0 as u32];
        let mut x = x.clone();
        if let Some((norm, attention, _)) = &self.attention {
            x = norm.around(backend, &x, |input, residual| {
                let [q, k, v] = &attention.project(backend, input, with.rotary)?;
                let mask = Mask::Causal;
                let bias = with.bias;
                let seqs = Varlen { cu_seqlens_q: &tokens, cu_seqlens_k: &tokens, mask, bias };
                let context = backend.attention(Qkv { q, k, v }, attention.shape(), seqs)?;
                attention.output(backend, &context, residual)
            })?;
        }
        let mut weights = Vec::new();
        if let Some((norm, cross, _)) = &self.cross {
            x = norm.around(backend, &x, |input, residual| {
                let q = &cross.query(backend, input)?;
                let [k, v] = &cross.keys_values(backend, with.rows)?;
                let mask = Mask::Full;
                let bias = ScoreBias::None;
                let seqs = Varlen { cu_seqlens_q: &tokens, cu_seqlens_k: &rows, mask, bias };
                if !with.heads.is_empty() {
                    let chosen = ChosenHeads { shape: cross.shape(), heads: with.heads };
                    weights = backend.attention_weights([q, k], chosen, seqs)?;
                }
                let context = backend.attention(Qkv { q, k, v }, cross.shape(), seqs)?;
                cross.output(backend, &context, residual)
            })?;
        }
        let x = self
            .feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))?;
        Ok((x, weights))
    }
}
