//! The product of rows and panels, for cells of any kind.
//!
//! It is cut into tasks of some rows by some panels; a task's panels stay in the L2 cache while its rows
//! pass. A register tile of sums becomes values ([`Units`]), and bias, activation and residual are applied while
//! it is in registers.

use std::ops::Range;

use crate::cpu::cell::{Math, PANEL, n_cells};
use crate::cpu::context::Context;
use crate::cpu::math::activate;
use crate::cpu::pool::Shared;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{Rows, for_tile, height, multiply, strip_width, strips, strips_per_panel, zero_sums};
use crate::ops::Activation;

/// Fifths of the L2 cache that the panels of a task take: less than half, since rows pass through it too.
const GROUP_FIFTHS: usize = 2;

/// Rows of a task, about: eight of the tallest register tiles.
const TASK_ROWS: usize = 112;

/// Steps of `k` that all rows of a task pass before the next ones: half of a first cache of 32 KiB holds those of a strip.
const fn block_cells<S: Simd>() -> usize {
    128 * strips_per_panel::<S>()
}

/// Steps of `k` from which on a strip as wide as a panel is passed block by block too: so many of a task's rows, with the
/// panel, are more than the L2 cache holds.
const LONG_CELLS: usize = 1024;

/// Height from which on a tile takes long enough to fetch its residual meanwhile.
const FETCHING_ROWS: usize = 14;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows so many bytes apart have their lines in one set of a first cache, which holds 8 or 12: fewer than a tile has rows.
const SAME_SETS: usize = 4096;

/// Cells from a row to the next, of rows of `k_cells` that are laid for a product: a line more where rows would be in each
/// other's way.
pub(crate) fn stride<C>(k_cells: usize) -> usize {
    let in_the_way = k_cells > 0 && (k_cells * size_of::<C>()).is_multiple_of(SAME_SETS);
    k_cells + if in_the_way { LINE / size_of::<C>() } else { 0 }
}

/// Conversion of sums to values.
pub(super) trait Units: Copy + Sync {
    /// The row's share of the conversion.
    type Row: Copy;
    /// The share of a register of columns.
    type Columns<V: Copy>: Copy;
    /// The share of row `row`.
    fn row(self, row: usize) -> Self::Row;
    /// The share of a register from `column` on, a multiple of the lanes.
    fn columns<S: Simd>(self, s: S, column: usize) -> Self::Columns<S::V>;
    /// The values of a register of sums.
    fn values<S: Simd>(s: S, row: Self::Row, columns: Self::Columns<S::V>, sums: S::V) -> S::V;
}

/// Sums that are values.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Units for Plain {
    type Row = ();
    type Columns<V: Copy> = ();

    #[inline(always)]
    fn row(self, _row: usize) {}

    #[inline(always)]
    fn columns<S: Simd>(self, _s: S, _column: usize) {}

    #[inline(always)]
    fn values<S: Simd>(_s: S, (): (), (): (), sums: S::V) -> S::V {
        sums
    }
}

/// Arguments of a product beside its operands.
#[derive(Clone, Copy)]
pub(super) struct ProductArgs<'a> {
    pub(super) size: Size,
    pub(super) epilogue: Epilogue<'a>,
}

/// Operations after the sums.
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
pub(super) struct Product<'a, M: Math, U> {
    /// `[n_tokens]`, each with `k_cells`.
    pub(super) x: Rows<'a, M::Row>,
    /// `[n_panels][k_cells][32]`.
    pub(super) panels: &'a [M::Word],
    pub(super) size: Size,
    pub(super) units: U,
    pub(super) epilogue: Epilogue<'a>,
}

impl<M: Math, U: Units> Product<'_, M, U> {
    /// Computes it, `out: [n_tokens, n_out]`.
    pub(super) fn run(&self, context: &Context, out: &mut [f32]) {
        let out = &Shared::new(out);
        let output =
            Output { n_out: self.size.n_out, units: self.units, epilogue: self.epilogue, values: out };
        in_tasks(context, self.size, n_cells::<M::Word>(self.size.n_in), |rows, panels| {
            M::run(context.isa, Block { product: self, rows, panels, output });
        });
    }
}

