//! Eviction policy of caches and stores.
//!
//! GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
//! Policy", HPL-98-69R1, 1998): an object's priority is a clock plus, for each use, the cost by byte of encoding
//! it again. The lowest priority is evicted first, and the clock then moves up to it, so that uses age. There are two
//! differences. A use counts until the clock has passed it, so the priority is one number without a use count; and the
//! clock may be the time of day, where processes share only files.
//!
//! Encoding an item has a fixed cost and a cost that grows with its rows, so a byte of a small object has a higher
//! priority. The newest objects are about to be read by the requests that they were encoded for: objects that are
//! [`is_young`] are spared as long as there are others.
//!
//! Owners ([`ContentKey::owner`]) share the capacity: objects of an owner over its equal share are evicted first, so
//! one tenant's flood evicts only its own objects ([`OwnerShares`]).

use std::collections::HashMap;
use triptych_core::{ContentKey, Owner};

/// Bytes of rows whose encoding takes as long as the fixed cost of a job.
const JOB_BYTES: u64 = 256 << 10;
/// Smallest size that counts, since every object has an overhead.
const LEAST_BYTES: u64 = 4 << 10;
/// Most uses that count.
const MAX_USES: u64 = 8;
/// Fraction of a budget, as a divisor, that the newest objects are spared for.
const YOUNG_SHARE: u64 = 4;

/// Unit of the priority in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    /// Priority that a use of a large object adds, in clock steps.
    unit: u64,
}

/// The clock is the largest evicted priority.
pub(crate) const BY_EVICTIONS: Policy = Policy { unit: 1024 };

/// The clock is time in milliseconds: a use keeps a large object ten minutes ahead of one that was not used.
pub(crate) const BY_TIME: Policy = Policy { unit: 10 * 60 * 1000 };

impl Policy {
    /// Priority of an object of `bytes` when it is stored.
    pub(crate) fn stored(self, clock: u64, bytes: u64) -> u64 {
        clock.saturating_add(self.of_a_use(bytes))
    }

    /// Priority of an object after a use; `before` is the one before it.
    pub(crate) fn used(self, clock: u64, before: u64, bytes: u64) -> u64 {
        let one = self.of_a_use(bytes);
        let ahead = before.saturating_sub(clock).saturating_add(one).min(one.saturating_mul(MAX_USES));
        clock.saturating_add(ahead)
    }

    /// Priority that a use adds: the cost of encoding by byte.
    fn of_a_use(self, bytes: u64) -> u64 {
        self.unit + self.unit * JOB_BYTES / bytes.max(LEAST_BYTES)
    }
}

/// True for one of the newest objects. `bytes_since`: bytes stored after it.
pub(crate) fn is_young(budget: u64, bytes_since: u64) -> bool {
    bytes_since <= budget / YOUNG_SHARE
}

/// Bytes of each owner.
#[derive(Debug)]
pub(crate) struct OwnerShares {
    budget: u64,
    /// Objects and bytes; no owner without objects.
    of: HashMap<Owner, (usize, u64)>,
}

impl OwnerShares {
    pub(crate) fn of_budget(budget: u64) -> Self {
        Self { budget, of: HashMap::new() }
    }

    pub(crate) fn add(&mut self, key: &ContentKey, bytes: u64) {
        let (n, sum) = self.of.entry(key.owner()).or_default();
        (*n, *sum) = (*n + 1, sum.saturating_add(bytes));
    }

    pub(crate) fn take(&mut self, key: &ContentKey, bytes: u64) {
        let Some((n, sum)) = self.of.get_mut(&key.owner()) else { return };
        (*n, *sum) = (n.saturating_sub(1), sum.saturating_sub(bytes));
        if *n == 0 {
            self.of.remove(&key.owner());
        }
    }

    /// True if the key's owner is over its equal share. A single object is never over it.
    pub(crate) fn is_over(&self, key: &ContentKey) -> bool {
        let part = self.budget / self.of.len().max(1) as u64;
        self.of.get(&key.owner()).is_some_and(|(n, bytes)| *n > 1 && *bytes > part)
    }

