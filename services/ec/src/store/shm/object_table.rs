//! The object table of a slab: slots and pages of objects, unfinished writes, and eviction.
//!
//! A slot is `FREE`, then `FILLING` while its writer copies the object in, then `READY` and in the index, then `FREE`
//! again with the next generation. Everything here needs the lock and is short: bytes are copied without it. A writer
//! copies into pages of its own. A reader copies without the lock and then checks that the slot's generation has not
//! changed ([`Words::is_still`]): a sequence lock (Boehm, "Can seqlocks get along with programming language memory
//! models?", MSPC 2012). So nothing is pinned, eviction never waits for a reader, and a reader that dies leaves no
//! state.
//!
//! The slots are the source of truth: index, lists and page map are derived, and [`Words::recover`] rebuilds them after
//! the holder of the lock died. So each step below writes a slot's state first when it frees it and last when it fills
//! it.

use super::layout::{Field, PAGE_BYTES};
use super::pages::Damaged;
use super::words::Words;
use crate::policy::{BY_EVICTIONS, EvictionCandidate, is_young, order};
use std::sync::atomic::{Ordering, fence};
use triptych_core::ContentKey;

/// Fraction of the slab freed by one eviction, as a divisor, since a walk over all slots is expensive.
const EVICTED_AT_ONCE: usize = 64;

const FREE: u64 = 0;
const FILLING: u64 = 1;
const READY: u64 = 2;

/// Words of a slot. A link is a slot's number plus one, so that zero is none.
#[derive(Clone, Copy)]
enum SlotField {
    State = 0,
    Generation = 1,
    Len = 2,
    First = 3,
    Link = 4,
    Priority = 5,
    /// Value of [`Field::Added`] when it was stored.
    Birth = 6,
    StoredMs = 7,
    Owner = 8,
    Key = 9,
}

/// An object to store.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewObject {
    pub(super) key: ContentKey,
    pub(super) len: usize,
    /// Process of its writer.
    pub(super) owner: u64,
    pub(super) now_ms: u64,
}

/// A slot and its pages, held by a writer that fills it or a reader that copies from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    slot: usize,
    generation: u64,
    pub(super) len: usize,
    pub(super) pages: Vec<u32>,
}

/// One object of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectEntry {
    pub(super) key: ContentKey,
    pub(super) len: u64,
    pub(super) stored_ms: u64,
}

/// Returns true if a process is alive.
pub(super) type IsAlive<'a> = &'a dyn Fn(u64) -> bool;

