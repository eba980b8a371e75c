//! Linear layers: weights in panels, and their product with rows.
//!
//! A weight `[n_out, n_in]` is packed once into panels of 32 outputs, `[k_cells][32]`, the last one filled up
//! with zeros. A product is cut into tasks of some rows by some panels; a task's panels stay in the second
//! cache while its rows pass, and bias, activation and residual are applied while a tile is in registers.
//! With precision bf16, rows are rounded to bf16 too, once a call; sums are f32.

use std::ops::Range;

use super::cell::{Bf16Pair, Cell, FillRows, PANEL, n_cells};
use super::math::activate;
use super::matrix::CpuTensor;
use super::panels::Panels;
use super::pool::{Pool, Shared};
use super::simd::{FoundIsa, Kernel, Simd};
use super::tile::{Rows, for_height, height, multiply, strip_width, strips_per_panel, zero_sums};
use super::{CpuBackend, Precision};
use crate::ops::Activation;
use crate::stored::Stacked;

/// Bytes of the panels of a task: less than half a second cache.
const GROUP_BYTES: usize = 400 << 10;

/// Register tiles, one under another, in a task's rows.
const TASK_TILES: usize = 8;

/// A linear layer in panels.
#[derive(Debug)]
pub struct CpuLinear {
    n_in: usize,
    n_out: usize,
    weight: Packed,
    /// `[n_panels · 32]`, zeros past `n_out`.
    bias: Option<Vec<f32>>,
}

/// The panels in either precision, `[n_panels][k_cells][32]`.
#[derive(Debug)]
enum Packed {
    F32(Panels<f32>),
    Bf16(Panels<Bf16Pair>),
}

impl CpuLinear {
    /// Packs a layer.
    pub(super) fn new(backend: &CpuBackend, stacked: Stacked) -> Self {
        let weight = match backend.precision {
            Precision::F32 => Packed::F32(pack(&backend.pool, &stacked)),
            Precision::Bf16 => Packed::Bf16(pack(&backend.pool, &stacked)),
        };
        let Stacked { n_in, n_out, bias, .. } = stacked;
        let bias = bias.map(|mut bias| {
            bias.resize(n_out.next_multiple_of(PANEL), 0.0);
            bias
        });
        Self { n_in, n_out, weight, bias }
    }

    /// `(n_in, n_out)`.
    pub(super) fn dims(&self) -> (usize, usize) {
        (self.n_in, self.n_out)
    }

    /// `act(x Wᵀ + b) + residual`. `x` has `n_in` columns, `residual` the shape of the result.
    pub(super) fn apply(
        &self,
        backend: &CpuBackend,
        x: &CpuTensor,
        act: Activation,
        residual: Option<&CpuTensor>,
    ) -> CpuTensor {
        let (n_tokens, n_in) = x.dims();
        let mut out = vec![0.0; n_tokens * self.n_out];
        let epilogue = Epilogue { bias: self.bias.as_deref(), act, residual: residual.map(CpuTensor::data) };
        let size = Size { n_tokens, n_in, n_out: self.n_out };
        match &self.weight {
            Packed::F32(panels) => {
                Product { x: x.data(), panels: panels.cells(), size, epilogue }.run(backend, &mut out);
            }
            Packed::Bf16(panels) => {
                let x = to_cells::<Bf16Pair>(backend, x);
                Product { x: &x, panels: panels.cells(), size, epilogue }.run(backend, &mut out);
            }
        }
        CpuTensor::new(out, n_tokens, self.n_out)
    }
}

/// Lays `[n_out, n_in]` into panels.
fn pack<C: Cell>(pool: &Pool, stacked: &Stacked) -> Panels<C> {
    let Stacked { n_in, n_out, weight, .. } = stacked;
    let panel_len = n_cells::<C>(*n_in) * PANEL;
    let mut panels = Panels::zeros(n_out.div_ceil(PANEL) * panel_len);
    pool.rows(panels.cells_mut(), panel_len, n_in * PANEL, |first, panels: &mut [C]| {
        for (panel, cells) in (first..).zip(panels.chunks_exact_mut(panel_len)) {
            for out in panel * PANEL..(*n_out).min((panel + 1) * PANEL) {
                for (k, &value) in weight[out * n_in..][..*n_in].iter().enumerate() {
                    cells[k / C::STEPS * PANEL + out % PANEL].set(k % C::STEPS, value);
                }
            }
        }
    });
    panels
}

/// Rows rounded to cells, `[n_tokens, n_cells]`.
fn to_cells<C: Cell>(backend: &CpuBackend, x: &CpuTensor) -> Vec<C> {
    let (n_tokens, width) = x.dims();
    let k_cells = n_cells::<C>(width);
    let mut cells = vec![C::default(); n_tokens * k_cells];
    backend.pool.rows(&mut cells, k_cells, width / 8 + 1, |row, cells| {
        let values = &x.data()[row * width..][..cells.len() / k_cells * width];
        backend.isa.run(FillRows { values, width, cells });
    });
    cells
}

/// What follows the sums.
#[derive(Clone, Copy)]
struct Epilogue<'a> {
    /// As in [`CpuLinear`].
    bias: Option<&'a [f32]>,
    act: Activation,
    /// `[n_tokens, n_out]`.
    residual: Option<&'a [f32]>,
}

/// Sizes of a product.
#[derive(Clone, Copy)]
struct Size {
    n_tokens: usize,
    n_in: usize,
    n_out: usize,
}

