//! The paged KV cache: pages that are micro-kernel panels as they lie.
//!
//! A *page* is one head of one block in one layer: keys as a panel `[head_dim cells][32 keys]`, then values as
//! panels `[head_dim/32][32 keys in cells][32]`, the last one filled up with zeros. Pages of a cache lie in the order
//! `[n_layers, n_blocks, n_kv_heads]`. Attention multiplies with them without moving anything.
//!
//! A page of bytes ends with a scale for each key and one for each key's values: a head of a token is `scale · byte`, the
//! largest byte standing for its largest value (as KIVI and others quantize per token; Liu et al. 2024).

use std::ops::Range;

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::cell::{Bf16Pair, ByteQuad, Cell, LARGEST_BYTE, PANEL, n_cells};
use super::context::Context;
use super::matrix::CpuTensor;
use super::panels::{Panels, lay};
use super::pool::Shared;
use super::simd::{Kernel, Simd};
use crate::check;
use crate::ops::{KernelError, KvLayout, Result};
use crate::precision::Precision;

/// A paged KV cache.
#[derive(Debug)]
pub struct CpuKvCache(pub(super) Pages);

/// The cache in a precision.
#[derive(Debug)]
pub(super) enum Pages {
    F32(PagedCells<f32>),
    Bf16(PagedCells<Bf16Pair>),
    Int8(PagedCells<ByteQuad>),
}

impl CpuKvCache {
    /// Zeros.
    pub(super) fn new(precision: Precision, layout: KvLayout) -> Result<Self> {
        Ok(Self(match precision {
            Precision::F32 => Pages::F32(PagedCells::new(layout, PageOrder::Blocks)?),
            Precision::Bf16 => Pages::Bf16(PagedCells::new(layout, PageOrder::Blocks)?),
            Precision::Int8 | Precision::Int4 => Pages::Int8(PagedCells::new(layout, PageOrder::Blocks)?),
        }))
    }

    /// Bytes of a block in all layers.
    pub(super) fn block_bytes(precision: Precision, layout: KvLayout) -> usize {
        let page_words = match precision {
            Precision::F32 => page_len::<f32>(layout.head_dim),
            Precision::Bf16 => page_len::<Bf16Pair>(layout.head_dim),
            Precision::Int8 | Precision::Int4 => page_len::<ByteQuad>(layout.head_dim),
        };
        layout.n_layers * layout.n_kv_heads * page_words * size_of::<u32>()
    }

    /// Layers, blocks, heads and width.
    pub(super) fn layout(&self) -> KvLayout {
        match &self.0 {
            Pages::F32(pages) => pages.layout,
            Pages::Bf16(pages) => pages.layout,
            Pages::Int8(pages) => pages.layout,
        }
    }

    /// Writes rows to slots; the caller checked the arguments.
    pub(super) fn write(&mut self, context: &Context, layer: usize, kv: [Columns<'_>; 2], slots: &[u32]) {
        match &mut self.0 {
            Pages::F32(pages) => pages.write(context, layer, kv, slots),
            Pages::Bf16(pages) => pages.write(context, layer, kv, slots),
            Pages::Int8(pages) => pages.write(context, layer, kv, slots),
        }
    }

    /// Copies blocks, one pair after the other.
    pub(super) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_blocks(self.layout(), pairs)?;
        match &mut self.0 {
            Pages::F32(pages) => pages.copy(pairs),
            Pages::Bf16(pages) => pages.copy(pairs),
            Pages::Int8(pages) => pages.copy(pairs),
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
            (Pages::Int8(to), Pages::Int8(from)) => to.copy_from(from, pairs),
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

/// Cells of the values of a page.
fn values_len<C: Cell>(head_dim: usize) -> usize {
    head_dim.div_ceil(PANEL) * value_panel_len::<C>()
}

/// Cells of a page.
fn page_len<C: Cell>(head_dim: usize) -> usize {
    let scales = if C::IS_SCALED { 2 * KV_BLOCK_TOKENS } else { 0 };
    keys_len::<C>(head_dim) + values_len::<C>(head_dim) + scales
}

/// Position of the page of a layer, a block and a head.
#[inline(always)]
fn page_range<C: Cell>(
    layout: KvLayout,
    order: PageOrder,
    (layer, block, head): (usize, usize, usize),
) -> Range<usize> {
    let KvLayout { n_blocks, n_kv_heads, head_dim, .. } = layout;
    let in_layer = match order {
        PageOrder::Blocks => block * n_kv_heads + head,
        PageOrder::Heads => head * n_blocks + block,
    };
    let (page, len) = (layer * n_blocks * n_kv_heads + in_layer, page_len::<C>(head_dim));
    page * len..(page + 1) * len
}

/// Pages of one kind of cell.
#[derive(Debug)]
pub(super) struct PagedCells<C> {
    layout: KvLayout,
    order: PageOrder,
    /// A layer's pages after the other's, in that order.
    cells: Panels<C>,
}

/// Order of the pages of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageOrder {
    /// `[n_blocks, n_kv_heads]`: blocks are copied as a whole.
    Blocks,
    /// `[n_kv_heads, n_blocks]`: what is read together lies together. In the other order the pages of one head can be a
    /// power of two apart, and then few sets of a cache hold all of them.
    Heads,
}

/// One head of one block in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a, C> {
    /// `[head_dim cells][32 keys]`.
    pub(super) keys: &'a [C],
    /// `[head_dim/32][32 keys in cells][32]`.
    pub(super) values: &'a [C],
    /// The bits of f32: of each key, then of each key's values. Empty unless cells are scaled.
    pub(super) scales: &'a [C],
}

impl<C: Cell> PagedCells<C> {
    /// Zeros, which cost no memory until they are written.
    pub(super) fn new(layout: KvLayout, order: PageOrder) -> Result<Self> {
        let slots = check::kv_layout(layout)?;
        let n_pages = slots / KV_BLOCK_TOKENS * layout.n_kv_heads;
        Ok(Self { layout, order, cells: Panels::zeros(n_pages * page_len::<C>(layout.head_dim)) })
    }