    /// Objects and bytes of all.
    #[cfg(test)]
    pub(crate) fn sum(&self) -> (usize, u64) {
        self.of.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

/// A candidate for eviction.
#[derive(Clone, Debug)]
pub(crate) struct EvictionCandidate<T> {
    pub(crate) what: T,
    pub(crate) key: ContentKey,
    pub(crate) bytes: u64,
    pub(crate) priority: u64,
    /// Grows from one stored object to the next.
    pub(crate) born: u64,
    pub(crate) is_young: bool,
}

/// The order of eviction: first objects of owners over their share, while they are over it, then the rest; in both by
/// priority, the lowest first, then the young ones, the oldest first.
pub(crate) fn order<T>(
    budget: u64,
    mut all: Vec<EvictionCandidate<T>>,
) -> impl Iterator<Item = EvictionCandidate<T>> {
    let mut shares = OwnerShares::of_budget(budget);
    all.iter().for_each(|c| shares.add(&c.key, c.bytes));
    all.sort_by_key(|c| (c.is_young, if c.is_young { c.born } else { c.priority }, c.born));
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for candidate in all {
        if shares.is_over(&candidate.key) {
            shares.take(&candidate.key, candidate.bytes);
            first.push(candidate);
        } else {
            rest.push(candidate);
        }
    }
    first.into_iter().chain(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(n: u8, owner: u8, priority: u64, is_young: bool) -> EvictionCandidate<u8> {
        let mut key = [owner; 32];
        key[0] = n;
        let key = ContentKey::from_bytes(key);
        EvictionCandidate { what: n, key, bytes: 10, priority, born: n.into(), is_young }
    }

    #[test]
    fn the_lowest_priority_is_evicted_first_and_young_objects_last() {
        let all = vec![candidate(1, 7, 90, false), candidate(2, 7, 5, false), candidate(3, 7, 9, true)];
        let all = [all, vec![candidate(4, 7, 1, true)]].concat();
        let went: Vec<_> = order(100, all).map(|c| c.what).collect();
        assert_eq!(went, [2, 1, 3, 4]);
    }

    #[test]
    fn an_owner_with_too_much_gives_way_until_it_has_an_equal_part() {
        let flood = (10..18).map(|n| candidate(n, 1, 1000, n > 15));
        let other = [candidate(1, 2, 1, false), candidate(2, 2, 2, false)];
        let all: Vec<_> = flood.chain(other).collect();
        let went: Vec<_> = order(60, all).map(|c| c.what).collect();
        assert_eq!(went, [10, 11, 12, 13, 14, 1, 2, 15, 16, 17], "30 of 60 bytes are its part");
    }

    #[test]
    fn one_large_object_is_no_flood() {
        let large = EvictionCandidate { bytes: 50, ..candidate(1, 1, 9, false) };
        let all = vec![large, candidate(2, 2, 8, false)];
        assert_eq!(order(60, all).map(|c| c.what).collect::<Vec<_>>(), [2, 1]);
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_byte_of_a_small_object_is_worth_more_and_a_use_adds_worth() {
        let p = BY_EVICTIONS;
        assert!(p.stored(0, 64 << 10) > p.stored(0, MIB));
        assert_eq!(p.stored(0, 1), p.stored(0, 4 << 10), "no object counts as smaller than its place");
        let stored = p.stored(0, MIB);
        assert_eq!(p.used(0, stored, MIB), 2 * stored);
    }

    #[test]
    fn uses_of_long_ago_count_for_nothing_and_many_count_as_eight() {
        for p in [BY_EVICTIONS, BY_TIME] {
            let one = p.stored(0, MIB);
            let often = (0..100).fold(one, |priority, _| p.used(0, priority, MIB));
            assert_eq!(often, 8 * one);
            assert_eq!(p.used(9 * one, often, MIB), 10 * one, "the clock has passed it");
        }
    }
}
