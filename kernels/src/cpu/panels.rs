//! Zeroed cells that start on a cache line, so that a register of them never straddles two, and how rows come into them.

use super::cell::{PANEL, Word};
use super::pool::Pool;
use crate::stored::Stacked;

/// Bytes of a cache line, and of the widest register.
const LINE: usize = 64;

/// Bytes from which on memory is asked for in large pages: two of them.
const LARGE: usize = 4 << 20;

/// Aligned cells.
#[derive(Debug)]
pub(super) struct Panels<C> {
    /// Longer than needed by up to a line.
    storage: Vec<C>,
    /// The first cell on a line. The storage is never grown, so it stays one.
    start: usize,
    len: usize,
}

impl<C: Word> Panels<C> {
    /// Zeros. `len` cells must be addressable, which the caller checked.
    pub(super) fn zeros(len: usize) -> Self {
        let slack = LINE / size_of::<C>();
        let storage = vec![C::default(); len + slack];
        let start = storage.as_ptr().align_offset(LINE).min(slack);
        if storage.len() * size_of::<C>() >= LARGE {
            advise_large_pages(&storage);
        }
        Self { storage, start, len }
    }

    /// The cells.
    pub(super) fn cells(&self) -> &[C] {
        &self.storage[self.start..][..self.len]
    }

    /// The cells, to write.
    pub(super) fn cells_mut(&mut self) -> &mut [C] {
        &mut self.storage[self.start..][..self.len]
    }

    /// The words of an output of a weight of which each takes `k_cells`.
    pub(super) fn output(&self, out: usize, k_cells: usize) -> impl Iterator<Item = C> {
        let panel = &self.cells()[out / PANEL * k_cells * PANEL..][..k_cells * PANEL];
        panel[out % PANEL..].iter().step_by(PANEL).copied()
    }

    /// Zeros for a weight of which an output takes `k_cells`.
    pub(super) fn blank(stacked: &Stacked<'_>, k_cells: usize) -> Self {
        Self::zeros(stacked.n_out.div_ceil(PANEL) * k_cells * PANEL)
    }
}

/// Steps of a row that are moved at a time: a cache line, and as many lines of a panel as the first cache holds.
const MOVED: usize = LINE / size_of::<u32>();

/// Lays rows of words side by side into the first columns of a panel: `[n][k_cells]` to `[k_cells][32]`.
#[inline(always)]
pub(super) fn lay<C: Word>(rows: &[C], k_cells: usize, panel: &mut [C]) {
    for first in (0..k_cells).step_by(MOVED) {
        let lines = &mut panel[first * PANEL..k_cells.min(first + MOVED) * PANEL];
        for (column, row) in rows.chunks_exact(k_cells).enumerate() {
            for (line, word) in lines.chunks_exact_mut(PANEL).zip(&row[first..]) {
                line[column] = *word;
            }
        }
    }
}

/// The bytes of words, to write.
pub(super) fn bytes_mut<C: Word>(words: &mut [C]) -> &mut [u8] {
    let len = size_of_val(words);
    // SAFETY: words are plain values of four bytes, of which any bits are one; the slice is borrowed as long as its bytes.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

/// Packs a weight into blank `[n_panels][k_cells][32]`; `fill` makes the `k_cells` words of an output of its values.
pub(super) fn pack<C: Word>(
    panels: &mut Panels<C>,
    pool: &Pool,
    stacked: &Stacked<'_>,
    k_cells: usize,
    fill: impl Fn(usize, &[f32], &mut [C]) + Sync,
) {
    let Stacked { n_in, n_out, .. } = *stacked;
    pool.rows(panels.cells_mut(), k_cells * PANEL, n_in * PANEL, |first, panels: &mut [C]| {
        let (mut values, mut words) = (vec![0.0; n_in], vec![C::default(); k_cells * PANEL]);
        for (panel, cells) in (first..).zip(panels.chunks_exact_mut(k_cells * PANEL)) {
            let outputs = panel * PANEL..n_out.min((panel + 1) * PANEL);
            let words = &mut words[..outputs.len() * k_cells];
            for (out, words) in outputs.zip(words.chunks_exact_mut(k_cells)) {
                stacked.row(out, &mut values);
                fill(out, &values, words);
            }
            lay(words, k_cells, cells);
        }
    });
}

/// Asks the system for large pages: a product or a step of decoding passes over hundreds of megabytes, and each small
/// page of them costs a fault when it is new and a walk through page tables later. Only a hint, so its failure is none.
pub(super) fn advise_large_pages<C>(storage: &[C]) {
    #[cfg(target_os = "linux")]
    {
        use rustix::mm::{Advice, madvise};
        let page = rustix::param::page_size();
        let bytes = std::mem::size_of_val(storage);
        let first = storage.as_ptr().cast::<u8>();
        let skip = first.align_offset(page);
        let Some(len) = bytes.checked_sub(skip).map(|len| len / page * page) else { return };
        let at = first.wrapping_add(skip).cast_mut().cast();
        // SAFETY: the pages lie wholly in memory that `storage` borrows, and the advice changes no byte of them.
        let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
    }
}
