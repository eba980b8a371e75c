//! The register tile: the one place where values are multiplied and summed, in GEMM and attention alike.
//!
//! A tile is `MR` rows by `NS` *strips*, a strip being two registers of columns of a panel. Every sum runs over
//! `k` from first to last with the same multiply-adds, whatever `MR` and `NS` are: that is why a row has
//! the same bits alone and in a batch.

use super::cell::{Math, PANEL};
use super::simd::Simd;

/// Registers of columns in a strip.
pub(super) const STRIP_VECTORS: usize = 2;

/// Steps of a panel that [`stream`] asks for ahead of use: as many as take the time that memory takes. Those of several rows
/// are more than that apart, and go through panel after panel; a row or two go through several panels at a time, where what
/// lies far behind a panel's end is another of them: 2 KB, and more where a step of a strip is half as long.
const fn ahead<S: Simd, const MR: usize>() -> usize {
    match MR {
        4.. => 64,
        _ if strips_per_panel::<S>() > 1 => 48,
        _ => 16,
    }
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

/// `true` if a set has tiles of a height.
pub(super) const fn has_height<S: Simd>(height: usize) -> bool {
    let mut i = 0;
    while i < S::HEIGHTS.len() {
        if S::HEIGHTS[i] == height {
            return true;
        }
        i += 1;
    }
    false
}

/// Rows of the next tile when `left` rows are left, at least one. Eight are two tiles of four where eight are too many
/// for one: after one of six, the sums of two rows are too few to hide the latency of one.
#[inline(always)]
pub(super) fn height<S: Simd>(left: usize) -> usize {
    if S::ROWS < 8 && has_height::<S>(4) && left == 8 {
        return 4;
    }
    S::HEIGHTS.iter().copied().find(|height| *height <= left).unwrap_or(1)
}

/// Strips at a time of a tile of a height, at most: the lower it is, the more, so that there are always sums enough to
/// hide the latency of one.
const fn most_strips(height: usize) -> usize {
    match height {
        1 => 4,
        2 => 2,
        _ => 1,
    }
}

/// Strips of the next tile of a height when `left` strips are left, at least one.
#[inline(always)]
pub(super) fn strips(height: usize, left: usize) -> usize {
    let most = most_strips(height);
    if left >= most { most } else { 1 << left.ilog2() }
}

/// Evaluates an expression with constants `MR` and `NS` for the height of a tile, one of [`height`]'s, and its
/// [`strips`], with `low` for heights up to 6. Nothing is compiled for heights that the set has not.
macro_rules! for_tile {
    ($S:ident, ($height:expr, $strips:expr), |$MR:ident, $NS:ident| $body:expr) => {
        $crate::cpu::tile::for_tile! { @arms $S, ($height, $strips), $MR, $NS, $body,
            (14, 1) (8, 1) (6, 1) (4, 1) (2, 2) (2, 1) (1, 4) (1, 2) }
    };
    (low $S:ident, ($height:expr, $strips:expr), |$MR:ident, $NS:ident| $body:expr) => {
        $crate::cpu::tile::for_tile! { @arms $S, ($height, $strips), $MR, $NS, $body,
            (6, 1) (4, 1) (2, 2) (2, 1) (1, 4) (1, 2) }
    };
    (@arms $S:ident, $tile:expr, $MR:ident, $NS:ident, $body:expr, $(($rows:literal, $n:literal))+) => {
        match $tile {
            $(($rows, $n) if const { $crate::cpu::tile::has_height::<$S>($rows) } => {
                const $MR: usize = $rows;
                const $NS: usize = $n;
                $body
            })+
            _ => {
                const $MR: usize = 1;
                const $NS: usize = 1;
                $body
            }
        }
    };
}
pub(super) use for_tile;

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
/// column in a panel, `[k_cells][32]`. `streams` says that panels are read once from memory, one after another: a low tile
/// asks for cells ahead.
///
/// # Panics
/// If `a` or `b` is shorter than that.
#[inline(always)]
pub(super) fn multiply<S: Simd, M: Math, const MR: usize, const NS: usize>(
    s: S,
    a: Rows<'_, M::Row>,
    (b, k_cells, streams): ([&[M::Word]; NS], usize, bool),
    sums: &mut Sums<S::V, MR, NS>,
) {
    // A local copy, so that the sums live in registers.
    let mut local = *sums;
    add_steps::<S, M, MR, NS>(s, a, (b, k_cells, streams), &mut local);
    *sums = local;
}

/// [`multiply`] over panel after panel, each with its steps, while the sums stay in their registers: `a` goes on from one to
/// the next.
///
/// # Panics
/// As [`multiply`].
#[inline(always)]
pub(super) fn multiply_panels<'a, S: Simd, M: Math, const MR: usize, const NS: usize>(
    s: S,
    a: Rows<'_, M::Row>,
    panels: impl Iterator<Item = ([&'a [M::Word]; NS], usize)>,
    sums: &mut Sums<S::V, MR, NS>,
) {
    let mut local = *sums;
    let mut first = 0;
    for (b, k_cells) in panels {
        add_steps::<S, M, MR, NS>(s, a.from(0, first), (b, k_cells, false), &mut local);
        first += k_cells;
    }
    *sums = local;
}

/// The steps of one panel, added to sums that are local to the caller.
#[inline(always)]
fn add_steps<S: Simd, M: Math, const MR: usize, const NS: usize>(
    s: S,
    a: Rows<'_, M::Row>,
    (b, k_cells, streams): ([&[M::Word]; NS], usize, bool),
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
        let b = b.map(<[M::Word]>::as_ptr);
        add_unchecked::<S, M, MR, NS>(s, (a.cells.as_ptr(), a.stride), (b, k_cells, streams), sums);
    }
}

/// Asks for the cells of strips that a low tile will need soon. A tile of many rows computes for so long that the
/// machine's own prefetching keeps up; a low one is as fast as memory, and that stops at the end of every page.
#[inline(always)]
fn stream<S: Simd, M: Math, const MR: usize, const NS: usize>(s: S, b: [*const M::Word; NS], k: usize) {
    if MR > 8 {
        return;
    }
    for strip in b {
        for line in 0..strip_width::<S>().div_ceil(LINE_CELLS) {
            s.prefetch(strip.wrapping_add((k + ahead::<S, MR>()) * PANEL + line * LINE_CELLS).cast());
        }
    }
}

/// Cells of a cache line.
const LINE_CELLS: usize = 16;

/// [`add_steps`] over pointers.
///
/// # Safety
/// `a = (first, stride)` must be valid for reading `k_cells` values at each of `MR` rows; each pointer of `b`
/// for a strip's width of cells at each of `k_cells` steps of 32 cells.
#[expect(
    clippy::needless_range_loop,
    reason = "rows, strips and registers index two arrays and a pointer each"
)]
#[inline(always)]
unsafe fn add_unchecked<S: Simd, M: Math, const MR: usize, const NS: usize>(
    s: S,
    (first, stride): (*const M::Row, usize),
    (b, k_cells, streams): ([*const M::Word; NS], usize, bool),
    sums: &mut Sums<S::V, MR, NS>,
) {
    for k in 0..k_cells {
        if streams {
            stream::<S, M, MR, NS>(s, b, k);
        }
        let mut words = [[s.splat(0.0); STRIP_VECTORS]; NS];
        for strip in 0..NS {
            for v in 0..STRIP_VECTORS {
                // SAFETY: step k, register v of a strip is inside it.
                let from = unsafe { b[strip].add(k * PANEL + v * S::LANES) };
                // SAFETY: the caller's obligation for b; a word is four bytes of any bits.
                words[strip][v] = unsafe { s.load_ptr(from.cast()) };
            }
        }
        let a = first.wrapping_add(k);
        // SAFETY: k < k_cells, so the values are those that the caller guaranteed.
        unsafe { add_part::<S, M, MR, NS, 0>(s, (a, stride), &words, sums) };
        if M::PARTS > 1 {
            // SAFETY: as above.
            unsafe { add_part::<S, M, MR, NS, 1>(s, (a, stride), &words, sums) };
        }
        if M::PARTS > 2 {
            // SAFETY: as above.
            unsafe { add_part::<S, M, MR, NS, 2>(s, (a, stride), &words, sums) };
            // SAFETY: as above.
            unsafe { add_part::<S, M, MR, NS, 3>(s, (a, stride), &words, sums) };
        }
    }
}

