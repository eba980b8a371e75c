//! A worker's own cache of encoder outputs, with the requests that hold them.
//!
//! A request may hold a key before its rows arrive; they are then held on arrival. Held rows stay. The others are evicted,
//! the lowest value first ([`crate::policy`]). A request that is admitted by bytes ([`LocalCache::try_hold`]) has room kept
//! for the rows to come, so that all rows together stay within the budget; [`LocalCache::hold`] takes no room and may pass it.
//! Knows no store and no async.

use crate::cache::ByteCache;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, RequestId};

/// The local cache.
#[derive(Debug)]
pub struct LocalCache {
    rows: ByteCache<EncoderOutput>,
    /// Keys held by each request.
    holds: HashMap<RequestId, BTreeSet<ContentKey>>,
    /// Holders of each key. The inverse of `holds`.
    holders: HashMap<ContentKey, KeyHolders>,
    /// Sum of `bytes` over `holders`.
    held_bytes: usize,
}

/// Requests that hold a key.
#[derive(Clone, Copy, Debug, Default)]
struct KeyHolders {
    /// Number of requests; never zero.
    n: usize,
    /// Bytes of the budget that are theirs: as announced until the rows are here. Zero if none was admitted by bytes.
    bytes: usize,
}

/// Result of [`LocalCache::try_hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldOutcome {
    /// The request holds its items.
    Held,
    /// Other requests hold too much; nothing is held.
    NoRoom,
    /// The items are larger than the whole budget; nothing is held.
    TooLarge {
        /// Bytes of the items.
        bytes: usize,
        /// The budget.
        budget: usize,
    },
}

impl LocalCache {
    /// An empty cache. A budget of zero keeps only what requests hold.
    pub fn new(budget_bytes: usize) -> Self {
        Self {
            rows: ByteCache::new(budget_bytes),
            holds: HashMap::new(),
            holders: HashMap::new(),
            held_bytes: 0,
        }
    }

    /// Holds the key for the request until [`Self::release`], without room for rows to come. Idempotent.
    pub fn hold(&mut self, request: RequestId, key: ContentKey) {
        self.hold_bytes(request, key, 0);
    }

    /// Holds all items for the request until [`Self::release`], if they fit the budget beside what others hold; rows that
    /// nobody holds make room. An item that another request holds costs nothing.
    pub fn try_hold(&mut self, request: RequestId, items: &[EncodedItem]) -> HoldOutcome {
        let sizes: BTreeMap<ContentKey, usize> =
            items.iter().map(|item| (item.key, item.payload_len().unwrap_or(usize::MAX))).collect();
        let budget = self.rows.budget();
        let bytes = sizes.values().fold(0_usize, |sum, bytes| sum.saturating_add(*bytes));
        if bytes > budget {
            return HoldOutcome::TooLarge { bytes, budget };
        }
        let is_counted = |key| self.holders.get(key).is_some_and(|holders| holders.bytes > 0);
        let more: usize = sizes.iter().filter(|(key, _)| !is_counted(key)).map(|(_, bytes)| bytes).sum();
        if more > 0 && self.held_bytes.saturating_add(more) > budget {
            return HoldOutcome::NoRoom;
        }
        for (key, bytes) in sizes {
            self.hold_bytes(request, key, bytes);
        }
        self.keep_room();
        HoldOutcome::Held
    }

    fn hold_bytes(&mut self, request: RequestId, key: ContentKey, bytes: usize) {
        if !self.holds.entry(request).or_default().insert(key) {
            return;
        }
        let holders = self.holders.entry(key).or_default();
        holders.n += 1;
        if holders.bytes == 0 {
            holders.bytes = bytes;
            self.held_bytes += bytes;
        }
        self.rows.hold(&key);
    }

    /// Releases everything that the request holds. Idempotent.
    pub fn release(&mut self, request: RequestId) {
        for key in self.holds.remove(&request).unwrap_or_default() {
            let Some(holders) = self.holders.get_mut(&key) else { continue };
            holders.n -= 1;
            if holders.n == 0 {
                self.held_bytes -= holders.bytes;
                self.holders.remove(&key);
                self.rows.release(&key);
            }
        }
        self.keep_room();
    }

    /// Keeps room for the rows that are counted and not here.
    fn keep_room(&mut self) {
        let to_come = self.holders.iter().filter(|(key, _)| !self.rows.contains(key));
        let bytes = to_come.map(|(_, holders)| holders.bytes).sum();
        self.rows.reserve(bytes);
    }

    /// Adds rows, unless the key has some.
    pub fn insert(&mut self, output: EncoderOutput) {
        let (key, bytes) = (output.item().key, output.rows().len());
        let Some(holders) = self.holders.get_mut(&key) else {
            self.rows.insert(key, output, bytes);
            return;
        };
        if holders.bytes > 0 {
            self.held_bytes = self.held_bytes - holders.bytes + bytes;
            holders.bytes = bytes;
        }
        // Its place is empty from here on, so that nothing is evicted for it twice.
        let rows_of = |(k, h): (&ContentKey, &KeyHolders)| {
            if *k == key || self.rows.contains(k) { 0 } else { h.bytes }
        };
        let others = self.holders.iter().map(rows_of).sum();
        self.rows.reserve(others);
        self.rows.insert_held(key, output, bytes);
    }

