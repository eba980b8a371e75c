//! Cross-attention KV blocks, keyed by the encoder rows they were projected from and shared by every sequence
//! that reads them.
//!
//! Keys and values of an encoder output do not depend on the decoder's tokens, so one projection serves all
//! sequences over the same rows. The key names the *whole* input: encoders are bidirectional, so a prefix match
//! would be wrong. An entry is FILLING while steps project its rows, first to last, then READY and never written
//! again. Rows count once their step has run: one that did not run, or was planned for a sequence that is gone,
//! leaves the entry as it was, and whoever holds it goes on from there. When no sequence holds it any more, it
//! stays for the next one until its blocks are needed. Then the entry that is cheapest to lose is evicted: few rows
//! to project again, not used for long. It knows neither rows nor sequences.

use crate::blocks::{BlockPool, BlockTable, OutOfBlocks, blocks_for};
use std::collections::HashMap;
use triptych_core::{AdapterId, ContentKey};

/// Encoder rows that an entry was projected from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossKey {
    /// Content key of the encoder output; of rows of several outputs one after another, a hash of their keys.
    pub content: ContentKey,
    /// First row.
    pub first_row: u32,
    /// Number of rows.
    pub n_rows: u32,
    /// Adapter of the layers that project them.
    pub adapter: Option<AdapterId>,
}

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    /// The first `n_filled` rows are projected, not all.
    Filling { n_filled: usize },
    /// Every row is projected.
    Ready,
}

#[derive(Debug)]
struct CrossEntry {
    /// The cache's own reference to the blocks; sequences hold forks of it.
    table: BlockTable,
    state: EntryState,
    /// Value of `n_acquired` at its last use.
    last_used: u64,
}

/// A share of an entry's blocks.
#[derive(Debug)]
pub enum CrossShare {
    /// Rows are missing: nothing may attend to the blocks yet.
    Filling(BlockTable),
    /// Every row is projected.
    Filled(BlockTable),
}

impl CrossShare {
    /// The blocks.
    pub fn table(&self) -> &BlockTable {
        let (Self::Filling(table) | Self::Filled(table)) = self;
        table
    }

    /// True if every row is projected.
    pub fn is_filled(&self) -> bool {
        matches!(self, Self::Filled(_))
    }

    /// Another share of the same blocks, in the same state.
    #[must_use]
    pub fn fork(&self) -> Self {
        match self {
            Self::Filling(table) => Self::Filling(table.fork()),
            Self::Filled(table) => Self::Filled(table.fork()),
        }
    }

    /// Records that every row is projected.
    pub fn set_filled(&mut self) {
        if let Self::Filling(table) = self {
            *self = Self::Filled(table.fork());
        }
    }
}

/// All entries over one pool.
#[derive(Debug)]
pub struct CrossCache {
    pool: BlockPool,
    entries: HashMap<CrossKey, CrossEntry>,
    /// Number of acquisitions so far.
    n_acquired: u64,
}

impl CrossCache {
    /// A cache over a pool of its own.
    pub fn new(n_blocks: usize) -> Self {
        Self { pool: BlockPool::new(n_blocks), entries: HashMap::new(), n_acquired: 0 }
    }

    /// Number of all blocks.
    pub fn total(&self) -> usize {
        self.pool.total()
    }

    /// Number of blocks of entries that no sequence holds.
    pub fn cached(&self) -> usize {
        self.entries.values().filter(|e| !e.table.is_shared()).map(|e| e.table.blocks().len()).sum()
    }

    /// Number of blocks of entries that sequences hold.
    pub fn held(&self) -> usize {
        self.pool.used() - self.cached()
    }

    /// True if there is an entry, in either state.
    pub fn contains(&self, key: &CrossKey) -> bool {
        self.entries.contains_key(key)
    }

    /// True if every row is projected: the entry can be shared without the rows.
    pub fn is_ready(&self, key: &CrossKey) -> bool {
        self.entries.get(key).is_some_and(|e| e.state == EntryState::Ready)
    }

    /// True if a sequence holds a share of the entry.
    pub fn is_held(&self, key: &CrossKey) -> bool {
        self.entries.get(key).is_some_and(|e| e.table.is_shared())
    }

    /// Rows that are projected, from the first; 0 without an entry.
    pub fn n_filled(&self, key: &CrossKey) -> usize {
        self.entries.get(key).map_or(0, |e| e.n_filled(key))
    }

