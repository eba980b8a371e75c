//! Zeroed cells that start on a cache line, so that a register of them never straddles two.

use super::cell::Word;

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
}

/// Asks the system for large pages: a product or a step of decoding passes over hundreds of megabytes, and each small
/// page of them costs a walk through page tables. Only a hint, so its failure is none.
fn advise_large_pages<C>(storage: &[C]) {
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
