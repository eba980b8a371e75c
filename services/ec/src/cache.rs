//! A cache of values under content keys within a byte budget. Values of the lowest priority, and of owners over their
//! share, are evicted first ([`crate::policy`]).
//!
//! Held values are never evicted, so the sum may pass the budget while they are held; admission bounds the holders. Room for
//! values that are to come is taken from the others ahead ([`ByteCache::reserve`]).
//! Knows no locks and no time.

use crate::policy::{BY_EVICTIONS, OwnerShares, is_young};
use std::collections::{BTreeMap, HashMap};
use triptych_core::ContentKey;

/// The cache. All operations are O(log n), eviction amortised, except for a walk over the newest values.
#[derive(Debug)]
pub struct ByteCache<V> {
    budget: usize,
    /// The sum of `bytes` over `entries`.
    used: usize,
    /// Bytes of the budget that values to come are given.
    reserved: usize,
    /// Grows with every touch; no two entries have the same.
    tick: u64,
    /// The largest priority that was evicted.
    clock: u64,
    /// Bytes of everything added since the start.
    added: u64,
    entries: HashMap<ContentKey, CacheEntry<V>>,
    shares: OwnerShares,
    /// Exactly the entries that are not held, by priority, then by recency, the lowest first.
    idle: BTreeMap<Rank, ContentKey>,
}

/// Priority, and the tick of the last use.
type Rank = (u64, u64);

#[derive(Debug)]
struct CacheEntry<V> {
    value: V,
    bytes: usize,
    /// Value of `added` after this entry was added.
    birth: u64,
    rank: Rank,
    is_held: bool,
}

impl<V: Clone> ByteCache<V> {
    /// An empty map. A budget of zero keeps only what is held.
    pub fn new(budget: usize) -> Self {
        let (entries, idle) = (HashMap::new(), BTreeMap::new());
        let shares = OwnerShares::of_budget(budget as u64);
        Self { budget, used: 0, reserved: 0, tick: 0, clock: 0, added: 0, entries, shares, idle }
    }

    /// Adds a value that is not held, unless the key has one. Returns true if it was added; it may be evicted at once
    /// when held values leave no room.
    pub fn insert(&mut self, key: ContentKey, value: V, bytes: usize) -> bool {
        if self.entries.contains_key(&key) {
            return false;
        }
        let entry = self.entry(&key, value, bytes);
        self.idle.insert(entry.rank, key);
        self.entries.insert(key, entry);
        self.evict();
        true
    }

    /// Adds a value that is held, unless the key has one; holds it either way.
    pub fn insert_held(&mut self, key: ContentKey, value: V, bytes: usize) {
        if !self.hold(&key) {
            let entry = self.entry(&key, value, bytes);
            self.entries.insert(key, CacheEntry { is_held: true, ..entry });
            self.evict();
        }
    }

    /// The value. Counts as a use.
    pub fn get(&mut self, key: &ContentKey) -> Option<V> {
        self.touch(key);
        self.entries.get(key).map(|entry| entry.value.clone())
    }

    /// True if the key has a value. Not a use.
    pub fn contains(&self, key: &ContentKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Keeps the value from eviction. False if there is none.
    pub fn hold(&mut self, key: &ContentKey) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        entry.is_held = true;
        self.idle.remove(&entry.rank);
        true
    }