    /// A share of the entry for `key`; makes the entry if there is none, evicting unused ones.
    ///
    /// # Errors
    /// [`OutOfBlocks`] if evicting every unused entry would not free enough; nothing is evicted then.
    pub fn acquire(&mut self, key: CrossKey) -> Result<CrossShare, OutOfBlocks> {
        self.n_acquired += 1;
        let last_used = self.n_acquired;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.last_used = last_used;
            let table = entry.table.fork();
            return Ok(match entry.state {
                EntryState::Filling { .. } => CrossShare::Filling(table),
                EntryState::Ready => CrossShare::Filled(table),
            });
        }
        self.make_room(blocks_for(key.n_rows as usize))?;
        let table = self.pool.table(key.n_rows as usize)?;
        let share = table.fork();
        let state = EntryState::Filling { n_filled: 0 };
        self.entries.insert(key, CrossEntry { table, state, last_used });
        Ok(CrossShare::Filling(share))
    }

    /// Records that rows up to `end` are projected. True if these are all.
    pub fn fill_to(&mut self, key: &CrossKey, end: usize) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        if let EntryState::Filling { n_filled } = &mut entry.state {
            *n_filled = end.max(*n_filled);
            if *n_filled >= key.n_rows as usize {
                entry.state = EntryState::Ready;
            }
        }
        entry.state == EntryState::Ready
    }

    /// Removes every entry. Their blocks are free when the last sequence drops its share.
    pub fn reset(&mut self) {
        self.entries.clear();
    }

    fn make_room(&mut self, needed: usize) -> Result<(), OutOfBlocks> {
        let free = self.pool.free() + self.cached();
        if free < needed {
            return Err(OutOfBlocks { needed, free });
        }
        while self.pool.free() < needed {
            let unused = self.entries.iter().filter(|(_, e)| !e.table.is_shared());
            let least = unused.min_by(|(a, x), (b, y)| self.worth(a, x).total_cmp(&self.worth(b, y)));
            // `cached` above counted these entries, so the loop ends before they do.
            let Some(key) = least.map(|(key, _)| *key) else { break };
            self.entries.remove(&key);
        }
        Ok(())
    }

    /// Rows to project again over the number of acquisitions since the last use.
    fn worth(&self, key: &CrossKey, entry: &CrossEntry) -> f64 {
        entry.n_filled(key) as f64 / (self.n_acquired - entry.last_used + 1) as f64
    }
}

