//! The product of rows and panels, for cells of any kind.
//!
//! It is cut into tasks of some rows by some panels; a task's panels stay in the second cache while its rows
//! pass. A register tile of sums becomes values ([`Units`]), and bias, activation and residual are applied while
//! it is in registers.

use std::ops::Range;

use crate::cpu::CpuBackend;
use crate::cpu::cell::{PANEL, Word, n_cells};
use crate::cpu::math::activate;
use crate::cpu::pool::Shared;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{Rows, for_height, height, multiply_stream, strip_width, strips_per_panel, zero_sums};
use crate::ops::Activation;

/// Fifths of the second cache that the panels of a task take: less than half, since rows pass through it too.
const GROUP_FIFTHS: usize = 2;

/// Register tiles, one under another, in a task's rows.
const TASK_TILES: usize = 8;

/// What a sum stands for.
pub(super) trait Units: Copy + Sync {
    /// The values of a register of sums of a row, from a column on, a multiple of the lanes.
    fn values<S: Simd>(self, s: S, place: (usize, usize), sums: S::V) -> S::V;
}

/// Sums that are values.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Units for Plain {
    #[inline(always)]
    fn values<S: Simd>(self, _s: S, _place: (usize, usize), sums: S::V) -> S::V {
        sums
    }
}

/// What follows the sums.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a> {
    /// `[n_panels · 32]`.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) act: Activation,
    /// `[n_tokens, n_out]`.
    pub(super) residual: Option<&'a [f32]>,
}

/// Sizes of a product.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) n_tokens: usize,
    pub(super) n_in: usize,
    pub(super) n_out: usize,
}

/// A product to compute.
pub(super) struct Product<'a, C, U> {
    /// `[n_tokens, k_cells]`.
    pub(super) x: &'a [C],
    /// `[n_panels][k_cells][32]`.
    pub(super) panels: &'a [C],
    pub(super) size: Size,
    pub(super) units: U,
    pub(super) epilogue: Epilogue<'a>,
}

impl<C: Word, U: Units> Product<'_, C, U> {
    /// Computes it, `out: [n_tokens, n_out]`.
    pub(super) fn run(&self, backend: &CpuBackend, out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        let Size { n_tokens, n_in, n_out } = self.size;
        let (rows, panels) = self.task_size(backend);
        let n_panels = n_out.div_ceil(PANEL);
        let n_runs = n_tokens.div_ceil(rows);
        // A multiply-add takes about 1/50 ns, a cell from memory about 1/8 ns.
        let n_cells = n_cells::<C>(n_in) * n_out;
        let cost_ns = (n_tokens * n_cells / 50).max(n_cells / 8);
        let out = &Shared::new(out);
        backend.pool.run(n_runs * n_panels.div_ceil(panels), cost_ns, |task| {
            let (group, run) = (task / n_runs, task % n_runs);
            let rows = run * rows..n_tokens.min((run + 1) * rows);
            let panels = group * panels..n_panels.min((group + 1) * panels);
            C::run(backend.isa, Block { product: self, rows, panels, out });
        });
    }

    /// Rows and panels of a task.
    fn task_size(&self, backend: &CpuBackend) -> (usize, usize) {
        let (tile, n_threads) = (backend.isa.tile_rows(), backend.pool.n_threads());
        let n_runs = self.size.n_tokens.div_ceil(TASK_TILES * tile);
        let rows = self.size.n_tokens.div_ceil(n_runs).next_multiple_of(tile);
        let panel_bytes = n_cells::<C>(self.size.n_in).max(1) * PANEL * size_of::<C>();
        let n_panels = self.size.n_out.div_ceil(PANEL);
        // Several tasks for each thread, so that one that was held up does not hold up all.
        let share = (n_panels * n_runs).div_ceil(4 * n_threads).next_multiple_of(4);
        (rows, (backend.l2 / 5 * GROUP_FIFTHS / panel_bytes).clamp(1, share.max(1)))
    }
}

/// Some rows by some panels of a product.
struct Block<'a, C, U> {
    product: &'a Product<'a, C, U>,
    rows: Range<usize>,
    panels: Range<usize>,
    /// `[n_tokens, n_out]`.
    out: &'a Shared<'a, f32>,
}

impl<C: Word, U: Units> Kernel for Block<'_, C, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let height = height::<S>(self.rows.end - row);
            for_height!(height, <S, C, U>, row_of_tiles(s, &self, row));
            row += height;
        }
    }
}

/// `MR` rows by all panels of a block, `NS` strips at a time while there are so many.
#[inline(always)]
fn row_of_tiles<S: Simd, C: Word, U: Units, const MR: usize, const NS: usize>(
    s: S,
    block: &Block<'_, C, U>,
    row: usize,
) {
    let used = block.product.size.n_out.div_ceil(strip_width::<S>());
    let end = used.min(block.panels.end * strips_per_panel::<S>());
    let mut strip = block.panels.start * strips_per_panel::<S>();
    while strip + NS <= end {
        tile::<S, C, U, MR, NS>(s, block, row, strip);
        strip += NS;
    }
    while strip < end {
        tile::<S, C, U, MR, 1>(s, block, row, strip);
        strip += 1;
    }
}

/// One register tile and its epilogue.
#[inline(always)]
fn tile<S: Simd, C: Word, U: Units, const MR: usize, const NS: usize>(
    s: S,
    block: &Block<'_, C, U>,
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
    multiply_stream(s, Rows { cells: x, stride: k_cells }.from(row, 0), b, k_cells, &mut sums);
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
fn finish<S: Simd, C: Word, U: Units>(
    s: S,
    block: &Block<'_, C, U>,
    (row, column): (usize, usize),
    sum: S::V,
) {
    let (n_out, epilogue) = (block.product.size.n_out, &block.product.epilogue);
    let place = row * n_out + column..row * n_out + n_out.min(column + S::LANES);
    let mut y = block.product.units.values(s, (row, column), sum);
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