    /// Ends [`Self::hold`]. Counts as a use.
    pub fn release(&mut self, key: &ContentKey) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        if std::mem::replace(&mut entry.is_held, false) {
            self.idle.insert(entry.rank, *key);
            self.touch(key);
            self.evict();
        }
    }

    /// Removes the value, held or not.
    pub fn remove(&mut self, key: &ContentKey) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.idle.remove(&entry.rank);
        self.used = self.used.saturating_sub(entry.bytes);
        self.shares.take(key, entry.bytes as u64);
        Some(entry.value)
    }

    /// At most `limit` keys, held ones first, then the most recently used.
    pub fn recent(&self, limit: usize) -> Vec<ContentKey> {
        let mut latest: Vec<_> = self.entries.iter().map(|(key, e)| (e.is_held, e.rank.1, *key)).collect();
        latest.sort_unstable_by(|a, b| b.cmp(a));
        latest.into_iter().take(limit).map(|(.., key)| key).collect()
    }

    /// The results of `read` for the values that it selects, in no order. Not a use.
    pub fn list<T>(&self, read: impl Fn(&ContentKey, &V) -> Option<T>) -> Vec<(ContentKey, T)> {
        self.entries.iter().filter_map(|(key, e)| Some((*key, read(key, &e.value)?))).collect()
    }

    /// Sets the bytes that are kept free for values to come, and evicts what is in their place.
    pub fn reserve(&mut self, bytes: usize) {
        self.reserved = bytes;
        self.evict();
    }

    /// The budget.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Sum of the sizes.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if it has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    fn entry(&mut self, key: &ContentKey, value: V, bytes: usize) -> CacheEntry<V> {
        self.used = self.used.saturating_add(bytes);
        self.shares.add(key, bytes as u64);
        self.added = self.added.saturating_add(bytes as u64);
        let rank = (BY_EVICTIONS.stored(self.clock, bytes as u64), self.next_tick());
        CacheEntry { value, bytes, birth: self.added, rank, is_held: false }
    }

    fn touch(&mut self, key: &ContentKey) {
        let tick = self.next_tick();
        let Some(entry) = self.entries.get_mut(key) else { return };
        let before = entry.rank;
        entry.rank = (BY_EVICTIONS.used(self.clock, before.0, entry.bytes as u64), tick);
        if !entry.is_held {
            self.idle.remove(&before);
            self.idle.insert(entry.rank, *key);
        }
    }

    fn evict(&mut self) {
        while self.used.saturating_add(self.reserved) > self.budget {
            let Some((priority, key)) = self.victim() else { return };
            self.clock = self.clock.max(priority);
            self.remove(&key);
        }
    }

    /// The next value to evict, of an owner over its equal share if there is one: the lowest priority of all but the
    /// newest, or else the oldest of these.
    fn victim(&self) -> Option<(u64, ContentKey)> {
        // An owner may be over its share by held values only.
        self.least(|key| self.shares.is_over(key)).or_else(|| self.least(|_| true))
    }

    fn least(&self, may_go: impl Fn(&ContentKey) -> bool) -> Option<(u64, ContentKey)> {
        let birth = |key: &ContentKey| self.entries.get(key).map_or(0, |e| e.birth);
        let is_old = |key: &ContentKey| !is_young(self.budget as u64, self.added - birth(key));
        let all = || self.idle.iter().filter(|(_, key)| may_go(key));
        let any = all().find(|(_, key)| is_old(key)).or_else(|| all().min_by_key(|(_, key)| birth(key)));
        any.map(|((priority, _), key)| (*priority, *key))
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
    fn the_least_recently_used_is_evicted_first() {
        let mut cache = ByteCache::new(30);
        for n in 1..=3 {
            assert!(cache.insert(key(n), n, 10));
        }
        assert_eq!(cache.get(&key(1)), Some(1));
        assert_eq!(cache.recent(2), [key(1), key(3)]);
        cache.insert(key(4), 4, 10);
        assert!(!cache.contains(&key(2)), "2 was used longest ago");
        assert!(cache.contains(&key(1)) && cache.contains(&key(3)) && cache.contains(&key(4)));
    }

    #[test]
    fn frequently_used_values_outlive_others_but_age() {
        let mut cache = ByteCache::new(40);
        cache.insert(key(1), 1, 10);
        for _ in 0..3 {
            cache.get(&key(1));
        }
        for n in 2..=6 {
            cache.insert(key(n), n, 10);
        }
        assert!(cache.contains(&key(1)), "used three times, the others never");
        for n in 7..=60 {
            cache.insert(key(n), n, 10);
        }
        assert!(!cache.contains(&key(1)), "that was long ago");
    }

    #[test]
    fn of_two_equally_used_values_the_cheaper_by_byte_is_evicted() {
        const KIB: usize = 1024;
        let mut cache = ByteCache::new(1200 * KIB);
        cache.insert(key(1), 1, 100 * KIB);
        cache.insert(key(2), 2, 1000 * KIB);
        cache.insert(key(3), 3, 500 * KIB);
        assert!(cache.contains(&key(1)) && !cache.contains(&key(2)));
    }

    #[test]
    fn the_newest_values_are_spared() {
        let mut cache = ByteCache::new(100);
        for n in 1..=10 {
            cache.insert(key(n), n, 10);
            for _ in 0..8 {
                cache.get(&key(n));
            }
        }
        cache.insert(key(11), 11, 10);
        cache.insert(key(12), 12, 10);
        assert!(cache.contains(&key(11)) && cache.contains(&key(12)), "though everything else is used more");
    }

    #[test]
    fn held_values_stay_over_the_budget_and_are_evicted_when_released() {
        let mut cache = ByteCache::new(10);
        cache.insert_held(key(1), 1, 10);
        cache.insert_held(key(2), 2, 10);
        assert_eq!((cache.len(), cache.used()), (2, 20));
        cache.insert(key(3), 3, 1);
        assert!(!cache.contains(&key(3)), "no room beside what is held");
        cache.release(&key(1));
        assert!(!cache.contains(&key(1)));
        assert_eq!(cache.used(), 10);
    }

    #[test]
    fn room_for_values_to_come_is_taken_from_those_that_are_not_held() {
        let mut cache = ByteCache::new(30);
        cache.insert_held(key(1), 1, 10);
        cache.insert(key(2), 2, 10);
        cache.insert(key(3), 3, 10);
        cache.reserve(10);
        assert_eq!((cache.used(), cache.contains(&key(1)), cache.contains(&key(2))), (20, true, false));
        cache.insert(key(4), 4, 10);
        assert_eq!(cache.used(), 20, "the room is kept");
        cache.reserve(0);
        cache.insert(key(5), 5, 10);
        assert_eq!(cache.used(), 30);
    }

    /// The n-th object of an owner.
    fn owned(owner: u8, n: u8) -> ContentKey {
        let mut bytes = [owner; 32];
        bytes[0] = n;
        ContentKey::from_bytes(bytes)
    }

    #[test]
    fn a_flood_of_one_owner_evicts_its_own_values() {
        let mut cache = ByteCache::new(100);
        for n in 0..4 {
            cache.insert(owned(b'b', n), n, 10);
        }
        for n in 0..200 {
            cache.insert(owned(b'a', n), n, 10);
        }
        assert!((0..4).all(|n| cache.contains(&owned(b'b', n))), "less than a half, and never used again");
        assert!(cache.contains(&owned(b'a', 199)) && !cache.contains(&owned(b'a', 100)));
        for n in 4..40 {
            cache.insert(owned(b'b', n), n, 10);
        }
        let n_of = |owner| (0..=255).filter(|n| cache.contains(&owned(owner, *n))).count();
        assert_eq!((n_of(b'a'), n_of(b'b')), (5, 5), "in the end each has a half");
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(u8, usize),
        InsertHeld(u8, usize),
        Get(u8),
        Hold(u8),
        Release(u8),
        Remove(u8),
    }

    fn moves() -> impl Strategy<Value = Vec<Operation>> {
        let key = 0u8..6;
        let one = prop_oneof![
            (key.clone(), 0usize..12).prop_map(|(k, b)| Operation::Insert(k, b)),
            (key.clone(), 0usize..12).prop_map(|(k, b)| Operation::InsertHeld(k, b)),
            key.clone().prop_map(Operation::Get),
            key.clone().prop_map(Operation::Hold),
            key.clone().prop_map(Operation::Release),
            key.prop_map(Operation::Remove),
        ];
        proptest::collection::vec(one, 0..60)
    }

    proptest! {
        #[test]
        fn the_accounting_is_exact_after_every_operation(moves in moves()) {
            let mut cache = ByteCache::new(20);
            for m in moves {
                match m {
                    Operation::Insert(k, b) => { cache.insert(key(k), k, b); }
                    Operation::InsertHeld(k, b) => cache.insert_held(key(k), k, b),
                    Operation::Get(k) => { cache.get(&key(k)); }
                    Operation::Hold(k) => { cache.hold(&key(k)); }
                    Operation::Release(k) => cache.release(&key(k)),
                    Operation::Remove(k) => { cache.remove(&key(k)); }
                }
                let sum: usize = cache.entries.values().map(|e| e.bytes).sum();
                let idle = cache.entries.values().filter(|e| !e.is_held).count();
                prop_assert_eq!(cache.used, sum);
                prop_assert_eq!(cache.shares.sum(), (cache.len(), sum as u64));
                prop_assert_eq!(cache.idle.len(), idle);
                prop_assert!(cache.idle.iter().all(|(rank, key)| cache.entries[key].rank == *rank));
                prop_assert!(cache.used <= cache.budget || idle == 0);
            }
        }
    }
}