/// Cuts a product into tasks of some rows by some panels, `n_words` to an output, and runs them.
pub(super) fn in_tasks(
    context: &Context,
    size: Size,
    n_words: usize,
    task: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let Size { n_tokens, n_out, .. } = size;
    if n_tokens == 0 || n_out == 0 {
        return;
    }
    let (rows, panels) = task_size(context, size, n_words);
    let n_panels = n_out.div_ceil(PANEL);
    let n_runs = n_tokens.div_ceil(rows);
    // A multiply-add takes about 1/50 ns, a word from memory about 1/8 ns.
    let n_words = n_words * n_out;
    let cost_ns = (n_tokens * n_words / 50).max(n_words / 8);
    context.pool.run(n_runs * n_panels.div_ceil(panels), cost_ns, |i| {
        let (group, run) = (i / n_runs, i % n_runs);
        let rows = run * rows..n_tokens.min((run + 1) * rows);
        task(rows, group * panels..n_panels.min((group + 1) * panels));
    });
}

/// Rows and panels of a task.
fn task_size(context: &Context, size: Size, n_words: usize) -> (usize, usize) {
    let (tile, n_threads) = (context.isa.tile_rows(), context.pool.n_threads());
    let n_runs = size.n_tokens.div_ceil(TASK_ROWS / tile * tile);
    let rows = size.n_tokens.div_ceil(n_runs).next_multiple_of(tile);
    let panel_bytes = n_words.max(1) * PANEL * size_of::<u32>();
    let n_panels = size.n_out.div_ceil(PANEL);
    // Several tasks for each thread, so that one that was held up does not hold up all.
    let share = (n_panels * n_runs).div_ceil(4 * n_threads).next_multiple_of(4);
    (rows, (context.l2_bytes / 5 * GROUP_FIFTHS / panel_bytes).clamp(1, share.max(1)))
}

/// Destination of sums, and the operations on the way to it.
#[derive(Clone, Copy)]
pub(super) struct Output<'a, U> {
    pub(super) n_out: usize,
    pub(super) units: U,
    pub(super) epilogue: Epilogue<'a>,
    /// `[n_tokens, n_out]`.
    pub(super) values: &'a Shared<'a, f32>,
}

impl<U> Output<'_, U> {
    /// Asks for the residual of a tile: parts of rows that are as far apart do not come by themselves.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, (row, column): (usize, usize), height: usize) {
        let (Some(residual), FETCHING_ROWS..) = (self.epilogue.residual, height) else { return };
        for row in row..row + height {
            let place = row * self.n_out + column;
            s.prefetch_all(&residual[place..residual.len().min(place + strip_width::<S>())]);
        }
    }
}

/// Sums of a register tile in memory.
#[derive(Clone, Copy)]
pub(super) struct TileSums<'a> {
    /// `[n_rows, stride]`, of which each row begins with the tile's columns: f32, or the bits of i32.
    pub(super) sums: &'a [f32],
    pub(super) stride: usize,
    pub(super) n_rows: usize,
    /// Strips of columns.
    pub(super) n_strips: usize,
}

/// Operations after the sums of a tile: bias, activation, residual, and the store to the result.
pub(super) struct Finish<'a, U> {
    pub(super) output: Output<'a, U>,
    /// First row and column of the tile: they are of the caller's task, the columns at least one.
    pub(super) place: (usize, usize),
    pub(super) tile: TileSums<'a>,
}

impl<U: Units> Kernel for Finish<'_, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_columns = (self.output.n_out - self.place.1).min(self.tile.n_strips * strip_width::<S>());
        for first in (0..n_columns).step_by(S::LANES) {
            // What is the same for all rows is known to the loop over them: whether a register is whole, and whether sums are
            // activated.
            match (self.output.epilogue.act, (n_columns - first).min(S::LANES)) {
                (Activation::None, n_lanes) if n_lanes == S::LANES => {
                    self.rows(s, (first, S::LANES), |y| y);
                }
                (act, n_lanes) if n_lanes == S::LANES => {
                    self.rows(s, (first, S::LANES), |y| activate(s, act, y));
                }
                (act, n_lanes) => self.rows(s, (first, n_lanes), |y| activate(s, act, y)),
            }
        }
    }
}

