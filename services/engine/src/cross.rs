//! Cross-attention KV blocks, keyed by the encoder rows they were projected from and shared by every sequence
//! that reads them.
//!
//! Keys and values of an encoder output do not depend on the decoder's tokens, so one projection serves all
//! sequences over the same rows. The key names the *whole* input: encoders are bidirectional, so a prefix match
//! would be wrong. An entry is FILLING from the plan that projects it to the end of that step, then READY. When
//! no sequence holds it any more, it stays for the next one until its blocks are needed. Then the entry that is
//! cheapest to lose is evicted: few rows to project again, not used for long. It knows neither rows nor
//! sequences.

use crate::blocks::{BlockPool, BlockTable, OutOfBlocks, blocks_for};
use std::collections::HashMap;
use triptych_core::ContentKey;

/// Encoder rows that an entry was projected from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CrossKey {
    /// Content key of the encoder output.
    pub content: ContentKey,
    /// First row.
    pub first_row: u32,
    /// Number of rows.
    pub n_rows: u32,
}

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    /// Projected by a plan that has not ended yet.
    Filling,
    /// Projected.
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

/// A share of an entry, and whether its holder must project it.
#[derive(Debug)]
pub enum CrossShare {
    /// Projected already, or by the plan under construction.
    Filled(BlockTable),
    /// New: the plan under construction must project it.
    ToFill(BlockTable),
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

    /// True if there is an entry, projected or planned: it can be shared without the rows.
    pub fn contains(&self, key: &CrossKey) -> bool {
        self.entries.contains_key(key)
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
            return Ok(CrossShare::Filled(entry.table.fork()));
        }
        self.make_room(blocks_for(key.n_rows as usize))?;
        let table = self.pool.table(key.n_rows as usize)?;
        let share = table.fork();
        self.entries.insert(key, CrossEntry { table, state: EntryState::Filling, last_used });
        Ok(CrossShare::ToFill(share))
    }

    /// Marks the projection of `key` as done.
    pub fn filled(&mut self, key: &CrossKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.state = EntryState::Ready;
        }
    }

    /// Removes the entries that were not projected. Their blocks are free when the last sequence drops its
    /// share.
    pub fn discard_unfilled(&mut self) {
        self.entries.retain(|_, e| e.state == EntryState::Ready);
    }

    /// Removes every entry. Their blocks are free when the last sequence drops its share.
    pub fn reset(&mut self) {
        self.entries.clear();
    }

    /// True if `acquire` of `key` would succeed.
    pub fn can_acquire(&self, key: &CrossKey) -> bool {
        self.contains(key) || blocks_for(key.n_rows as usize) <= self.pool.free() + self.cached()
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
        f64::from(key.n_rows) / (self.n_acquired - entry.last_used + 1) as f64
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
        }
    }

    fn take(cache: &mut CrossCache, key: CrossKey) -> Result<(BlockTable, bool), OutOfBlocks> {
        cache.acquire(key).map(|share| match share {
            CrossShare::Filled(table) => (table, false),
            CrossShare::ToFill(table) => (table, true),
        })
    }

    #[test]
    fn two_sequences_over_the_same_rows_share_one_projection() {
        let mut cache = CrossCache::new(4);
        let (first, must_fill) = take(&mut cache, key(1, 2)).unwrap();
        let (second, again) = take(&mut cache, key(1, 2)).unwrap();
        assert!(must_fill && !again);
        assert_eq!(first.blocks(), second.blocks());
        assert_eq!((cache.held(), cache.cached()), (2, 0));
    }

    #[test]
    fn rows_from_another_place_are_another_entry() {
        let mut cache = CrossCache::new(4);
        let here = key(1, 1);
        let (first, _) = take(&mut cache, here).unwrap();
        for other in [CrossKey { first_row: 32, ..here }, CrossKey { n_rows: 31, ..here }] {
            let (table, must_fill) = take(&mut cache, other).unwrap();
            assert!(must_fill && table.blocks() != first.blocks());
        }
    }

    #[test]
    fn unused_entries_stay_until_their_blocks_are_needed_and_the_oldest_goes_first() {
        let mut cache = CrossCache::new(3);
        for n in [1, 2, 3] {
            take(&mut cache, key(n, 1)).unwrap();
            cache.filled(&key(n, 1));
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
            for _ in 0..n_uses {
                take(&mut cache, key(2, 1)).unwrap();
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
    fn a_projection_that_failed_is_never_read() {
        let mut cache = CrossCache::new(2);
        let (table, _) = take(&mut cache, key(1, 2)).unwrap();
        cache.discard_unfilled();
        assert!(!cache.contains(&key(1, 2)));
        assert_eq!(cache.held(), 2, "its holder still has the blocks");
        drop(table);
        assert_eq!((cache.held(), cache.cached()), (0, 0));
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
                        prop_assert!(!must_fill);
                        prop_assert_eq!(other.blocks(), table.blocks());
                    }
                    held.push((key(n, n_blocks), table));
                    cache.filled(&key(n, n_blocks));
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
