//! Where chosen heads of cross-attention look: one pass over known tokens, beside the caches.
//!
//! The attention ops give no probabilities, and need not: the few scores that are wanted are computed here, on the
//! host, from the projected queries and keys of the layers of those heads.

use super::{AlignInput, Layer, TransformerDecoder};
use crate::error::ModelError;
use crate::layers::RotaryTables;
use crate::spec::{CrossSpec, ItemsSpec};
use triptych_kernels::ops::{AttentionShape, Mask, Qkv, ScoreBias, Varlen};
use triptych_kernels::{Backend, KernelError};

/// Queries and keys of one layer, on the host.
struct Projected {
    /// `[n_tokens, n_heads·head_dim]`.
    q: Vec<f32>,
    /// `[n_rows, n_kv_heads·head_dim]`.
    k: Vec<f32>,
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
        let mut x = self.entry.enter(&self.backend, x, positions.iter().map(|[t, ..]| *t))?;
        let rotary = self.entry.rotary(&positions);
        let size = n_tokens * n_rows;
        let mut weights = vec![0.0; input.heads.len() * size];
        let n_layers = input.heads.iter().map(|(layer, _)| *layer as usize + 1).max().unwrap_or(0);
        for (idx, layer) in self.layers.iter().enumerate().take(n_layers) {
            let place = (rotary.as_ref(), self.entry.score_bias(idx));
            let (next, projected) = layer.forced(&self.backend, &x, &rows, place)?;
            x = next;
            for (out, (_, head)) in
                weights.chunks_exact_mut(size.max(1)).zip(input.heads).filter(|(_, h)| h.0 as usize == idx)
            {
                probabilities(&projected, cross.attention.shape, *head as usize, out);
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

impl<B: Backend> Layer<B> {
    /// The layer over known tokens and encoder rows, with the queries and keys of its cross-attention.
    fn forced(
        &self,
        backend: &B,
        x: &B::Tensor,
        rows: &B::Tensor,
        (rotary, bias): (Option<&RotaryTables>, ScoreBias<'_>),
    ) -> Result<(B::Tensor, Projected), ModelError> {
        let (n_tokens, n_rows) = (backend.dims(x).0 as u32, backend.dims(rows).0 as u32);
        let tokens = [0, n_tokens];
        let mut x = x.clone();
        if let Some((norm, attention, _)) = &self.attention {
            x = norm.around(backend, &x, |input, residual| {
                let [q, k, v] = &attention.project(backend, input, rotary)?;
                let seqs = Varlen { cu_seqlens_q: &tokens, cu_seqlens_k: &tokens, mask: Mask::Causal, bias };
                let context = backend.attention(Qkv { q, k, v }, attention.shape(), seqs)?;
                attention.output(backend, &context, residual)
            })?;
        }
        let mut projected = Projected { q: Vec::new(), k: Vec::new() };
        if let Some((norm, cross, _)) = &self.cross {
            x = norm.around(backend, &x, |input, residual| {
                let q = &cross.query(backend, input)?;
                let [k, v] = &cross.keys_values(backend, rows)?;
                projected = Projected { q: backend.download(q)?, k: backend.download(k)? };
                let seqs = Varlen {
                    cu_seqlens_q: &tokens,
                    cu_seqlens_k: &[0, n_rows],
                    mask: Mask::Full,
                    bias: ScoreBias::None,
                };
                let context = backend.attention(Qkv { q, k, v }, cross.shape(), seqs)?;
                cross.output(backend, &context, residual)
            })?;
        }
        let x = self
            .feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))?;
        Ok((x, projected))
    }
}

/// Softmax of a head's scores: `out: [n_tokens, n_rows]`.
fn probabilities(projected: &Projected, shape: AttentionShape, head: usize, out: &mut [f32]) {
    let AttentionShape { n_heads, n_kv_heads, head_dim, scale, .. } = shape;
    let (q_width, k_width) = (n_heads * head_dim, n_kv_heads * head_dim);
    let (q_at, k_at) = (head * head_dim, head * n_kv_heads / n_heads * head_dim);
    let n_rows = projected.k.len() / k_width;
    if n_rows == 0 {
        // A layer that does not cross-attend looks nowhere.
        return;
    }
    for (q, out) in projected.q.chunks_exact(q_width).zip(out.chunks_exact_mut(n_rows)) {
        let q = &q[q_at..q_at + head_dim];
        for (k, score) in projected.k.chunks_exact(k_width).zip(&mut *out) {
            *score = scale * q.iter().zip(&k[k_at..]).map(|(a, b)| a * b).sum::<f32>();
        }
        let max = out.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in &mut *out {
            *score = (*score - max).exp();
            sum += *score;
        }
        for score in out {
            *score /= sum;
        }
    }
}
