//! Zeroed cells that start on a cache line, so that a register of them never straddles two.

use super::cell::Cell;

/// Bytes of a cache line, and of the widest register.
const LINE: usize = 64;

/// Aligned cells.
#[derive(Debug)]
pub(super) struct Panels<C> {
    /// Longer than needed by up to a line.
    storage: Vec<C>,
    /// The first cell on a line. The storage is never grown, so it stays one.
    start: usize,
    len: usize,
}

impl<C: Cell> Panels<C> {
    /// Zeros. `len` cells must be addressable, which the caller checked.
    pub(super) fn zeros(len: usize) -> Self {
        let slack = LINE / size_of::<C>();
        let storage = vec![C::default(); len + slack];
        let start = storage.as_ptr().align_offset(LINE).min(slack);
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
