//! Outputs that this proxy knows of: what was READY a moment ago need not be asked for again.
//!
//! A memory, not a truth. What is in it may be gone by now; then the PD worker says so, the entry is forgotten, and the
//! ladder goes on. Each entry is young at first, and believed without a question; later only its description is of
//! use, for an output that a PD worker says it still holds. Bounded by count: an entry is a few hundred bytes. Time is an
//! argument, since the planner's simulator remembers with it too.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, EncodedItem};

/// The memory.
#[derive(Debug)]
pub struct Recents {
    young_for: Duration,
    capacity: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<ContentKey, Entry>,
    /// The same keys, the one noted longest ago first.
    by_age: BTreeMap<u64, ContentKey>,
    next_turn: u64,
}

#[derive(Debug)]
struct Entry {
    turn: u64,
    noted: Instant,
    item: EncodedItem,
    peers: Vec<String>,
}

impl Recents {
    /// Remembers `capacity` outputs, and believes each for `young_for`.
    pub fn new(capacity: usize, young_for: Duration) -> Self {
        Self { young_for, capacity, table: Mutex::default() }
    }

    /// An output is READY.
    pub fn note(&self, item: &EncodedItem, peers: &[String], noted: Instant) {
        if self.capacity == 0 {
            return;
        }
        let mut table = self.table();
        let key = item.key;
        table.remove(&key);
        if table.entries.len() >= self.capacity
            && let Some((_, oldest)) = table.by_age.pop_first()
        {
            table.entries.remove(&oldest);
        }
        let turn = table.next_turn;
        table.next_turn += 1;
        table.by_age.insert(turn, key);
        let (item, peers) = (item.clone(), peers.to_vec());
        table.entries.insert(key, Entry { turn, noted, item, peers });
    }

    /// The output and its peers, if it was READY a moment ago.
    pub fn young(&self, key: &ContentKey, now: Instant) -> Option<(EncodedItem, Vec<String>)> {
        let table = self.table();
        let is_young = |entry: &&Entry| now.saturating_duration_since(entry.noted) < self.young_for;
        let entry = table.entries.get(key).filter(is_young)?;
        Some((entry.item.clone(), entry.peers.clone()))
    }

    /// What the output is, however long ago it was READY.
    pub fn described(&self, key: &ContentKey) -> Option<EncodedItem> {
        self.table().entries.get(key).map(|entry| entry.item.clone())
    }

    /// The output, if it became READY after `since`; an older entry is forgotten: it was found to be gone.
    pub fn renewed(&self, key: &ContentKey, since: Instant) -> Option<(EncodedItem, Vec<String>)> {
        let mut table = self.table();
        let entry = table.entries.get(key)?;
        if entry.noted > since {
            return Some((entry.item.clone(), entry.peers.clone()));
        }
        table.remove(key);
        None
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn remove(&mut self, key: &ContentKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.by_age.remove(&entry.turn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::tests::item;

    fn key(n: u8) -> ContentKey {
        ContentKey::from_bytes([n; 32])
    }

    #[test]
    fn an_output_is_believed_for_a_moment_and_described_for_longer() {
        let (recents, start) = (Recents::new(8, Duration::from_secs(5)), Instant::now());
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
        let recents = Recents::new(2, Duration::from_secs(5));
        for n in [1, 2, 1, 3] {
            recents.note(&item(n), &[], Instant::now());
        }
        let known = [1, 2, 3].map(|n| recents.described(&key(n)).is_some());
        assert_eq!(known, [true, false, true]);
        assert_eq!(recents.table().by_age.len(), 2);
        let none = Recents::new(0, Duration::from_secs(5));
        none.note(&item(1), &[], Instant::now());
        assert!(none.described(&key(1)).is_none());
    }

    #[test]
    fn an_output_found_gone_is_forgotten_unless_it_was_made_again_since() {
        let recents = Recents::new(2, Duration::from_secs(5));
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
