//! Layout of a slab: header, slots, index, leases, page map, pages. Offsets count words of 64 bits.
//!
//! | part | words | content |
//! |---|---|---|
//! | header | 512 | magic, version and counts, which never change; then counters, see [`Field`] |
//! | slots | 16 each | one object each: state, generation, length, first page, priority, key |
//! | buckets | 1 each | the index: heads of chains of slots |
//! | leases | 8 each | encode leases of keys |
//! | used | 1 for 64 pages | bitmap of used pages |
//! | next | 1 for each page | the page that follows in its object |
//! | pages | 2048 each | the objects' bytes, in pages of 16 KiB |
//!
//! An object is a chain of pages, so there is no external fragmentation: at most one page per object is
//! partly unused, and an object fits exactly when enough pages are free.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `TRIPTYCH` as a word.
const MAGIC: u64 = u64::from_le_bytes(*b"TRIPTYCH");
/// Grows with every change of the layout or of a protocol on it.
const VERSION: u64 = 1;

/// Words of a page: 16 KiB.
pub(super) const PAGE_WORDS: usize = 2048;
/// Bytes of a page.
pub(super) const PAGE_BYTES: usize = PAGE_WORDS * 8;
/// Words of a slot.
pub(super) const SLOT_WORDS: usize = 16;
/// Words of a lease.
pub(super) const LEASE_WORDS: usize = 8;
/// Lease slots that a key's lease may use.
pub(super) const LEASE_WAYS: usize = 16;

const HEADER_WORDS: usize = 512;
/// Smallest slab in bytes.
pub(super) const MIN_BYTES: u64 = 1 << 20;
const MAX_SLOTS: usize = 1 << 15;
const MIN_SLOTS: usize = 16;

/// Words of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Magic = 0,
    Version = 1,
    NPages = 2,
    NSlots = 3,
    NBuckets = 4,
    NLeases = 5,
    NWords = 6,
    /// Nonzero while the object table is being changed; stays so if the process dies meanwhile.
    Dirty = 8,
    /// Number of free pages.
    FreePages = 9,
    /// Head of the list of free slots, plus one.
    FreeSlot = 10,
    /// The eviction clock, see [`crate::policy`].
    Clock = 11,
    /// Bytes of everything stored since the creation.
    Added = 12,
    /// The last fencing token.
    Token = 13,
    /// Number of the last process that joined.
    Owner = 14,
    /// Counter of events that waiters poll: stored objects and released leases.
    Events = 15,
    /// Start of the search for free pages, in words of the page map; no page before it is free.
    Cursor = 16,
    /// Objects evicted since the creation.
    Evicted = 17,
}

/// The counts of a slab, and the offsets that follow from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) n_pages: usize,
    pub(super) n_slots: usize,
    /// A power of two.
    pub(super) n_buckets: usize,
    /// A power of two, at least [`LEASE_WAYS`].
    pub(super) n_leases: usize,
}

impl Geometry {
    /// The largest geometry that fits in a file of `n_bytes`, at least [`MIN_BYTES`].
    pub(super) fn of_bytes(n_bytes: u64) -> Self {
        let n_words = usize::try_from(n_bytes.max(MIN_BYTES) / 8).unwrap_or(usize::MAX);
        let mut n_pages = n_words / PAGE_WORDS;
        loop {
            let n_slots = (n_pages / 2).clamp(MIN_SLOTS, MAX_SLOTS);
            let n_buckets = n_slots.next_power_of_two();
            let n_leases = (n_buckets / 4).max(LEASE_WAYS);
            let geometry = Self { n_pages, n_slots, n_buckets, n_leases };
            match geometry.n_words() {
                Some(n) if n <= n_words => return geometry,
                // Tables take less than a page in twenty, and each round takes away what is too much.
                n => n_pages -= (n.unwrap_or(n_words) - n_words).div_ceil(PAGE_WORDS).max(1),
            }
        }
    }

    /// Reads the counts of a slab.
    ///
    /// # Errors
    /// A text: no slab, another version, or a wrong length.
    pub(super) fn read(words: &[AtomicU64]) -> Result<Self, String> {
        let field = |f: Field| words.get(f as usize).map_or(0, |w| w.load(Relaxed));
        if words.len() < HEADER_WORDS || field(Field::Magic) != MAGIC {
            return Err("it is no slab of triptych".into());
        }
        if field(Field::Version) != VERSION {
            return Err(format!("it has version {}, this program has {VERSION}", field(Field::Version)));
        }
        let count = |f| usize::try_from(field(f)).unwrap_or(usize::MAX);
        let read = Self {
            n_pages: count(Field::NPages),
            n_slots: count(Field::NSlots),
            n_buckets: count(Field::NBuckets),
            n_leases: count(Field::NLeases),
        };
        let is_possible = read.n_pages > 0
            && (1..=MAX_SLOTS).contains(&read.n_slots)
            && [read.n_buckets, read.n_leases].iter().all(|n| n.is_power_of_two() && *n <= MAX_SLOTS)
            && read.n_leases >= LEASE_WAYS;
        let expected = if is_possible { read.n_words() } else { None };
        if expected != Some(words.len()) || count(Field::NWords) != words.len() {
            return Err(format!("it has {} words of 8 bytes, its header says {expected:?}", words.len()));
        }
        Ok(read)
    }

