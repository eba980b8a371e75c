//! The reference cache: plain rows of keys and values.

use candle_core::Tensor;
use triptych_core::shape::KV_BLOCK_TOKENS;

use super::tensor::{matrix, values};
use crate::check;
use crate::ops::{KvLayout, Result};

/// Keys and values of all layers, each `[n_layers, n_blocks · KV_BLOCK_TOKENS, n_kv_heads · head_dim]`.
#[derive(Debug)]
pub struct ReferenceKvCache {
    pub(super) layout: KvLayout,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl ReferenceKvCache {
    /// Zeros.
    pub(super) fn new(layout: KvLayout) -> Result<Self> {
        let n_values = check::kv_layout(layout)? * layout.n_kv_heads * layout.head_dim;
        Ok(Self { layout, k: vec![0.0; n_values], v: vec![0.0; n_values] })
    }

    /// Bytes of a block in all layers.
    pub(super) fn block_bytes(layout: KvLayout) -> usize {
        2 * size_of::<f32>() * layout.n_layers * KV_BLOCK_TOKENS * layout.n_kv_heads * layout.head_dim
    }

    /// Index of the first value of a slot's row.
    fn row(&self, layer: usize, slot: usize) -> usize {
        (layer * self.layout.n_blocks * KV_BLOCK_TOKENS + slot) * self.width()
    }

    /// Values of one token's keys.
    fn width(&self) -> usize {
        self.layout.n_kv_heads * self.layout.head_dim
    }

    /// Writes rows to their slots; the caller checked the arguments.
    pub(super) fn write(&mut self, layer: usize, kv: [&Tensor; 2], slots: &[u32]) -> Result<()> {
        let (width, [k, v]) = (self.width(), kv);
        let (k, v) = (values("write_kv", k)?, values("write_kv", v)?);
        for (i, &slot) in slots.iter().enumerate() {
            let (from, to) = (i * width, self.row(layer, slot as usize));
            self.k[to..][..width].copy_from_slice(&k[from..][..width]);
            self.v[to..][..width].copy_from_slice(&v[from..][..width]);
        }
        Ok(())
    }

    /// Copies blocks in all layers, one pair after the other.
    pub(super) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_blocks(self.layout, pairs)?;
        let len = KV_BLOCK_TOKENS * self.width();
        for layer in 0..self.layout.n_layers {
            for &(from, to) in pairs {
                let [from, to] = [from, to].map(|block| self.row(layer, block as usize * KV_BLOCK_TOKENS));
                self.k.copy_within(from..from + len, to);
                self.v.copy_within(from..from + len, to);
            }
        }
        Ok(())
    }

    /// Copies blocks of another cache, all layers: `(from, to)`.
    pub(super) fn copy_from(&mut self, op: &'static str, other: &Self, pairs: &[(u32, u32)]) -> Result<()> {
        check::swap(op, [other.layout, self.layout], pairs)?;
        let len = KV_BLOCK_TOKENS * self.width();
        for layer in 0..self.layout.n_layers {
            for &(from, to) in pairs {
                let from = other.row(layer, from as usize * KV_BLOCK_TOKENS);
                let to = self.row(layer, to as usize * KV_BLOCK_TOKENS);
                self.k[to..][..len].copy_from_slice(&other.k[from..][..len]);
                self.v[to..][..len].copy_from_slice(&other.v[from..][..len]);
            }
        }
        Ok(())
    }

    /// Keys and values of a sequence, gathered: `[n_keys, n_kv_heads · head_dim]` each.
    pub(super) fn gather(&self, layer: usize, table: &[u32], n_keys: usize) -> Result<[Tensor; 2]> {
        let width = self.width();
        let gather = |from: &[f32]| {
            let rows = (0..n_keys).flat_map(|i| {
                let slot = table[i / KV_BLOCK_TOKENS] as usize * KV_BLOCK_TOKENS + i % KV_BLOCK_TOKENS;
                let row = self.row(layer, slot);
                from[row..row + width].iter().copied()
            });
            matrix("paged_attention", rows.collect(), (n_keys, width))
        };
        Ok([gather(&self.k)?, gather(&self.v)?])
    }
}