impl CrossEntry {
    fn n_filled(&self, key: &CrossKey) -> usize {
        match self.state {
            EntryState::Filling { n_filled } => n_filled,
            EntryState::Ready => key.n_rows as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use triptych_core::shape::KV_BLOCK_TOKENS;

    fn key(n: u8, n_blocks: usize) -> CrossKey {
        CrossKey {
            content: ContentKey::from_bytes([n; 32]),
            first_row: 0,
            n_rows: (n_blocks * KV_BLOCK_TOKENS) as u32,
            adapter: None,
        }
    }

    fn take(cache: &mut CrossCache, key: CrossKey) -> Result<(BlockTable, bool), OutOfBlocks> {
        cache.acquire(key).map(|share| (share.table().fork(), !share.is_filled()))
    }

    fn fill(cache: &mut CrossCache, key: CrossKey) {
        assert!(cache.fill_to(&key, key.n_rows as usize));
    }

    #[test]
    fn two_sequences_over_the_same_rows_share_one_projection() {
        let mut cache = CrossCache::new(4);
        let (first, must_fill) = take(&mut cache, key(1, 2)).unwrap();
        let (second, again) = take(&mut cache, key(1, 2)).unwrap();
        assert!(must_fill && again, "nobody has projected the rows yet");
        fill(&mut cache, key(1, 2));
        let (_third, must_fill) = take(&mut cache, key(1, 2)).unwrap();
        assert!(!must_fill);
        assert_eq!(first.blocks(), second.blocks());
        assert_eq!((cache.held(), cache.cached()), (2, 0));
    }

    #[test]
    fn rows_from_another_place_or_of_another_adapter_are_another_entry() {
        let mut cache = CrossCache::new(5);
        let here = key(1, 1);
        let (first, _) = take(&mut cache, here).unwrap();
        let adapter = Some(AdapterId::from_bytes([7; 32]));
        for other in [
            CrossKey { first_row: 32, ..here },
            CrossKey { n_rows: 31, ..here },
            CrossKey { adapter, ..here },
        ] {
            let (table, must_fill) = take(&mut cache, other).unwrap();
            assert!(must_fill && table.blocks() != first.blocks());
        }
    }

    #[test]
    fn unused_entries_stay_until_their_blocks_are_needed_and_the_oldest_goes_first() {
        let mut cache = CrossCache::new(3);
        for n in [1, 2, 3] {
            take(&mut cache, key(n, 1)).unwrap();
            fill(&mut cache, key(n, 1));
        }
        assert_eq!((cache.held(), cache.cached()), (0, 3));
        let (_held, must_fill) = take(&mut cache, key(1, 1)).unwrap();
        assert!(!must_fill);
        let (_new, _) = take(&mut cache, key(4, 1)).unwrap();
        let left: Vec<bool> = [1, 2, 3, 4].iter().map(|n| cache.contains(&key(*n, 1))).collect();
        assert_eq!(left, [true, false, true, true]);
    }

    #[test]
    fn of_two_unused_entries_the_one_that_is_cheap_to_project_again_goes_first_unless_it_is_much_younger() {
        for (n_uses, survivor) in [(1, 1), (6, 2)] {
            let mut cache = CrossCache::new(4);
            take(&mut cache, key(1, 3)).unwrap();
            fill(&mut cache, key(1, 3));
            for _ in 0..n_uses {
                take(&mut cache, key(2, 1)).unwrap();
                fill(&mut cache, key(2, 1));
            }
            take(&mut cache, key(3, 1)).unwrap();
            assert_eq!(
                [1, 2].map(|n| cache.contains(&key(n, if n == 1 { 3 } else { 1 }))),
                [survivor == 1, survivor == 2]
            );
        }
    }

    #[test]
    fn nothing_is_evicted_for_what_will_not_fit_anyway() {
        let mut cache = CrossCache::new(3);
        let (_held, _) = take(&mut cache, key(1, 1)).unwrap();
        take(&mut cache, key(2, 1)).unwrap();
        assert_eq!(cache.acquire(key(3, 3)).unwrap_err(), OutOfBlocks { needed: 3, free: 2 });
        assert!(cache.contains(&key(2, 1)));
    }

    #[test]
    fn an_entry_is_ready_when_its_last_row_is_projected_whoever_began_it() {
        let mut cache = CrossCache::new(2);
        let whole = key(1, 2);
        let (begun, _) = take(&mut cache, whole).unwrap();
        assert!(!cache.fill_to(&whole, 40));
        drop(begun);
        assert_eq!((cache.held(), cache.cached(), cache.n_filled(&whole)), (0, 2, 40));
        let (_next, must_fill) = take(&mut cache, whole).unwrap();
        assert!(must_fill && !cache.is_ready(&whole));
        assert!(cache.fill_to(&whole, 64) && cache.is_ready(&whole));
    }

    #[test]
    fn an_entry_that_was_hardly_begun_is_the_first_to_go() {
        let mut cache = CrossCache::new(4);
        take(&mut cache, key(1, 1)).unwrap();
        fill(&mut cache, key(1, 1));
        take(&mut cache, key(2, 3)).unwrap();
        cache.fill_to(&key(2, 3), 5);
        take(&mut cache, key(3, 1)).unwrap();
        assert_eq!([1, 2].map(|n| cache.contains(&key(n, if n == 1 { 1 } else { 3 }))), [true, false]);
    }

    proptest! {
        #[test]
        fn books_balance_and_held_entries_survive(moves in prop::collection::vec((0u8..6, 1usize..4, any::<bool>()), 0..60)) {
            let mut cache = CrossCache::new(7);
            let mut held: Vec<(CrossKey, BlockTable)> = Vec::new();
            for (n, n_blocks, drop_one) in moves {
                if drop_one && !held.is_empty() {
                    held.swap_remove(n as usize % held.len());
                } else if let Ok((table, must_fill)) = take(&mut cache, key(n, n_blocks)) {
                    let holder = held.iter().find(|(k, _)| *k == key(n, n_blocks));
                    if let Some((_, other)) = holder {
                        prop_assert!(!must_fill, "whoever took it first filled it");
                        prop_assert_eq!(other.blocks(), table.blocks());
                    }
                    held.push((key(n, n_blocks), table));
                    fill(&mut cache, key(n, n_blocks));
                }
                let mut blocks: Vec<_> = held.iter().flat_map(|(_, t)| t.blocks()).collect();
                blocks.sort();
                blocks.dedup();
                prop_assert_eq!(cache.held(), blocks.len());
                prop_assert!(cache.held() + cache.cached() <= cache.total());
            }
        }
    }
}