    /// Writes the counts; the magic comes last. On zeroed memory this creates an empty slab without an object table.
    pub(super) fn write(&self, words: &[AtomicU64]) {
        let set = |f: Field, value: u64| {
            if let Some(word) = words.get(f as usize) {
                word.store(value, Relaxed);
            }
        };
        set(Field::Version, VERSION);
        set(Field::NPages, self.n_pages as u64);
        set(Field::NSlots, self.n_slots as u64);
        set(Field::NBuckets, self.n_buckets as u64);
        set(Field::NLeases, self.n_leases as u64);
        set(Field::NWords, self.n_words().unwrap_or(0) as u64);
        set(Field::Magic, MAGIC);
    }

    /// Length of the whole slab in words. `None` if it overflows.
    pub(super) fn n_words(&self) -> Option<usize> {
        // All tables are small, but for what a damaged header claims.
        let pages = self.n_pages.checked_mul(PAGE_WORDS)?;
        let maps = self.n_pages.checked_add(self.n_pages.div_ceil(64))?;
        let tables = self.n_slots.checked_mul(SLOT_WORDS)?.checked_add(self.n_buckets)?;
        let leases = self.n_leases.checked_mul(LEASE_WORDS)?;
        HEADER_WORDS.checked_add(tables)?.checked_add(leases)?.checked_add(maps)?.checked_add(pages)
    }

    /// Bytes of all objects, and so of the largest one.
    pub(super) fn capacity(&self) -> usize {
        self.n_pages * PAGE_BYTES
    }

    pub(super) fn slot(&self, slot: usize) -> usize {
        HEADER_WORDS + slot * SLOT_WORDS
    }

    pub(super) fn bucket(&self, bucket: usize) -> usize {
        self.slot(self.n_slots) + bucket
    }

    pub(super) fn lease(&self, lease: usize) -> usize {
        self.bucket(self.n_buckets) + lease * LEASE_WORDS
    }

    pub(super) fn used(&self, word: usize) -> usize {
        self.lease(self.n_leases) + word
    }

    pub(super) fn next(&self, page: usize) -> usize {
        self.used(self.n_pages.div_ceil(64)) + page
    }

    pub(super) fn page(&self, page: usize) -> usize {
        self.next(self.n_pages) + page * PAGE_WORDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_fills_its_file_but_for_less_than_a_page_in_sixteen() {
        for mib in [0, 1, 2, 3, 64, 1000, 1024, 65_536] {
            let n_bytes = (mib << 20_u64).max(MIN_BYTES);
            let g = Geometry::of_bytes(n_bytes);
            let n_words = g.n_words().unwrap();
            assert!(n_words as u64 * 8 <= n_bytes);
            assert_eq!(g.page(g.n_pages), n_words, "the pages are the last part");
            assert!(g.capacity() as u64 > n_bytes / 16 * 15, "{mib} MiB: {g:?}");
        }
    }

    #[test]
    fn a_header_reads_back_and_no_other_does() {
        let g = Geometry::of_bytes(MIN_BYTES);
        let words: Vec<_> = (0..g.n_words().unwrap()).map(|_| AtomicU64::new(0)).collect();
        assert!(Geometry::read(&words).unwrap_err().contains("no slab"));
        g.write(&words);
        assert_eq!(Geometry::read(&words), Ok(g));
        assert!(Geometry::read(&words[1..]).is_err() && Geometry::read(&words[..100]).is_err());
        assert!(Geometry::read(&words[..words.len() - 1]).is_err(), "truncated");
        for (field, value) in [(Field::NPages, u64::MAX), (Field::NSlots, 1 << 40), (Field::NLeases, 1)] {
            words[field as usize].store(value, Relaxed);
            assert!(Geometry::read(&words).unwrap_err().contains("words of 8 bytes"));
            g.write(&words);
        }
        words[Field::Version as usize].store(9, Relaxed);
        assert!(Geometry::read(&words).unwrap_err().contains("version 9"));
    }
}