impl Words<'_> {
    /// The object of a key. Counts as a use.
    pub(super) fn find(&self, key: &ContentKey) -> Result<Option<Extent>, Damaged> {
        let Some(extent) = self.peek(key)? else { return Ok(None) };
        let priority = BY_EVICTIONS.used(
            self.field(Field::Clock),
            self.of(extent.slot, SlotField::Priority),
            extent.len as u64,
        );
        self.put(extent.slot, SlotField::Priority, priority);
        Ok(Some(extent))
    }

    /// The object of a key. Not a use.
    pub(super) fn peek(&self, key: &ContentKey) -> Result<Option<Extent>, Damaged> {
        self.lookup(key)?.map(|slot| self.extent(slot)).transpose()
    }

    /// True if the key has an object. Not a use.
    pub(super) fn has(&self, key: &ContentKey) -> Result<bool, Damaged> {
        Ok(self.lookup(key)?.is_some())
    }

    /// True if the bytes copied from the extent are the object's. Needs no lock.
    pub(super) fn is_still(&self, extent: &Extent) -> bool {
        fence(Ordering::Acquire);
        self.of(extent.slot, SlotField::Generation) == extent.generation
    }

    /// Allocates a slot and pages for an object, with eviction. `None`: the whole slab is being filled by live writers.
    pub(super) fn reserve(&self, new: &NewObject, is_alive: IsAlive<'_>) -> Result<Option<Extent>, Damaged> {
        let n_pages = new.len.div_ceil(PAGE_BYTES);
        if !self.has_room(n_pages) {
            self.reap(is_alive)?;
        }
        if !self.has_room(n_pages) {
            self.evict(n_pages)?;
        }
        let Some(pages) = self.take_pages(n_pages)? else { return Ok(None) };
        let Some(slot) = self.slot_of_link(self.field(Field::FreeSlot))? else {
            self.give_pages(&pages);
            return Ok(None);
        };
        self.set(Field::FreeSlot, self.of(slot, SlotField::Link));
        self.put(slot, SlotField::Len, new.len as u64);
        self.put(slot, SlotField::First, pages.first().map_or(0, |p| u64::from(*p)));
        self.put(slot, SlotField::StoredMs, new.now_ms);
        self.put(slot, SlotField::Owner, new.owner);
        self.set_key(self.geometry.slot(slot) + SlotField::Key as usize, &new.key);
        self.put(slot, SlotField::State, FILLING);
        let generation = self.of(slot, SlotField::Generation);
        Ok(Some(Extent { slot, generation, len: new.len, pages }))
    }

    /// Makes a filled slot the object of its key. False if the key got one meanwhile; the slot is then free.
    pub(super) fn publish(&self, filled: &Extent) -> Result<bool, Damaged> {
        let slot = filled.slot;
        if self.of(slot, SlotField::State) != FILLING
            || self.of(slot, SlotField::Generation) != filled.generation
        {
            return Err(Damaged);
        }
        let key = self.key_of(slot);
        if self.lookup(&key)?.is_some() {
            self.free(slot)?;
            return Ok(false);
        }
        let added = self.field(Field::Added).saturating_add(filled.len as u64);
        self.set(Field::Added, added);
        self.put(slot, SlotField::Birth, added);
        self.put(slot, SlotField::Priority, BY_EVICTIONS.stored(self.field(Field::Clock), filled.len as u64));
        self.put(slot, SlotField::State, READY);
        self.link(slot, &key);
        self.bump(Field::Events);
        Ok(true)
    }

    /// Frees a slot that will not be filled.
    pub(super) fn abandon(&self, filled: &Extent) -> Result<(), Damaged> {
        let is_ours = self.of(filled.slot, SlotField::State) == FILLING
            && self.of(filled.slot, SlotField::Generation) == filled.generation;
        if is_ours { self.free(filled.slot) } else { Ok(()) }
    }

    /// Removes the object of a key. Returns true if there was one.
    pub(super) fn remove(&self, key: &ContentKey) -> Result<bool, Damaged> {
        let Some(slot) = self.lookup(key)? else { return Ok(false) };
        self.evict_slot(slot)?;
        self.bump(Field::Events);
        Ok(true)
    }

    /// Every object after a key, in no order.
    pub(super) fn entries(&self, after: Option<&ContentKey>) -> Vec<ObjectEntry> {
        let ready = (0..self.geometry.n_slots).filter(|slot| self.of(*slot, SlotField::State) == READY);
        let entry = |slot| ObjectEntry {
            key: self.key_of(slot),
            len: self.of(slot, SlotField::Len),
            stored_ms: self.of(slot, SlotField::StoredMs),
        };
        ready.map(entry).filter(|entry| after < Some(&entry.key)).collect()
    }

    /// Frees the slots of dead writers.
    pub(super) fn reap(&self, is_alive: IsAlive<'_>) -> Result<(), Damaged> {
        for slot in 0..self.geometry.n_slots {
            if self.of(slot, SlotField::State) == FILLING && !is_alive(self.of(slot, SlotField::Owner)) {
                self.free(slot)?;
            }
        }
        Ok(())
    }

    /// Rebuilds everything that is derived from the slots, and frees inconsistent slots.
    pub(super) fn recover(&self, is_alive: IsAlive<'_>) {
        let mut taken = vec![false; self.geometry.n_pages];
        for bucket in 0..self.geometry.n_buckets {
            self.store(self.geometry.bucket(bucket), 0);
        }
        self.set(Field::FreeSlot, 0);
        for slot in (0..self.geometry.n_slots).rev() {
            let key = self.key_of(slot);
            let is_kept = match self.of(slot, SlotField::State) {
                READY => self.lookup(&key) == Ok(None),
                FILLING => is_alive(self.of(slot, SlotField::Owner)),
                _ => false,
            };
            let pages = self.extent(slot).ok().filter(|_| is_kept).map(|extent| extent.pages);
            match pages.filter(|pages| take_disjoint(pages, &mut taken)) {
                Some(_) if self.of(slot, SlotField::State) == READY => self.link(slot, &key),
                Some(_) => {}
                None => self.set_free(slot),
            }
        }
        self.map_pages(&taken);
        self.bump(Field::Events);
    }

    fn has_room(&self, n_pages: usize) -> bool {
        self.field(Field::FreePages) >= n_pages as u64 && self.field(Field::FreeSlot) != 0
    }

    /// Evicts until the object fits, and a little more as long as no young object is affected.
    fn evict(&self, n_pages: usize) -> Result<(), Damaged> {
        let (added, capacity) = (self.field(Field::Added), self.geometry.capacity() as u64);
        let candidate = |slot: usize| {
            let born = self.of(slot, SlotField::Birth);
            let is_young = is_young(capacity, added.saturating_sub(born));
            let (bytes, priority) = (self.of(slot, SlotField::Len), self.of(slot, SlotField::Priority));
            EvictionCandidate { what: slot, key: self.key_of(slot), bytes, priority, born, is_young }
        };
        let ready = (0..self.geometry.n_slots).filter(|slot| self.of(*slot, SlotField::State) == READY);
        let plenty = n_pages.max(self.geometry.n_pages / EVICTED_AT_ONCE);
        for victim in order(capacity, ready.map(candidate).collect()) {
            if self.has_room(plenty) || (victim.is_young && self.has_room(n_pages)) {
                break;
            }
            self.evict_slot(victim.what)?;
            self.bump(Field::Evicted);
            if !victim.is_young {
                self.set(Field::Clock, self.field(Field::Clock).max(victim.priority));
            }
        }
        Ok(())
    }

    /// Takes a ready slot out of the index and frees it.
    fn evict_slot(&self, slot: usize) -> Result<(), Damaged> {
        let mut at = self.bucket_of(&self.key_of(slot));
        for _ in 0..=self.geometry.n_slots {
            match self.slot_of_link(self.load(at))? {
                Some(found) if found == slot => {
                    self.store(at, self.of(slot, SlotField::Link));
                    return self.free(slot);
                }
                Some(other) => at = self.geometry.slot(other) + SlotField::Link as usize,
                None => break,
            }
        }
        Err(Damaged)
    }

    /// Frees a slot that is in no chain of the index.
    fn free(&self, slot: usize) -> Result<(), Damaged> {
        let pages = self.extent(slot)?.pages;
        self.set_free(slot);
        self.give_pages(&pages);
        Ok(())
    }

    /// Starts the next generation, which concurrent readers will notice.
    fn set_free(&self, slot: usize) {
        self.put(slot, SlotField::State, FREE);
        self.put(slot, SlotField::Generation, self.of(slot, SlotField::Generation).wrapping_add(1));
        self.put(slot, SlotField::Link, self.field(Field::FreeSlot));
        self.set(Field::FreeSlot, slot as u64 + 1);
    }

    fn link(&self, slot: usize, key: &ContentKey) {
        let bucket = self.bucket_of(key);
        self.put(slot, SlotField::Link, self.load(bucket));
        self.store(bucket, slot as u64 + 1);
    }

    fn lookup(&self, key: &ContentKey) -> Result<Option<usize>, Damaged> {
        let mut link = self.load(self.bucket_of(key));
        for _ in 0..=self.geometry.n_slots {
            let Some(slot) = self.slot_of_link(link)? else { return Ok(None) };
            if self.of(slot, SlotField::State) != READY {
                break;
            }
            if self.key_of(slot) == *key {
                return Ok(Some(slot));
            }
            link = self.of(slot, SlotField::Link);
        }
        Err(Damaged)
    }

    fn extent(&self, slot: usize) -> Result<Extent, Damaged> {
        let len = usize::try_from(self.of(slot, SlotField::Len)).map_err(|_| Damaged)?;
        let pages = self.chain(self.of(slot, SlotField::First), len.div_ceil(PAGE_BYTES))?;
        Ok(Extent { slot, generation: self.of(slot, SlotField::Generation), len, pages })
    }

    /// The slot that a link names, `None` for the end of a chain.
    fn slot_of_link(&self, link: u64) -> Result<Option<usize>, Damaged> {
        match usize::try_from(link).ok().filter(|link| *link <= self.geometry.n_slots) {
            Some(link) => Ok(link.checked_sub(1)),
            None => Err(Damaged),
        }
    }

    /// Start of a key's chain in the index.
    fn bucket_of(&self, key: &ContentKey) -> usize {
        self.geometry.bucket(Self::hash(key) & (self.geometry.n_buckets - 1))
    }

    fn key_of(&self, slot: usize) -> ContentKey {
        self.key(self.geometry.slot(slot) + SlotField::Key as usize)
    }

    fn of(&self, slot: usize, what: SlotField) -> u64 {
        self.load(self.geometry.slot(slot) + what as usize)
    }

    fn put(&self, slot: usize, what: SlotField, value: u64) {
        self.store(self.geometry.slot(slot) + what as usize, value);
    }
}

/// Marks the pages as used, unless one is used already or occurs twice.
fn take_disjoint(pages: &[u32], taken: &mut [bool]) -> bool {
    let mut distinct = pages.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let is_disjoint = distinct.len() == pages.len() && distinct.iter().all(|page| !taken[*page as usize]);
    if is_disjoint {
        distinct.iter().for_each(|page| taken[*page as usize] = true);
    }
    is_disjoint
}

#[cfg(test)]
mod tests;
