//! The paged KV cache: pages that are micro-kernel panels as they lie.
//!
//! A *page* is one head of one block in one layer: keys as a panel `[head_dim cells][32 keys]`, then values as
//! panels `[head_dim/32][32 keys in cells][32]`, the last one filled up with zeros. Pages lie in the order
//! `[n_layers, n_blocks, n_kv_heads]`. Attention multiplies with them without moving anything.

use std::ops::Range;

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::Precision;
use super::cell::{Bf16Pair, Cell, PANEL, n_cells};
use super::matrix::CpuTensor;
use super::panels::Panels;
use super::pool::{Pool, Shared};
use crate::check;
use crate::ops::{KernelError, KvLayout, Result};

/// A paged KV cache.
#[derive(Debug)]
pub struct CpuKvCache(pub(super) Pages);

/// The cache in either precision.
#[derive(Debug)]
pub(super) enum Pages {
    F32(PagedCells<f32>),
    Bf16(PagedCells<Bf16Pair>),
}

impl CpuKvCache {
    /// Zeros.
    pub(super) fn new(precision: Precision, layout: KvLayout) -> Result<Self> {
        Ok(Self(match precision {
            Precision::F32 => Pages::F32(PagedCells::new(layout)?),
            Precision::Bf16 | Precision::Int8 => Pages::Bf16(PagedCells::new(layout)?),
        }))
    }

    /// Bytes of a block in all layers.
    pub(super) fn block_bytes(precision: Precision, layout: KvLayout) -> usize {
        let page = match precision {
            Precision::F32 => page_len::<f32>(layout.head_dim) * size_of::<f32>(),
            Precision::Bf16 | Precision::Int8 => {
                page_len::<Bf16Pair>(layout.head_dim) * size_of::<Bf16Pair>()
            }
        };
        layout.n_layers * layout.n_kv_heads * page
    }

    /// Its sizes.
    pub(super) fn layout(&self) -> KvLayout {
        match &self.0 {
            Pages::F32(pages) => pages.layout,
            Pages::Bf16(pages) => pages.layout,
        }
    }

    /// Writes rows to slots; the caller checked the arguments.
    pub(super) fn write(&mut self, pool: &Pool, layer: usize, kv: [&CpuTensor; 2], slots: &[u32]) {
        match &mut self.0 {
            Pages::F32(pages) => pages.write(pool, layer, kv, slots),
            Pages::Bf16(pages) => pages.write(pool, layer, kv, slots),
        }
    }

    /// Copies blocks, one pair after the other.
    pub(super) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_blocks(self.layout(), pairs)?;
        match &mut self.0 {
            Pages::F32(pages) => pages.copy(pairs),
            Pages::Bf16(pages) => pages.copy(pairs),
        }
        Ok(())
    }
}

impl CpuKvCache {
    /// Copies blocks `(from, to)` of another cache into this one.
    pub(super) fn copy_from(&mut self, op: &'static str, other: &Self, pairs: &[(u32, u32)]) -> Result<()> {
        check::swap(op, [other.layout(), self.layout()], pairs)?;
        match (&mut self.0, &other.0) {
            (Pages::F32(to), Pages::F32(from)) => to.copy_from(from, pairs),
            (Pages::Bf16(to), Pages::Bf16(from)) => to.copy_from(from, pairs),
            _ => {
                let message = "the caches are of different precisions".to_owned();
                return Err(KernelError::Library { op, message });
            }
        }
        Ok(())
    }
}

/// Cells of the keys of a page.
fn keys_len<C: Cell>(head_dim: usize) -> usize {
    n_cells::<C>(head_dim) * PANEL
}

/// Cells of one panel of the values of a page.
pub(super) const fn value_panel_len<C: Cell>() -> usize {
    KV_BLOCK_TOKENS / C::STEPS * PANEL
}

/// Cells of a page.
fn page_len<C: Cell>(head_dim: usize) -> usize {
    keys_len::<C>(head_dim) + head_dim.div_ceil(PANEL) * value_panel_len::<C>()
}

/// Pages of one kind of cell.
#[derive(Debug)]
pub(super) struct PagedCells<C> {
    layout: KvLayout,
    /// `[n_layers, n_blocks, n_kv_heads]` pages.
    cells: Panels<C>,
}

