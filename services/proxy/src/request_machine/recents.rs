//! Outputs that were READY a moment ago, which need not be asked for again.
//!
//! A memory, not a truth. An output in it may be gone by now; then the PD worker reports that, the entry is forgotten,
//! and the output is encoded again. Each entry is young at first, and believed without a question; later only its
//! description is of use, for an output that a PD worker reports to hold. Bounded by count: an entry is a few hundred
//! bytes.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, EncodedItem};

/// The memory.
#[derive(Debug)]
pub struct Recents {
    young_for: Duration,
    capacity: usize,
    outputs: HashMap<ContentKey, RecentOutput>,
    /// The same keys, the one noted longest ago first.
    by_age: BTreeMap<u64, ContentKey>,
    next_order: u64,
}

#[derive(Debug)]
struct RecentOutput {
    order: u64,
    noted: Instant,
    item: EncodedItem,
    peers: Vec<String>,
}

impl Recents {
    /// Remembers `capacity` outputs, and believes each for `young_for`.
    pub fn new(capacity: usize, young_for: Duration) -> Self {
        Self { young_for, capacity, outputs: HashMap::new(), by_age: BTreeMap::new(), next_order: 0 }
    }

    /// An output is READY.
    pub fn note(&mut self, item: &EncodedItem, peers: &[String], noted: Instant) {
        if self.capacity == 0 {
            return;
        }
        let key = item.key;
        self.remove(&key);
        if self.outputs.len() >= self.capacity
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.outputs.remove(&oldest);
        }
        let order = self.next_order;
        self.next_order += 1;
        self.by_age.insert(order, key);
        let (item, peers) = (item.clone(), peers.to_vec());
        self.outputs.insert(key, RecentOutput { order, noted, item, peers });
    }

    /// The output and its peers, if it was READY a moment ago.
    pub fn young(&self, key: &ContentKey, now: Instant) -> Option<(EncodedItem, Vec<String>)> {
        let is_young = |entry: &&RecentOutput| now.saturating_duration_since(entry.noted) < self.young_for;
        let entry = self.outputs.get(key).filter(is_young)?;
        Some((entry.item.clone(), entry.peers.clone()))
    }

    /// Description of the output, however long ago it was READY.
    pub fn described(&self, key: &ContentKey) -> Option<EncodedItem> {
        self.outputs.get(key).map(|entry| entry.item.clone())
    }

    /// The output, if it became READY after `since`; an older entry is forgotten: it was found to be gone.
    pub fn renewed(&mut self, key: &ContentKey, since: Instant) -> Option<(EncodedItem, Vec<String>)> {
        let entry = self.outputs.get(key)?;
        if entry.noted > since {
            return Some((entry.item.clone(), entry.peers.clone()));
        }
        self.remove(key);
        None
    }

    fn remove(&mut self, key: &ContentKey) {
        if let Some(entry) = self.outputs.remove(key) {
            self.by_age.remove(&entry.order);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_machine::tests::item;

    fn key(n: u8) -> ContentKey {
        ContentKey::from_bytes([n; 32])
    }

    #[test]
    fn an_output_is_believed_for_a_moment_and_described_for_longer() {
        let (mut recents, start) = (Recents::new(8, Duration::from_secs(5)), Instant::now());
        recents.note(&item(1), &[], start);
        assert!(recents.young(&key(1), start).is_some() && recents.young(&key(2), start).is_none());
        let later = start + Duration::from_secs(5);
        assert!(recents.young(&key(1), later).is_none());
        assert_eq!(recents.described(&key(1)).map(|item| item.key), Some(key(1)));
        recents.note(&item(1), &[], later);
        assert!(recents.young(&key(1), later).is_some(), "noted again, young again");
    }

    #[test]
    fn it_is_bounded_and_forgets_what_was_noted_longest_ago() {
        let mut recents = Recents::new(2, Duration::from_secs(5));
        for n in [1, 2, 1, 3] {
            recents.note(&item(n), &[], Instant::now());
        }
        let known = [1, 2, 3].map(|n| recents.described(&key(n)).is_some());
        assert_eq!(known, [true, false, true]);
        assert_eq!(recents.by_age.len(), 2);
        let mut none = Recents::new(0, Duration::from_secs(5));
        none.note(&item(1), &[], Instant::now());
        assert!(none.described(&key(1)).is_none());
    }

    #[test]
    fn an_output_found_gone_is_forgotten_unless_it_was_made_again_since() {
        let mut recents = Recents::new(2, Duration::from_secs(5));
        let seen = Instant::now();
        let later = seen + Duration::from_millis(1);
        recents.note(&item(1), &[], seen);
        assert!(recents.renewed(&key(1), seen).is_none());
        assert!(recents.young(&key(1), later).is_none());
        recents.note(&item(1), &[], later);
        assert!(recents.renewed(&key(1), seen).is_some(), "somebody else had it made again");
        assert!(recents.young(&key(1), later).is_some());
    }
}
