//! Values under content keys within a budget of bytes; the least recently used go first.
//!
//! Held values are never evicted, so the sum may pass the budget while they are held; holders are bounded by
//! whoever admits them. Knows no locks and no time.

use std::collections::{BTreeMap, HashMap};
use triptych_core::ContentKey;

/// The map. All operations are O(log n), eviction amortised.
#[derive(Debug)]
pub(crate) struct ByteLru<V> {
    budget: usize,
    /// The sum of `bytes` over `entries`.
    used: usize,
    /// Grows with every touch; no two entries have the same.
    tick: u64,
    entries: HashMap<ContentKey, Entry<V>>,
    /// Exactly the entries that nobody holds, by the tick of their last use.
    idle: BTreeMap<u64, ContentKey>,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: usize,
    hold: Hold,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    Held,
    Idle { since: u64 },
}

impl<V: Clone> ByteLru<V> {
    /// An empty map. A budget of zero keeps only what is held.
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, used: 0, tick: 0, entries: HashMap::new(), idle: BTreeMap::new() }
    }

    /// Adds a value that nobody holds, unless the key has one. Whether it was added; it may be evicted at once
    /// when what is held leaves no room.
    pub(crate) fn insert(&mut self, key: ContentKey, value: V, bytes: usize) -> bool {
        if self.entries.contains_key(&key) {
            return false;
        }
        let since = self.next_tick();
        self.entries.insert(key, Entry { value, bytes, hold: Hold::Idle { since } });
        self.idle.insert(since, key);
        self.used = self.used.saturating_add(bytes);
        self.evict();
        true
    }

    /// Adds a value that is held, unless the key has one; holds it either way.
    pub(crate) fn insert_held(&mut self, key: ContentKey, value: V, bytes: usize) {
        if !self.hold(&key) {
            self.entries.insert(key, Entry { value, bytes, hold: Hold::Held });
            self.used = self.used.saturating_add(bytes);
            self.evict();
        }
    }

    /// The value, and counts as a use of it.
    pub(crate) fn get(&mut self, key: &ContentKey) -> Option<V> {
        let tick = self.next_tick();
        let entry = self.entries.get_mut(key)?;
        if let Hold::Idle { since } = &mut entry.hold {
            self.idle.remove(since);
            *since = tick;
            self.idle.insert(tick, *key);
        }
        Some(entry.value.clone())
    }

    /// Whether the key has a value; not a use.
    pub(crate) fn contains(&self, key: &ContentKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Keeps the value from eviction. False if there is none.
    pub(crate) fn hold(&mut self, key: &ContentKey) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        if let Hold::Idle { since } = entry.hold {
            self.idle.remove(&since);
            entry.hold = Hold::Held;
        }
        true
    }

    /// Ends [`Self::hold`]; the value becomes the most recently used.
    pub(crate) fn release(&mut self, key: &ContentKey) {
        let since = self.next_tick();
        if let Some(entry) = self.entries.get_mut(key)
            && entry.hold == Hold::Held
        {
            entry.hold = Hold::Idle { since };
            self.idle.insert(since, *key);
            self.evict();
        }
    }

    /// Takes the value out, held or not.
    pub(crate) fn remove(&mut self, key: &ContentKey) -> Option<V> {
        let entry = self.entries.remove(key)?;
        if let Hold::Idle { since } = entry.hold {
            self.idle.remove(&since);
        }
        self.used = self.used.saturating_sub(entry.bytes);
        Some(entry.value)
    }

    /// At most `limit` keys, those in use first, then the latest used.
    pub(crate) fn recent(&self, limit: usize) -> Vec<ContentKey> {
        let held = self.entries.iter().filter(|(_, e)| e.hold == Hold::Held).map(|(key, _)| *key);
        held.chain(self.idle.values().rev().copied()).take(limit).collect()
    }

    /// What `read` says of each value that it wants, in no order. Not a use of them.
    pub(crate) fn list<T>(&self, read: impl Fn(&ContentKey, &V) -> Option<T>) -> Vec<(ContentKey, T)> {
        self.entries.iter().filter_map(|(key, e)| Some((*key, read(key, &e.value)?))).collect()
    }

    /// Sum of the sizes.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    fn evict(&mut self) {
        while self.used > self.budget {
            let Some((_, key)) = self.idle.pop_first() else { return };
            if let Some(entry) = self.entries.remove(&key) {
                self.used = self.used.saturating_sub(entry.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8) -> ContentKey {
        ContentKey::from_bytes([n; 32])
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut lru = ByteLru::new(30);
        for n in 1..=3 {
            assert!(lru.insert(key(n), n, 10));
        }
        assert_eq!(lru.get(&key(1)), Some(1));
        lru.insert(key(4), 4, 10);
        assert!(!lru.contains(&key(2)), "2 was used longest ago");
        assert!(lru.contains(&key(1)) && lru.contains(&key(3)) && lru.contains(&key(4)));
    }

    #[test]
    fn what_is_held_stays_over_the_budget_and_goes_when_released() {
        let mut lru = ByteLru::new(10);
        lru.insert_held(key(1), 1, 10);
        lru.insert_held(key(2), 2, 10);
        assert_eq!((lru.len(), lru.used()), (2, 20));
        lru.insert(key(3), 3, 1);
        assert!(!lru.contains(&key(3)), "no room beside what is held");
        lru.release(&key(1));
        assert!(!lru.contains(&key(1)));
        assert_eq!(lru.used(), 10);
    }

    #[derive(Clone, Debug)]
    enum Move {
        Insert(u8, usize),
        InsertHeld(u8, usize),
        Get(u8),
        Hold(u8),
        Release(u8),
        Remove(u8),
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let key = 0u8..6;
        let one = prop_oneof![
            (key.clone(), 0usize..12).prop_map(|(k, b)| Move::Insert(k, b)),
            (key.clone(), 0usize..12).prop_map(|(k, b)| Move::InsertHeld(k, b)),
            key.clone().prop_map(Move::Get),
            key.clone().prop_map(Move::Hold),
            key.clone().prop_map(Move::Release),
            key.prop_map(Move::Remove),
        ];
        proptest::collection::vec(one, 0..60)
    }

    proptest! {
        #[test]
        fn the_books_balance_after_every_move(moves in moves()) {
            let mut lru = ByteLru::new(20);
            for m in moves {
                match m {
                    Move::Insert(k, b) => { lru.insert(key(k), k, b); }
                    Move::InsertHeld(k, b) => lru.insert_held(key(k), k, b),
                    Move::Get(k) => { lru.get(&key(k)); }
                    Move::Hold(k) => { lru.hold(&key(k)); }
                    Move::Release(k) => lru.release(&key(k)),
                    Move::Remove(k) => { lru.remove(&key(k)); }
                }
                let sum: usize = lru.entries.values().map(|e| e.bytes).sum();
                let idle = lru.entries.values().filter(|e| e.hold != Hold::Held).count();
                prop_assert_eq!(lru.used, sum);
                prop_assert_eq!(lru.idle.len(), idle);
                prop_assert!(lru.used <= lru.budget || idle == 0);
            }
        }
    }
}
