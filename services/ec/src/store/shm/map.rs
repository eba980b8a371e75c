//! A file mapped into memory as atomic words. The one place of this crate that needs `unsafe`.
//!
//! Other processes write the same memory at any time, so nothing here ever makes a `&[u8]` of it: there are only
//! atomic words, which any number of threads and processes may load and store at once. A load may return
//! any value, which its user must check against limits first.
//!
//! No mapping can defend against a process that *truncates* the file: it ends every process that then touches the
//! missing part (SIGBUS). Nothing of ours ever shortens a slab, its mode lets only its owner write it, and its length
//! is checked before each use.

use memmap2::MmapRaw;
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU64;

/// The mapping, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Map {
    raw: MmapRaw,
}

impl Map {
    /// Maps the whole file at its current length, for reading and writing, shared with every process that does the
    /// same.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let raw = MmapRaw::map_raw(file)?;
        if raw.len() < size_of::<AtomicU64>() || !raw.as_ptr().cast::<AtomicU64>().is_aligned() {
            return Err(io::Error::other("too short to be mapped"));
        }
        Ok(Self { raw })
    }

    /// The whole file in words; an incomplete one at its end is left out.
    #[allow(unsafe_code, reason = "the one view of the mapped memory; the header says why it is safe")]
    pub(super) fn words(&self) -> &[AtomicU64] {
        let n_words = self.raw.len() / size_of::<AtomicU64>();
        // SAFETY: the mapping is readable and writable for `raw.len()` bytes and stays so while `self` is borrowed;
        // `new` checked the alignment; any bytes are a valid `AtomicU64`; `Map` hands out no other view of the
        // memory, and other processes are outside this process's memory model but for atomic accesses, which these
        // are.
        unsafe { std::slice::from_raw_parts(self.raw.as_mut_ptr().cast::<AtomicU64>(), n_words) }
    }
}
