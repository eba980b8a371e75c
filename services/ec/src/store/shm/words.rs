//! Loads, stores and copies over a slab's words, given the layout. Nothing here can access memory out of
//! bounds: a word out of range reads as zero and ignores writes, since offsets may come from memory that others write.

use super::layout::{Field, Geometry, PAGE_BYTES, PAGE_WORDS};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use triptych_core::ContentKey;

/// A slab's words and its layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a> {
    words: &'a [AtomicU64],
    pub(super) geometry: Geometry,
}

impl<'a> Words<'a> {
    pub(super) fn new(words: &'a [AtomicU64], geometry: Geometry) -> Self {
        Self { words, geometry }
    }

    pub(super) fn load(&self, at: usize) -> u64 {
        self.words.get(at).map_or(0, |w| w.load(Relaxed))
    }

    pub(super) fn store(&self, at: usize, value: u64) {
        if let Some(word) = self.words.get(at) {
            word.store(value, Relaxed);
        }
    }

    pub(super) fn field(&self, field: Field) -> u64 {
        self.load(field as usize)
    }

    pub(super) fn set(&self, field: Field, value: u64) {
        self.store(field as usize, value);
    }

    /// Increments a word and returns the sum. Needs the lock.
    pub(super) fn bump(&self, field: Field) -> u64 {
        let value = self.field(field).wrapping_add(1);
        self.set(field, value);
        value
    }

    /// The key whose four words begin at `at`.
    pub(super) fn key(&self, at: usize) -> ContentKey {
        let mut bytes = [0; 32];
        for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&self.load(at + i).to_le_bytes());
        }
        ContentKey::from_bytes(bytes)
    }

    pub(super) fn set_key(&self, at: usize, key: &ContentKey) {
        for (i, word) in key.as_bytes().as_chunks::<8>().0.iter().enumerate() {
            self.store(at + i, u64::from_le_bytes(*word));
        }
    }

    /// Start of a key's probe sequence. A key is a hash already.
    pub(super) fn hash(key: &ContentKey) -> usize {
        let words = key.as_bytes().as_chunks::<8>().0.iter();
        words.fold(0, |h: u64, w| h.rotate_left(9) ^ u64::from_le_bytes(*w)) as usize
    }

    /// Writes bytes over the pages, one after the other.
    pub(super) fn copy_in(&self, pages: &[u32], bytes: &[u8]) {
        for (page, bytes) in pages.iter().zip(bytes.chunks(PAGE_BYTES)) {
            let words = self.page(*page);
            let (whole, rest) = bytes.as_chunks::<8>();
            for (word, bytes) in words.iter().zip(whole) {
                word.store(u64::from_le_bytes(*bytes), Relaxed);
            }
            if let Some(word) = words.get(whole.len()).filter(|_| !rest.is_empty()) {
                let mut last = [0; 8];
                last[..rest.len()].copy_from_slice(rest);
                word.store(u64::from_le_bytes(last), Relaxed);
            }
        }
    }

    /// Reads bytes from the pages, one after the other; bytes out of range are left unchanged.
    pub(super) fn copy_out(&self, pages: &[u32], bytes: &mut [u8]) {
        for (page, bytes) in pages.iter().zip(bytes.chunks_mut(PAGE_BYTES)) {
            let words = self.page(*page);
            let (whole, rest) = bytes.as_chunks_mut::<8>();
            for (word, bytes) in words.iter().zip(whole.iter_mut()) {
                *bytes = word.load(Relaxed).to_le_bytes();
            }
            if let Some(word) = words.get(whole.len()) {
                let n = rest.len();
                rest.copy_from_slice(&word.load(Relaxed).to_le_bytes()[..n]);
            }
        }
    }

    fn page(&self, page: u32) -> &'a [AtomicU64] {
        let start = self.geometry.page(page as usize);
        self.words.get(start..start + PAGE_WORDS).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::MIN_BYTES;
    use super::*;

    #[test]
    fn bytes_of_any_length_come_back_from_pages_in_any_order() {
        let geometry = Geometry::of_bytes(MIN_BYTES);
        let memory: Vec<_> = (0..geometry.n_words().unwrap()).map(|_| AtomicU64::new(0)).collect();
        let words = Words::new(&memory, geometry);
        let pages = [5, 2, 9];
        let full = 3 * PAGE_BYTES;
        for len in [0, 1, 7, 8, 9, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, full - 3, full] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
            words.copy_in(&pages, &bytes);
            let mut read = vec![0; len];
            words.copy_out(&pages, &mut read);
            assert!(read == bytes, "{len} bytes");
        }
    }

    #[test]
    fn places_that_are_not_there_read_as_nothing() {
        let geometry = Geometry::of_bytes(MIN_BYTES);
        let words = Words::new(&[], geometry);
        words.store(3, 1);
        words.copy_in(&[u32::MAX], b"x");
        let mut read = *b"as it was";
        words.copy_out(&[u32::MAX], &mut read);
        assert_eq!((words.load(usize::MAX), &read), (0, b"as it was"));
    }
}
