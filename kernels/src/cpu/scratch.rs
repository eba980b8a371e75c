//! Memory that ops take beside their results while they run, without running them.
//!
//! Of each op what grows with the rows: copies of rows in the words of panels, keys and values in pages. What a thread has for a
//! tile is left out. `services/models/tests/memory.rs` holds forwards to it.

use super::CpuBackend;
use super::cell::{Bf16Dot, Bf16Fma, ByteQuad, F32Fma, FloatMath, n_cells};
use super::kv::CpuKvCache;
use super::linear::{COPIED, RowScale, stride};
use crate::ops::{AttentionShape, KvLayout};
use crate::precision::Precision;

/// Bytes of a row that is laid for a product.
fn laid_bytes<M: FloatMath>(width: usize) -> usize {
    stride::<M::Row>(n_cells::<M::Word>(width)) * size_of::<M::Row>()
}

impl CpuBackend {
    /// Bytes that a linear layer takes for `[n_tokens, n_in]` rows: these once more, where its arithmetic is not theirs. Layers in
    /// int4 are taken for int8, since encoders have none.
    pub fn linear_scratch(&self, n_tokens: usize, [n_in, n_out]: [usize; 2]) -> usize {
        let isa = self.context.isa;
        let of_row = match self.context.precision {
            Precision::F32 if stride::<f32>(n_in) > n_in && n_tokens > 1 && n_out > COPIED => {
                laid_bytes::<F32Fma>(n_in)
            }
            Precision::F32 => 0,
            Precision::Bf16 if isa.has_bf16_dot() => laid_bytes::<Bf16Dot>(n_in),
            Precision::Bf16 => laid_bytes::<Bf16Fma>(n_in),
            Precision::Int8 | Precision::Int4 => {
                let cells = stride::<ByteQuad>(n_cells::<ByteQuad>(n_in));
                cells * size_of::<ByteQuad>() + size_of::<RowScale>()
            }
        };
        n_tokens.saturating_mul(of_row)
    }

    /// Bytes that attention takes for keys and values of `n_blocks` blocks and `n_tokens` rows: pages of their own, and places in
    /// them.
    pub fn attention_scratch(&self, [n_blocks, n_tokens]: [usize; 2], shape: AttentionShape) -> usize {
        let AttentionShape { n_kv_heads, head_dim, .. } = shape;
        let layout = KvLayout { n_layers: 1, n_blocks, n_kv_heads, head_dim };
        let pages = CpuKvCache::block_bytes(self.attention_precision(), layout).saturating_mul(n_blocks);
        pages.saturating_add(n_tokens.saturating_mul(size_of::<u32>()))
    }

    /// Precision of the keys and values of attention inside sequences.
    pub fn attention_precision(&self) -> Precision {
        match self.context.precision {
            Precision::Int8 | Precision::Int4 if self.context.isa.has_byte_dot() => Precision::Int8,
            Precision::Bf16 => Precision::Bf16,
            Precision::F32 | Precision::Int8 | Precision::Int4 => Precision::F32,
        }
    }
}