    /// Range of a page's cells.
    #[inline(always)]
    fn range(&self, layer: usize, block: usize, head: usize) -> Range<usize> {
        page_range::<C>(self.layout, self.order, (layer, block, head))
    }

    /// The page of a layer, a block and a head, to read.
    #[inline(always)]
    pub(super) fn page(&self, layer: usize, block: usize, head: usize) -> Page<'_, C> {
        let page = &self.cells.cells()[self.range(layer, block, head)];
        let (keys, rest) = page.split_at(keys_len::<C>(self.layout.head_dim));
        let (values, scales) = rest.split_at(values_len::<C>(self.layout.head_dim));
        Page { keys, values, scales }
    }

    /// Writes row `i` of keys and values to slot `slots[i]`, in that order. Heads are independent, so each is
    /// a task.
    pub(super) fn write(&mut self, context: &Context, layer: usize, kv: [Columns<'_>; 2], slots: &[u32]) {
        let KvLayout { n_kv_heads, head_dim, .. } = self.layout;
        let (layout, order) = (self.layout, self.order);
        let cells = &Shared::new(self.cells.cells_mut());
        context.pool.run(n_kv_heads, n_kv_heads * head_dim * slots.len() * 2, |head| {
            context.isa.run(WriteHead { cells, layout, order, layer, head, kv, slots });
        });
    }

    /// Range of the cells of a block of a layer, all heads.
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

/// Columns of an activation, from one on: the keys, or the values, of all heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns<'a> {
    pub(super) of: &'a CpuTensor,
    pub(super) first: usize,
}

impl<'a> Columns<'a> {
    /// All columns of a tensor.
    pub(super) fn all(of: &'a CpuTensor) -> Self {
        Self { of, first: 0 }
    }
}

/// One head of rows on their way into pages.
struct WriteHead<'a, C> {
    cells: &'a Shared<'a, C>,
    layout: KvLayout,
    order: PageOrder,
    layer: usize,
    head: usize,
    kv: [Columns<'a>; 2],
    slots: &'a [u32],
}

impl<C: Cell> Kernel for WriteHead<'_, C> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut words = Vec::new();
        let mut row = 0;
        while row < self.slots.len() {
            let (block, key) =
                (self.slots[row] as usize / KV_BLOCK_TOKENS, self.slots[row] as usize % KV_BLOCK_TOKENS);
            let range = page_range::<C>(self.layout, self.order, (self.layer, block, self.head));
            // SAFETY: the pages of a head are its task's own, and this slice ends before the next.
            let page = unsafe { self.cells.slice(range) };
            if key == 0 && fills_a_block(&self.slots[row..]) {
                self.write_block(s, page, (row, &mut words));
                row += KV_BLOCK_TOKENS;
            } else {
                let [k, v] = self.kv.map(|of| self.part(of, row));
                write_token(page, key, k, v);
                row += 1;
            }
        }
    }
}

