//! Free pages, and the page chains of objects. Needs the lock, or ownership of the chain.

use super::layout::Field;
use super::words::Words;

/// An inconsistent object table: its last writer died, or something else wrote to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damaged;

impl Words<'_> {
    /// Allocates a chain of `n` pages; `None` if fewer are free. Takes the lowest ones: memory that was used before is
    /// in the processes' page tables already, and the first touch of a page costs more than its copy.
    pub(super) fn take_pages(&self, n: usize) -> Result<Option<Vec<u32>>, Damaged> {
        let free = self.field(Field::FreePages);
        if free < n as u64 {
            return Ok(None);
        }
        let n_words = self.geometry.n_pages.div_ceil(64);
        let start = self.field(Field::Cursor) as usize % n_words;
        let mut pages = Vec::with_capacity(n.min(self.geometry.n_pages));
        // No page below the cursor is free; if that should be wrong, the pages are found on the way around.
        for at in (start..n_words).chain(0..start) {
            let mut used = self.load(self.geometry.used(at));
            while pages.len() < n && used != u64::MAX {
                let bit = used.trailing_ones();
                used |= 1 << bit;
                pages.push((at * 64) as u32 + bit);
            }
            self.store(self.geometry.used(at), used);
            if pages.len() == n {
                self.set(Field::Cursor, at as u64);
                break;
            }
        }
        self.set(Field::FreePages, free - n as u64);
        for pair in pages.windows(2) {
            self.store(self.geometry.next(pair[0] as usize), u64::from(pair[1]));
        }
        let is_whole = pages.len() == n && pages.iter().all(|p| (*p as usize) < self.geometry.n_pages);
        if is_whole { Ok(Some(pages)) } else { Err(Damaged) }
    }

    /// Frees pages.
    pub(super) fn give_pages(&self, pages: &[u32]) {
        for page in pages {
            let (at, bit) = (self.geometry.used(*page as usize / 64), page % 64);
            self.store(at, self.load(at) & !(1 << bit));
        }
        self.set(Field::FreePages, self.field(Field::FreePages).saturating_add(pages.len() as u64));
        let lowest = pages.iter().min().map_or(u64::MAX, |page| u64::from(*page) / 64);
        self.set(Field::Cursor, self.field(Field::Cursor).min(lowest));
    }

    /// The `n` pages of a chain.
    pub(super) fn chain(&self, first: u64, n: usize) -> Result<Vec<u32>, Damaged> {
        if n > self.geometry.n_pages {
            return Err(Damaged);
        }
        let mut pages = Vec::with_capacity(n);
        let mut page = first;
        for _ in 0..n {
            let is_there = page < self.geometry.n_pages as u64;
            pages.push(u32::try_from(page).ok().filter(|_| is_there).ok_or(Damaged)?);
            page = self.load(self.geometry.next(page as usize));
        }
        Ok(pages)
    }

    /// Rebuilds the page map: pages of `taken`, and those past the end, are used.
    pub(super) fn map_pages(&self, taken: &[bool]) {
        let n_pages = self.geometry.n_pages;
        for at in 0..n_pages.div_ceil(64) {
            let is_used = |page: usize| taken.get(page).copied().unwrap_or(true);
            let used = (0..64).filter(|bit| is_used(at * 64 + bit)).fold(0, |word, bit| word | 1 << bit);
            self.store(self.geometry.used(at), used);
        }
        let free = taken.iter().filter(|taken| !**taken).count();
        self.set(Field::FreePages, free as u64);
        self.set(Field::Cursor, 0);
    }
}