impl<U: Units> Finish<'_, U> {
    /// Finishes `n_lanes` columns from `first` of the tile on, of all its rows.
    #[inline(always)]
    fn rows<S: Simd>(&self, s: S, (first, n_lanes): (usize, usize), activate: impl Fn(S::V) -> S::V) {
        let Self { output: Output { n_out, units, epilogue, values }, place: (row, column), tile } = *self;
        let column = column + first;
        let columns = units.columns(s, column);
        let biases = epilogue.bias.map(|bias| s.load(&bias[column..]));
        for r in 0..tile.n_rows {
            let sums = s.load(&tile.sums[r * tile.stride + first..]);
            let mut y = U::values(s, units.row(row + r), columns, sums);
            if let Some(biases) = biases {
                y = s.add(y, biases);
            }
            y = activate(y);
            let place = (row + r) * n_out + column;
            let place = place..place + n_lanes;
            if let Some(residual) = epilogue.residual {
                y = s.add(y, s.load_or(&residual[place.clone()], 0.0));
            }
            // SAFETY: rows and panels of a task are its own, and this is the only place that writes them.
            s.store_some(unsafe { values.slice(place) }, y);
        }
    }
}

/// A register tile over some steps of `k`.
pub(super) struct Multiply<'a, M: Math, const MR: usize, const NS: usize> {
    /// From the first row and step on.
    pub(super) a: Rows<'a, M::Row>,
    /// From the first step of each strip on.
    pub(super) b: [&'a [M::Word]; NS],
    pub(super) k_cells: usize,
    /// `true` if strips come from memory.
    pub(super) streams: bool,
    /// `true` if the sums are of earlier steps, to be added to.
    pub(super) is_begun: bool,
    /// `MR` rows of `NS` strips, and columns from a row to the next.
    pub(super) sums: (&'a mut [f32], usize),
}

impl<M: Math, const MR: usize, const NS: usize> Kernel for Multiply<'_, M, MR, NS> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (to, stride) = self.sums;
        let mut sums = zero_sums::<S, MR, NS>(s);
        if self.is_begun {
            for (r, strips) in sums.iter_mut().enumerate() {
                let row = &to[r * stride..][..NS * strip_width::<S>()];
                for (i, sum) in strips.as_flattened_mut().iter_mut().enumerate() {
                    *sum = s.load(&row[i * S::LANES..]);
                }
            }
        }
        multiply::<S, M, MR, NS>(s, self.a, (self.b, self.k_cells, self.streams), &mut sums);
        for (r, strips) in sums.iter().enumerate() {
            let row = &mut to[r * stride..][..NS * strip_width::<S>()];
            for (i, sum) in strips.as_flattened().iter().enumerate() {
                s.store(&mut row[i * S::LANES..], *sum);
            }
        }
    }
}

/// Sums of the largest tile of any set, in whole cache lines.
#[repr(align(64))]
pub(super) struct TileBuffer(pub(super) [f32; 14 * PANEL]);

impl TileBuffer {
    /// Zeros.
    pub(super) fn new() -> Self {
        Self([0.0; 14 * PANEL])
    }
}

/// Some rows by some panels of a product.
struct Block<'a, M: Math, U> {
    product: &'a Product<'a, M, U>,
    rows: Range<usize>,
    panels: Range<usize>,
    output: Output<'a, U>,
}

impl<M: Math, U: Units> Kernel for Block<'_, M, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k_cells = n_cells::<M::Word>(self.product.size.n_in);
        let is_long = strips_per_panel::<S>() > 1 && k_cells > 0 || k_cells >= LONG_CELLS;
        if is_long && self.rows.len() > S::ROWS {
            return blocked(s, &self);
        }
        let mut sums = TileBuffer::new();
        let mut row = self.rows.start;
        while row < self.rows.end {
            let height = height::<S>(self.rows.end - row);
            row_of_tiles(s, &self, (row, height), &mut sums.0);
            row += height;
        }
    }
}

/// A panel and a stretch of `k` in a block.
#[derive(Clone, Copy)]
struct Stretch {
    panel: usize,
    first_cell: usize,
    n_cells: usize,
    /// `true` for the last stretch.
    is_last: bool,
}