/// One head of one block in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a, C> {
    /// `[head_dim cells][32 keys]`.
    pub(super) keys: &'a [C],
    /// `[head_dim/32][32 keys in cells][32]`.
    pub(super) values: &'a [C],
}

impl<C: Cell> PagedCells<C> {
    /// Zeros, which cost no memory until they are written.
    pub(super) fn new(layout: KvLayout) -> Result<Self> {
        let slots = check::kv_layout(layout)?;
        let n_pages = slots / KV_BLOCK_TOKENS * layout.n_kv_heads;
        Ok(Self { layout, cells: Panels::zeros(n_pages * page_len::<C>(layout.head_dim)) })
    }

    /// Where a page lies.
    fn range(&self, layer: usize, block: usize, head: usize) -> Range<usize> {
        let page = (layer * self.layout.n_blocks + block) * self.layout.n_kv_heads + head;
        let len = page_len::<C>(self.layout.head_dim);
        page * len..(page + 1) * len
    }

    /// A page to read.
    #[inline(always)]
    pub(super) fn page(&self, layer: usize, block: usize, head: usize) -> Page<'_, C> {
        let page = &self.cells.cells()[self.range(layer, block, head)];
        let (keys, values) = page.split_at(keys_len::<C>(self.layout.head_dim));
        Page { keys, values }
    }

    /// Writes row `i` of keys and values to slot `slots[i]`, in that order. Heads are independent, so each is
    /// a task.
    pub(super) fn write(&mut self, pool: &Pool, layer: usize, [k, v]: [&CpuTensor; 2], slots: &[u32]) {
        let KvLayout { n_kv_heads, head_dim, .. } = self.layout;
        let ranges = |block, head| (layer * self.layout.n_blocks + block) * n_kv_heads + head;
        let len = page_len::<C>(head_dim);
        let cells = &Shared::new(self.cells.cells_mut());
        pool.run(n_kv_heads, n_kv_heads * head_dim * slots.len() * 2, |head| {
            let columns = head * head_dim..(head + 1) * head_dim;
            for (i, &slot) in slots.iter().enumerate() {
                let (block, key) = (slot as usize / KV_BLOCK_TOKENS, slot as usize % KV_BLOCK_TOKENS);
                let page = ranges(block, head);
                // SAFETY: the pages of a head are its task's own, and this slice ends before the next.
                let page = unsafe { cells.slice(page * len..(page + 1) * len) };
                write_token(page, key, &k.row(i)[columns.clone()], &v.row(i)[columns.clone()]);
            }
        });
    }

    /// Where a block of a layer lies, all heads.
    fn block(&self, layer: usize, block: u32) -> Range<usize> {
        let last = self.layout.n_kv_heads - 1;
        self.range(layer, block as usize, 0).start..self.range(layer, block as usize, last).end
    }

    /// Copies blocks in all layers.
    fn copy(&mut self, pairs: &[(u32, u32)]) {
        for layer in 0..self.layout.n_layers {
            for &(from, to) in pairs {
                let (from, to) = (self.block(layer, from), self.block(layer, to));
                self.cells.cells_mut().copy_within(from, to.start);
            }
        }
    }

    /// Copies blocks in all layers from another cache of the same layout but for the number of blocks.
    fn copy_from(&mut self, other: &Self, pairs: &[(u32, u32)]) {
        for layer in 0..self.layout.n_layers {
            for &(from, to) in pairs {
                let (from, to) = (other.block(layer, from), self.block(layer, to));
                self.cells.cells_mut()[to].copy_from_slice(&other.cells.cells()[from]);
            }
        }
    }
}

/// Writes one head of one token's key and value, `[head_dim]` each, to place `key` of a page.
fn write_token<C: Cell>(page: &mut [C], key: usize, k: &[f32], v: &[f32]) {
    let (keys, values) = page.split_at_mut(keys_len::<C>(k.len()));
    for (d, &value) in k.iter().enumerate() {
        keys[d / C::STEPS * PANEL + key].set(d % C::STEPS, value);
    }
    for (panel, v) in values.chunks_exact_mut(value_panel_len::<C>()).zip(v.chunks(PANEL)) {
        for (cell, &value) in panel[key / C::STEPS * PANEL..].iter_mut().zip(v) {
            cell.set(key % C::STEPS, value);
        }
    }
}
