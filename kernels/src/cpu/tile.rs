//! The register tile: the one place where values are multiplied and summed, in GEMM and attention alike.
//!
//! A tile is `MR` rows by `NS` *strips*, a strip being two registers of columns of a panel. Every sum runs over
//! `k` from first to last with one multiply-add a step, whatever `MR` and `NS` are: that is why a row has
//! the same bits alone and in a batch.

use super::cell::{PANEL, Word};
use super::simd::Simd;

/// Registers of columns in a strip.
const STRIP_VECTORS: usize = 2;

/// Steps of a panel that [`stream`] asks for ahead of use: 2 KB, and more where a step of a strip is half as long.
const fn ahead<S: Simd>() -> usize {
    if strips_per_panel::<S>() > 1 { 48 } else { 16 }
}

/// Sums of a tile: `[row][strip][register]`.
pub(super) type Sums<V, const MR: usize, const NS: usize> = [[[V; STRIP_VECTORS]; NS]; MR];

/// Columns of a strip; divides a panel.
pub(super) const fn strip_width<S: Simd>() -> usize {
    S::LANES * STRIP_VECTORS
}

/// Strips of a panel.
pub(super) const fn strips_per_panel<S: Simd>() -> usize {
    PANEL / strip_width::<S>()
}

/// The heights that tiles are compiled for, tallest first; a set uses those up to [`Simd::ROWS`].
const HEIGHTS: [usize; 6] = [14, 8, 6, 4, 2, 1];

/// Rows of the next tile when `left` rows are left, at least one. Eight are two tiles of four where eight are too many
/// for one: after one of six, the sums of two rows are too few to hide the latency of one.
#[inline(always)]
pub(super) fn height<S: Simd>(left: usize) -> usize {
    if S::ROWS < 8 && left == 8 {
        return 4;
    }
    let fits = |h: &usize| *h <= left && *h <= S::ROWS;
    HEIGHTS.into_iter().find(fits).unwrap_or(1)
}

/// Calls `$function::<…, MR, NS>($args)` for the height of a tile: the lower it is, the more strips at a time,
/// so that there are always sums enough to hide the latency of one.
macro_rules! for_height {
    ($height:expr, <$S:ident $(, $T:ident)+>, $function:ident($($arg:expr),*)) => {
        match $height {
            14 if $S::ROWS >= 14 => $function::<$S, $($T,)+ 14, 1>($($arg),*),
            8 if $S::ROWS >= 8 => $function::<$S, $($T,)+ 8, 1>($($arg),*),
            6 => $function::<$S, $($T,)+ 6, 1>($($arg),*),
            4 => $function::<$S, $($T,)+ 4, 1>($($arg),*),
            2 => $function::<$S, $($T,)+ 2, 2>($($arg),*),
            _ => $function::<$S, $($T,)+ 1, 4>($($arg),*),
        }
    };
}
pub(super) use for_height;

/// Rows of cells, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a, C> {
    /// The cells, from the first of the first row.
    pub(super) cells: &'a [C],
    /// Cells from a row to the next.
    pub(super) stride: usize,
}

impl<'a, C> Rows<'a, C> {
    /// From row `row`, cell `cell` on.
    #[inline(always)]
    pub(super) fn from(self, row: usize, cell: usize) -> Self {
        Self { cells: &self.cells[row * self.stride + cell..], stride: self.stride }
    }
}

/// Zero sums, of any cell.
#[inline(always)]
pub(super) fn zero_sums<S: Simd, const MR: usize, const NS: usize>(s: S) -> Sums<S::V, MR, NS> {
    [[[s.splat(0.0); STRIP_VECTORS]; NS]; MR]
}

/// `sums[row][strip] += Σ a[row][k] · b[strip][k]` over `k_cells` cells. `b[strip]` starts at the strip's first
/// column in a panel, `[k_cells][32]`.
///
/// # Panics
/// If `a` or `b` is shorter than that.
#[inline(always)]
pub(super) fn multiply<S: Simd, C: Word, const MR: usize, const NS: usize>(
    s: S,
    a: Rows<'_, C>,
    b: [&[C]; NS],
    k_cells: usize,
    sums: &mut Sums<S::V, MR, NS>,
) {
    multiply_checked::<S, C, MR, NS, false>(s, a, b, k_cells, sums);
}