/// One multiply-add of each word with each row: part by part for all rows takes fewer registers at a time than all parts
/// of each row, and a part that is known to the compiler costs no choice.
///
/// # Safety
/// `a = (first, stride)` must be valid for reading a value at each of `MR` rows.
#[expect(
    clippy::needless_range_loop,
    reason = "rows, strips and registers index two arrays and a pointer each"
)]
#[inline(always)]
unsafe fn add_part<S: Simd, M: Math, const MR: usize, const NS: usize, const PART: usize>(
    s: S,
    (first, stride): (*const M::Row, usize),
    words: &[[S::V; STRIP_VECTORS]; NS],
    sums: &mut Sums<S::V, MR, NS>,
) {
    let mut columns = *words;
    for strip in 0..NS {
        for v in 0..STRIP_VECTORS {
            columns[strip][v] = M::columns(s, words[strip][v], PART);
        }
    }
    for row in 0..MR {
        // SAFETY: row < MR, so the value is one the caller guaranteed.
        let at = unsafe { first.add(row * stride) };
        // SAFETY: as above.
        let value = unsafe { at.read() };
        for strip in 0..NS {
            for v in 0..STRIP_VECTORS {
                sums[row][strip][v] = M::multiply_add(s, value, PART, columns[strip][v], sums[row][strip][v]);
            }
        }
    }
}