/// A product to compute.
struct Product<'a, C> {
    /// `[n_tokens, k_cells]`.
    x: &'a [C],
    /// `[n_panels][k_cells][32]`.
    panels: &'a [C],
    size: Size,
    epilogue: Epilogue<'a>,
}

impl<C: Cell> Product<'_, C> {
    /// Computes it, `out: [n_tokens, n_out]`.
    fn run(&self, backend: &CpuBackend, out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        let Size { n_tokens, n_in, n_out } = self.size;
        let (rows, panels) = self.task_size(backend.isa, backend.pool.n_threads());
        let n_panels = n_out.div_ceil(PANEL);
        let n_runs = n_tokens.div_ceil(rows);
        // A multiply-add takes about 1/50 ns, a weight from memory about 1/8 ns.
        let cost_ns = (n_tokens * n_in * n_out / 50).max(n_in * n_out / 8 / C::STEPS);
        let out = &Shared::new(out);
        backend.pool.run(n_runs * n_panels.div_ceil(panels), cost_ns, |task| {
            let (group, run) = (task / n_runs, task % n_runs);
            let rows = run * rows..n_tokens.min((run + 1) * rows);
            let panels = group * panels..n_panels.min((group + 1) * panels);
            backend.isa.run(Block { product: self, rows, panels, out });
        });
    }

    /// Rows and panels of a task.
    fn task_size(&self, isa: FoundIsa, n_threads: usize) -> (usize, usize) {
        let tile = isa.tile_rows();
        let n_runs = self.size.n_tokens.div_ceil(TASK_TILES * tile);
        let rows = self.size.n_tokens.div_ceil(n_runs).next_multiple_of(tile);
        let panel_bytes = n_cells::<C>(self.size.n_in).max(1) * PANEL * size_of::<C>();
        let n_panels = self.size.n_out.div_ceil(PANEL);
        // Several tasks for each thread, so that one that was held up does not hold up all.
        let share = (n_panels * n_runs).div_ceil(4 * n_threads).next_multiple_of(4);
        (rows, (GROUP_BYTES / panel_bytes).clamp(1, share.max(1)))
    }
}

/// Some rows by some panels of a product.
struct Block<'a, C> {
    product: &'a Product<'a, C>,
    rows: Range<usize>,
    panels: Range<usize>,
    /// `[n_tokens, n_out]`.
    out: &'a Shared<'a, f32>,
}

impl<C: Cell> Kernel for Block<'_, C> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let height = height::<S>(self.rows.end - row);
            for_height!(height, S, C, row_of_tiles(s, &self, row));
            row += height;
        }
    }
}

/// `MR` rows by all panels of a block, `NS` strips at a time while there are so many.
#[inline(always)]
fn row_of_tiles<S: Simd, C: Cell, const MR: usize, const NS: usize>(s: S, block: &Block<'_, C>, row: usize) {
    let used = block.product.size.n_out.div_ceil(strip_width::<S>());
    let end = used.min(block.panels.end * strips_per_panel::<S>());
    let mut strip = block.panels.start * strips_per_panel::<S>();
    while strip + NS <= end {
        tile::<S, C, MR, NS>(s, block, row, strip);
        strip += NS;
    }
    while strip < end {
        tile::<S, C, MR, 1>(s, block, row, strip);
        strip += 1;
    }
}

/// One register tile and its epilogue.
#[inline(always)]
fn tile<S: Simd, C: Cell, const MR: usize, const NS: usize>(
    s: S,
    block: &Block<'_, C>,
    row: usize,
    strip: usize,
) {
    let Product { x, panels, size, .. } = *block.product;
    let k_cells = n_cells::<C>(size.n_in);
    let mut b: [&[C]; NS] = [&[]; NS];
    for (i, b) in b.iter_mut().enumerate() {
        let (panel, part) = ((strip + i) / strips_per_panel::<S>(), (strip + i) % strips_per_panel::<S>());
        *b = panels.get(panel * k_cells * PANEL + part * strip_width::<S>()..).unwrap_or(&[]);
    }
    let mut sums = zero_sums::<S, MR, NS>(s);
    multiply(s, Rows { cells: x, stride: k_cells }.from(row, 0), b, k_cells, &mut sums);
    for (r, strips) in sums.into_iter().enumerate() {
        for (i, vectors) in strips.into_iter().enumerate() {
            for (v, sum) in vectors.into_iter().enumerate() {
                let column = (strip + i) * strip_width::<S>() + v * S::LANES;
                if column < size.n_out {
                    finish(s, block, (row + r, column), sum);
                }
            }
        }
    }
}

/// Bias, activation, residual, and the way to memory, of one register of sums.
#[inline(always)]
fn finish<S: Simd, C: Cell>(s: S, block: &Block<'_, C>, (row, column): (usize, usize), sum: S::V) {
    let (n_out, epilogue) = (block.product.size.n_out, &block.product.epilogue);
    let place = row * n_out + column..row * n_out + n_out.min(column + S::LANES);
    let mut y = sum;
    if let Some(bias) = epilogue.bias {
        y = s.add(y, s.load(&bias[column..]));
    }
    y = activate(s, epilogue.act, y);
    if let Some(residual) = epilogue.residual {
        y = s.add(y, s.load_or(&residual[place.clone()], 0.0));
    }
    // SAFETY: rows and panels of a block are its task's own, and this is the only place that writes them.
    let out = unsafe { block.out.slice(place) };
    s.store_some(out, y);
}