impl<C: Cell> WriteHead<'_, C> {
    /// The head's part of a row.
    #[inline(always)]
    fn part<'b>(&self, Columns { of, first }: Columns<'b>, row: usize) -> &'b [f32] {
        &of.row(row)[first + self.head * self.layout.head_dim..][..self.layout.head_dim]
    }

    /// Writes a page as a whole, from row `first` on; `words` is room for its keys.
    #[inline(always)]
    fn write_block<S: Simd>(&self, s: S, page: &mut [C], (first, words): (usize, &mut Vec<C>)) {
        let head_dim = self.layout.head_dim;
        let k_cells = n_cells::<C>(head_dim);
        let (keys, rest) = page.split_at_mut(keys_len::<C>(head_dim));
        let (values, scales) = rest.split_at_mut(values_len::<C>(head_dim));
        words.resize(KV_BLOCK_TOKENS * k_cells, C::default());
        // The rows of the next page: parts of rows do not come by themselves.
        let next = first + KV_BLOCK_TOKENS;
        for row in next..self.slots.len().min(next + KV_BLOCK_TOKENS) {
            for of in self.kv {
                s.prefetch_all(self.part(of, row));
            }
        }
        let mut factors = [[1.0; KV_BLOCK_TOKENS]; 2];
        if C::IS_SCALED {
            for ((of, scales), factors) in
                self.kv.into_iter().zip(scales.chunks_exact_mut(KV_BLOCK_TOKENS)).zip(&mut factors)
            {
                for (key, (to, factor)) in scales.iter_mut().zip(factors).enumerate() {
                    let scale = scale(self.part(of, first + key));
                    (*to, *factor) = (C::with_bits(scale), inverse(scale));
                }
            }
        }
        for (key, words) in words.chunks_exact_mut(k_cells).enumerate() {
            C::fill(s, words, self.part(self.kv[0], first + key), factors[0][key]);
        }
        lay(words, k_cells, keys);
        self.write_values(values, first, &factors[1]);
    }

    /// Writes the values of a page, from row `first` on, each row times its factor.
    #[inline(always)]
    fn write_values(&self, values: &mut [C], first: usize, factors: &[f32; KV_BLOCK_TOKENS]) {
        let panels = values.chunks_exact_mut(value_panel_len::<C>());
        for (panel, start) in panels.zip((0..self.layout.head_dim).step_by(PANEL)) {
            let columns = start..self.layout.head_dim.min(start + PANEL);
            let keys = (0..KV_BLOCK_TOKENS).step_by(C::STEPS);
            for ((cells, key), factors) in
                panel.chunks_exact_mut(PANEL).zip(keys).zip(factors.chunks_exact(C::STEPS))
            {
                let row = |step| &self.part(self.kv[1], first + key + step)[columns.clone()];
                C::fill_steps(&mut cells[..columns.len()], row, factors);
            }
        }
    }
}

/// `true` if the first slots are those of a block, one after another.
fn fills_a_block(slots: &[u32]) -> bool {
    slots.len() >= KV_BLOCK_TOKENS
        && slots[..KV_BLOCK_TOKENS].iter().zip(slots[0]..).all(|(slot, expected)| *slot == expected)
}

/// Writes one head of one token's key and value, `[head_dim]` each, to place `key` of a page.
#[inline(always)]
fn write_token<C: Cell>(page: &mut [C], key: usize, k: &[f32], v: &[f32]) {
    let (keys, rest) = page.split_at_mut(keys_len::<C>(k.len()));
    let (values, scales) = rest.split_at_mut(values_len::<C>(k.len()));
    let mut factors = [1.0; 2];
    if C::IS_SCALED {
        for (i, (values, factor)) in [k, v].into_iter().zip(&mut factors).enumerate() {
            let scale = scale(values);
            scales[i * KV_BLOCK_TOKENS + key] = C::with_bits(scale);
            *factor = inverse(scale);
        }
    }
    for (d, &value) in k.iter().enumerate() {
        keys[d / C::STEPS * PANEL + key].set(d % C::STEPS, value * factors[0]);
    }
    write_value(values, key, v, factors[1]);
}

/// Writes one head of one token's value times a factor.
#[inline(always)]
fn write_value<C: Cell>(values: &mut [C], key: usize, v: &[f32], factor: f32) {
    for (panel, v) in values.chunks_exact_mut(value_panel_len::<C>()).zip(v.chunks(PANEL)) {
        for (cell, &value) in panel[key / C::STEPS * PANEL..].iter_mut().zip(v) {
            cell.set(key % C::STEPS, value * factor);
        }
    }
}

/// The scale of values as signed bytes: the largest of them over the largest byte. NaN unless all are finite.
#[inline(always)]
pub(super) fn scale(values: &[f32]) -> f32 {
    // Sizes are in the order of their bits, and what is not a number comes after all of them.
    let largest = values.iter().map(|value| value.abs().to_bits()).fold(0, u32::max);
    let scale = f32::from_bits(largest) / LARGEST_BYTE;
    if scale.is_finite() { scale } else { f32::NAN }
}

/// The factor that turns values into bytes: `1 / scale`, or 0 for a scale too small.
#[inline(always)]
pub(super) fn inverse(scale: f32) -> f32 {
    if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale }
}
