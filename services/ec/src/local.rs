//! A worker's own cache of encoder outputs, with the requests that hold them.
//!
//! A request may hold a key before its rows arrive; they are then held on arrival. Held rows stay, past the budget if
//! necessary (admission bounds the number of requests). The others are evicted, the lowest value first
//! ([`crate::policy`]). Knows no store and no async.

use crate::cache::ByteCache;
use std::collections::{BTreeSet, HashMap};
use triptych_core::{ContentKey, EncoderOutput, RequestId};

/// The local cache.
#[derive(Debug)]
pub struct LocalCache {
    rows: ByteCache<EncoderOutput>,
    /// Keys held by each request.
    holds: HashMap<RequestId, BTreeSet<ContentKey>>,
    /// Number of requests that hold each key; never zero. The inverse of `holds`.
    n_holders: HashMap<ContentKey, usize>,
}

impl LocalCache {
    /// An empty cache. A budget of zero keeps only what requests hold.
    pub fn new(budget_bytes: usize) -> Self {
        Self { rows: ByteCache::new(budget_bytes), holds: HashMap::new(), n_holders: HashMap::new() }
    }

    /// Holds the key for the request until [`Self::release`]. Idempotent.
    pub fn hold(&mut self, request: RequestId, key: ContentKey) {
        if self.holds.entry(request).or_default().insert(key) {
            *self.n_holders.entry(key).or_default() += 1;
            self.rows.hold(&key);
        }
    }

    /// Releases everything that the request holds. Idempotent.
    pub fn release(&mut self, request: RequestId) {
        for key in self.holds.remove(&request).unwrap_or_default() {
            if let Some(n) = self.n_holders.get_mut(&key) {
                *n -= 1;
                if *n == 0 {
                    self.n_holders.remove(&key);
                    self.rows.release(&key);
                }
            }
        }
    }

    /// Adds rows, unless the key has some.
    pub fn insert(&mut self, output: EncoderOutput) {
        let (key, bytes) = (output.item().key, output.rows().len());
        if self.is_held(&key) {
            self.rows.insert_held(key, output, bytes);
        } else {
            self.rows.insert(key, output, bytes);
        }
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
        self.n_holders.contains_key(key)
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

    proptest! {
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
                prop_assert_eq!(held.len(), cache.n_holders.len());
                let resident = (0..5).filter(|k| cache.contains(&key(*k))).count();
                let idle = (0..5).filter(|k| cache.contains(&key(*k)) && !cache.is_held(&key(*k))).count();
                prop_assert_eq!(cache.used_bytes(), resident * 128);
                prop_assert!(cache.used_bytes() <= 300 || idle == 0);
            }
        }
    }
}