/// The same over panels that are read once from memory, one after another: a low tile asks for cells ahead.
#[inline(always)]
pub(super) fn multiply_stream<S: Simd, C: Word, const MR: usize, const NS: usize>(
    s: S,
    a: Rows<'_, C>,
    b: [&[C]; NS],
    k_cells: usize,
    sums: &mut Sums<S::V, MR, NS>,
) {
    multiply_checked::<S, C, MR, NS, true>(s, a, b, k_cells, sums);
}

/// Both.
#[inline(always)]
fn multiply_checked<S: Simd, C: Word, const MR: usize, const NS: usize, const STREAM: bool>(
    s: S,
    a: Rows<'_, C>,
    b: [&[C]; NS],
    k_cells: usize,
    sums: &mut Sums<S::V, MR, NS>,
) {
    if k_cells == 0 {
        return;
    }
    assert!(a.cells.len() >= (MR - 1) * a.stride + k_cells, "rows of a tile lie in its left operand");
    for strip in b {
        assert!(strip.len() >= (k_cells - 1) * PANEL + strip_width::<S>(), "a strip lies in its panel");
    }
    // SAFETY: the two asserts above are the two obligations.
    unsafe {
        let b = b.map(<[C]>::as_ptr);
        multiply_unchecked::<S, C, MR, NS, STREAM>(s, (a.cells.as_ptr(), a.stride), b, k_cells, sums);
    }
}

/// Asks for the cells of strips that a low tile will need soon. A tile of many rows computes for so long that the
/// machine's own prefetching keeps up; a low one is as fast as memory, and that stops at the end of every page.
#[inline(always)]
fn stream<S: Simd, C: Word, const MR: usize, const NS: usize>(s: S, b: [*const C; NS], k: usize) {
    if MR > 8 {
        return;
    }
    for strip in b {
        for line in 0..strip_width::<S>().div_ceil(LINE_CELLS) {
            s.prefetch(strip.wrapping_add((k + ahead::<S>()) * PANEL + line * LINE_CELLS).cast());
        }
    }
}

/// Cells of a cache line.
const LINE_CELLS: usize = 16;

/// [`multiply`] over pointers.
///
/// # Safety
/// `a = (first, stride)` must be valid for reading `k_cells` cells at each of `MR` rows; each pointer of `b`
/// for a strip's width of cells at each of `k_cells` steps of 32 cells.
#[expect(
    clippy::needless_range_loop,
    reason = "rows, strips and registers index two arrays and a pointer each"
)]
#[inline(always)]
unsafe fn multiply_unchecked<S: Simd, C: Word, const MR: usize, const NS: usize, const STREAM: bool>(
    s: S,
    (first, stride): (*const C, usize),
    b: [*const C; NS],
    k_cells: usize,
    sums: &mut Sums<S::V, MR, NS>,
) {
    // A local copy, so that the sums live in registers.
    let mut local = *sums;
    for k in 0..k_cells {
        if STREAM {
            stream::<S, C, MR, NS>(s, b, k);
        }
        let mut columns = [[s.splat(0.0); STRIP_VECTORS]; NS];
        for strip in 0..NS {
            for v in 0..STRIP_VECTORS {
                // SAFETY: step k, register v of a strip is inside it.
                let from = unsafe { b[strip].add(k * PANEL + v * S::LANES) };
                // SAFETY: the caller's promise for b; a cell is four bytes of any bits.
                columns[strip][v] = unsafe { s.load_ptr(from.cast()) };
            }
        }
        for row in 0..MR {
            // SAFETY: row < MR and k < k_cells, so the cell is one the caller promised.
            let at = unsafe { first.add(row * stride + k) };
            // SAFETY: as above.
            let cell = unsafe { at.read() };
            for strip in 0..NS {
                for v in 0..STRIP_VECTORS {
                    local[row][strip][v] = cell.multiply_add(s, columns[strip][v], local[row][strip][v]);
                }
            }
        }
    }
    *sums = local;
}