/// A block strip by strip, all of its rows over a stretch of `k` before the next stretch: the strip's cells stay in the
/// first cache meanwhile (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). Sums wait in
/// memory between stretches, so each still runs over `k` from first to last.
#[inline(always)]
fn blocked<S: Simd, M: Math, U: Units>(s: S, block: &Block<'_, M, U>) {
    let k_cells = n_cells::<M::Word>(block.product.size.n_in);
    let mut waiting = vec![0.0; block.rows.len() * PANEL];
    for panel in block.panels.clone() {
        for first_cell in (0..k_cells).step_by(block_cells::<S>()) {
            let n_cells = (k_cells - first_cell).min(block_cells::<S>());
            let stretch = Stretch { panel, first_cell, n_cells, is_last: first_cell + n_cells == k_cells };
            all_rows(s, block, &mut waiting, stretch);
        }
    }
}

/// All rows of a block over a stretch of a panel.
#[inline(always)]
fn all_rows<S: Simd, M: Math, U: Units>(
    s: S,
    block: &Block<'_, M, U>,
    waiting: &mut [f32],
    stretch: Stretch,
) {
    let Product { x, panels, size, .. } = *block.product;
    let cells = &panels[(stretch.panel * n_cells::<M::Word>(size.n_in) + stretch.first_cell) * PANEL..];
    let columns = size.n_out - stretch.panel * PANEL;
    let n_strips = columns.div_ceil(strip_width::<S>()).min(strips_per_panel::<S>());
    for strip in 0..n_strips {
        let column = strip * strip_width::<S>();
        let cells = &cells[column..];
        let mut row = block.rows.start;
        while row < block.rows.end {
            let height = height::<S>(block.rows.end - row);
            let sums = &mut waiting[(row - block.rows.start) * PANEL + column..];
            let place = (row, stretch.panel * PANEL + column);
            if stretch.is_last {
                block.output.fetch(s, place, height);
            }
            for_tile!(S, (height, 1), |MR, NS| s.call(Multiply::<M, MR, NS> {
                a: x.from(row, stretch.first_cell),
                b: [cells; NS],
                k_cells: stretch.n_cells,
                // The first rows bring the strip from memory, the others find it.
                streams: row == block.rows.start,
                is_begun: stretch.first_cell > 0,
                sums: (&mut *sums, PANEL),
            }));
            if stretch.is_last {
                let tile = TileSums { sums, stride: PANEL, n_rows: height, n_strips: 1 };
                s.call(Finish { output: block.output, place, tile });
            }
            row += height;
        }
    }
}

/// Some rows, as many as a tile has, by all panels of a block.
#[inline(always)]
fn row_of_tiles<S: Simd, M: Math, U: Units>(
    s: S,
    block: &Block<'_, M, U>,
    (row, height): (usize, usize),
    sums: &mut [f32; 14 * PANEL],
) {
    let Product { x, panels, size, .. } = *block.product;
    let k_cells = n_cells::<M::Word>(size.n_in);
    let used = size.n_out.div_ceil(strip_width::<S>());
    let end = used.min(block.panels.end * strips_per_panel::<S>());
    let mut strip = block.panels.start * strips_per_panel::<S>();
    while strip < end {
        let n_strips = strips(height, end - strip);
        let stride = n_strips * strip_width::<S>();
        let place = (row, strip * strip_width::<S>());
        block.output.fetch(s, place, height);
        for_tile!(S, (height, n_strips), |MR, NS| {
            let mut b: [&[M::Word]; NS] = [&[]; NS];
            for (i, b) in b.iter_mut().enumerate() {
                let (panel, part) =
                    ((strip + i) / strips_per_panel::<S>(), (strip + i) % strips_per_panel::<S>());
                *b = panels.get(panel * k_cells * PANEL + part * strip_width::<S>()..).unwrap_or(&[]);
            }
            s.call(Multiply::<M, MR, NS> {
                a: x.from(row, 0),
                b,
                k_cells,
                streams: true,
                is_begun: false,
                sums: (sums.as_mut_slice(), stride),
            });
        });
        let tile = TileSums { sums, stride, n_rows: height, n_strips };
        s.call(Finish { output: block.output, place, tile });
        strip += n_strips;
    }
}