    /// The rows. Counts as a use.
    pub fn get(&mut self, key: &ContentKey) -> Option<EncoderOutput> {
        self.rows.get(key)
    }

    /// True if the rows are cached.
    pub fn contains(&self, key: &ContentKey) -> bool {
        self.rows.contains(key)
    }

    /// At most `limit` cached keys, held ones first, then the most recently used.
    pub fn recent(&self, limit: usize) -> Vec<ContentKey> {
        self.rows.recent(limit)
    }

    /// True if a request holds the key.
    pub fn is_held(&self, key: &ContentKey) -> bool {
        self.holders.contains_key(key)
    }

    /// Bytes that requests hold: of their rows, and of those to come. Only those that were admitted by bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The budget.
    pub fn budget_bytes(&self) -> usize {
        self.rows.budget()
    }

    /// Bytes of all rows.
    pub fn used_bytes(&self) -> usize {
        self.rows.used()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::sample_output;
    use proptest::prelude::*;

    fn key(n: u8) -> ContentKey {
        ContentKey::from_bytes([n; 32])
    }

    fn request(n: u8) -> RequestId {
        RequestId::from_bits(n.into())
    }

    #[test]
    fn rows_stay_until_the_last_request_gives_them_back() {
        let mut cache = LocalCache::new(0);
        cache.hold(request(1), key(1));
        cache.hold(request(2), key(1));
        cache.insert(sample_output(key(1), 64));
        cache.release(request(1));
        assert!(cache.contains(&key(1)));
        cache.release(request(2));
        assert!(!cache.contains(&key(1)), "no request holds it and the budget is zero");
        assert_eq!(cache.used_bytes(), 0);
    }

    fn item(n: u8) -> EncodedItem {
        sample_output(key(n), 128).item().clone()
    }

    #[test]
    fn a_request_that_does_not_fit_beside_others_waits_and_one_that_never_fits_is_told() {
        let mut cache = LocalCache::new(300);
        assert_eq!(cache.try_hold(request(1), &[item(1), item(2), item(1)]), HoldOutcome::Held);
        assert_eq!(cache.try_hold(request(2), &[item(3)]), HoldOutcome::NoRoom);
        assert_eq!(cache.try_hold(request(3), &[item(2)]), HoldOutcome::Held, "its rows are counted already");
        let three = [item(1), item(2), item(3)];
        assert_eq!(cache.try_hold(request(4), &three), HoldOutcome::TooLarge { bytes: 384, budget: 300 });
        cache.release(request(1));
        assert_eq!(cache.held_bytes(), 128);
        assert_eq!(cache.try_hold(request(2), &[item(3)]), HoldOutcome::Held);
    }

    #[test]
    fn kept_rows_make_room_before_a_load_starts() {
        let mut cache = LocalCache::new(300);
        cache.insert(sample_output(key(1), 128));
        cache.insert(sample_output(key(2), 128));
        assert_eq!(cache.try_hold(request(1), &[item(3)]), HoldOutcome::Held);
        assert_eq!(cache.used_bytes(), 128, "one of them went");
        cache.insert(sample_output(key(3), 128));
        assert_eq!(cache.used_bytes(), 256, "and the other stays");
    }

    proptest! {
        #[test]
        fn rows_of_admitted_requests_and_kept_rows_never_pass_the_budget(
            moves in proptest::collection::vec((0u8..4, 0u8..4, 0u8..6), 0..80),
        ) {
            let mut cache = LocalCache::new(300);
            for (what, r, k) in moves {
                match what {
                    0 => { cache.try_hold(request(r), &[item(k), item((k + 1) % 6)]); }
                    1 => cache.release(request(r)),
                    2 if cache.is_held(&key(k)) => cache.insert(sample_output(key(k), 128)),
                    // What nobody waits for, as the outputs of a colocated encoder.
                    _ => cache.insert(sample_output(key(k), 128)),
                }
                let counted: usize = cache.holders.values().map(|h| h.bytes).sum();
                prop_assert_eq!(cache.held_bytes(), counted);
                prop_assert!(cache.held_bytes() <= 300 && cache.used_bytes() <= 300);
            }
        }

        #[test]
        fn held_rows_never_go_and_the_rest_fits_the_budget(
            moves in proptest::collection::vec((0u8..4, 0u8..4, 0u8..5), 0..60),
        ) {
            let mut cache = LocalCache::new(300);
            for (what, r, k) in moves {
                match what {
                    0 => cache.hold(request(r), key(k)),
                    1 => cache.release(request(r)),
                    2 => cache.insert(sample_output(key(k), 128)),
                    _ => { cache.get(&key(k)); }
                }
                let held: BTreeSet<_> = cache.holds.values().flatten().collect();
                prop_assert_eq!(held.len(), cache.holders.len());
                let resident = (0..5).filter(|k| cache.contains(&key(*k))).count();
                let idle = (0..5).filter(|k| cache.contains(&key(*k)) && !cache.is_held(&key(*k))).count();
                prop_assert_eq!(cache.used_bytes(), resident * 128);
                prop_assert!(cache.used_bytes() <= 300 || idle == 0);
            }
        }
    }
}
