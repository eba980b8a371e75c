//! Invariants of the object table after any sequence of steps: every page is free or of one object, every object is
//! found.

use super::super::layout::{Geometry, MIN_BYTES};
use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

const ALIVE: u64 = 1;
const DEAD: u64 = 2;

struct Slab {
    memory: Vec<AtomicU64>,
    geometry: Geometry,
}

impl Slab {
    fn new() -> Self {
        let geometry = Geometry::of_bytes(MIN_BYTES);
        let memory = (0..geometry.n_words().unwrap()).map(|_| AtomicU64::new(0)).collect();
        let slab = Self { memory, geometry };
        slab.words().recover(&|_| true);
        slab
    }

    fn words(&self) -> Words<'_> {
        Words::new(&self.memory, self.geometry)
    }
}

fn key(n: u8) -> ContentKey {
    ContentKey::from_bytes([n; 32])
}

fn is_alive(owner: u64) -> bool {
    owner == ALIVE
}

fn content(n: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(n)).collect()
}

fn reserve(words: &Words<'_>, n: u8, len: usize, owner: u64) -> Option<Extent> {
    let new = NewObject { key: key(n), len, owner, now_ms: 1 };
    let extent = words.reserve(&new, &is_alive).unwrap()?;
    words.copy_in(&extent.pages, &content(n, len));
    Some(extent)
}

fn read(words: &Words<'_>, n: u8) -> Option<Vec<u8>> {
    let extent = words.find(&key(n)).unwrap()?;
    let mut bytes = vec![0; extent.len];
    words.copy_out(&extent.pages, &mut bytes);
    assert!(words.is_still(&extent));
    Some(bytes)
}

/// Invariants after every step.
fn check(words: &Words<'_>) {
    let g = words.geometry;
    let mut owner_of = BTreeMap::new();
    let (mut free, mut n_free) = (words.field(Field::FreeSlot), 0);
    for slot in 0..g.n_slots {
        let state = words.of(slot, SlotField::State);
        if state == FREE {
            n_free += 1;
            continue;
        }
        for page in words.extent(slot).unwrap().pages {
            assert_eq!(owner_of.insert(page, slot), None, "a page of two objects");
        }
        let found = words.lookup(&words.key_of(slot)).unwrap();
        assert!(state == FILLING || found == Some(slot), "a ready object is found");
        assert!(state == READY || found != Some(slot), "one that is being filled is not");
    }
    for page in 0..g.n_pages as u32 {
        let is_used = words.load(g.used(page as usize / 64)) >> (page % 64) & 1 == 1;
        assert_eq!(is_used, owner_of.contains_key(&page), "page {page}");
        assert!(
            is_used || u64::from(page) / 64 >= words.field(Field::Cursor),
            "page {page} is not looked for"
        );
    }
    assert_eq!(words.field(Field::FreePages), (g.n_pages - owner_of.len()) as u64);
    for _ in 0..n_free {
        let slot = words.slot_of_link(free).unwrap().expect("every free slot is in the list");
        assert_eq!(words.of(slot, SlotField::State), FREE);
        free = words.of(slot, SlotField::Link);
    }
    assert_eq!(free, 0, "and nothing else is");
}

#[derive(Clone, Debug)]
enum Step {
    Reserve { n: u8, len: usize, owner: u64 },
    Publish,
    Abandon,
    Remove(u8),
    Read(u8),
    Reap,
    Recover,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = 0u8..8;
    let one = prop_oneof![
        4 => (n.clone(), 0usize..20 * PAGE_BYTES, ALIVE..=DEAD)
            .prop_map(|(n, len, owner)| Step::Reserve { n, len, owner }),
        4 => Just(Step::Publish),
        1 => Just(Step::Abandon),
        1 => n.clone().prop_map(Step::Remove),
        2 => n.prop_map(Step::Read),
        1 => Just(Step::Reap),
        1 => Just(Step::Recover),
    ];
    proptest::collection::vec(one, 0..60)
}

proptest! {
    #[test]
    fn every_page_is_free_or_of_one_object_and_every_object_reads_as_it_was_written(steps in steps()) {
        let slab = Slab::new();
        let words = slab.words();
        let mut filling: Vec<Extent> = Vec::new();
        for step in steps {
            match step {
                Step::Reserve { n, len, owner } => {
                    // The writer of a dead process is not heard of again.
                    filling.extend(reserve(&words, n, len, owner).filter(|_| owner == ALIVE));
                }
                Step::Publish => if let Some(extent) = filling.pop() {
                    let key = words.key_of(extent.slot);
                    let had = words.has(&key).unwrap();
                    prop_assert_eq!(words.publish(&extent).unwrap(), !had, "the first wins");
                },
                Step::Abandon => if let Some(extent) = filling.pop() {
                    words.abandon(&extent).unwrap();
                },
                Step::Remove(n) => { words.remove(&key(n)).unwrap(); }
                Step::Read(n) => if let Some(bytes) = read(&words, n) {
                    prop_assert!(bytes == content(n, bytes.len()));
                },
                Step::Reap => words.reap(&is_alive).unwrap(),
                Step::Recover => words.recover(&is_alive),
            }
            check(&words);
        }
        // Whatever was going on, all of it can be freed.
        for extent in filling {
            words.abandon(&extent).unwrap();
        }
        words.reap(&is_alive).unwrap();
        (0..8).for_each(|n| { words.remove(&key(n)).unwrap(); });
        check(&words);
        prop_assert_eq!(words.field(Field::FreePages), words.geometry.n_pages as u64);
    }

    #[test]
    fn a_slab_of_random_words_is_put_in_order_and_nothing_panics(
        noise in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u64..70), 0..200),
    ) {
        let slab = Slab::new();
        let words = slab.words();
        for n in 0..6 {
            if let Some(extent) = reserve(&words, n, usize::from(n) * PAGE_BYTES, ALIVE) {
                words.publish(&extent).unwrap();
            }
        }
        let tables = words.geometry.page(0) - words.geometry.slot(0);
        for (at, any, small) in noise {
            let value = if small == 0 { any } else { small };
            words.store(words.geometry.slot(0) + at.index(tables), value);
        }
        for n in 0..8 {
            // Each may report a damaged table, and nothing worse.
            let _ = (words.find(&key(n)), words.remove(&key(n)), words.reap(&|_| false));
            let new = NewObject { key: key(n), len: 3 * PAGE_BYTES, owner: ALIVE, now_ms: 0 };
            let _ = words.reserve(&new, &is_alive).map(|e| e.map(|e| words.publish(&e)));
        }
        words.recover(&is_alive);
        check(&words);
    }
}

#[test]
fn a_writer_that_died_gives_its_place_back_when_it_is_needed_and_a_living_one_does_not() {
    let slab = Slab::new();
    let words = slab.words();
    let half = words.geometry.n_pages / 2 * PAGE_BYTES;
    assert!(reserve(&words, 1, half, DEAD).is_some());
    let living = reserve(&words, 2, half, ALIVE).unwrap();
    let third = reserve(&words, 3, half, ALIVE).expect("the dead one's place");
    assert!(reserve(&words, 4, half, ALIVE).is_none(), "all that is there is being filled");
    assert!(words.publish(&living).unwrap() && words.publish(&third).unwrap());
    check(&words);
}

#[test]
fn a_change_interrupted_by_a_crash_is_recovered() {
    let slab = Slab::new();
    let words = slab.words();
    let one = reserve(&words, 1, 3 * PAGE_BYTES, ALIVE).unwrap();
    words.publish(&one).unwrap();
    // Pages taken and no slot yet; a slot ready and not in the index; a slot free and still in the index.
    words.take_pages(2).unwrap();
    let two = reserve(&words, 2, PAGE_BYTES, ALIVE).unwrap();
    words.put(two.slot, SlotField::State, READY);
    let three = reserve(&words, 3, PAGE_BYTES, ALIVE).unwrap();
    words.publish(&three).unwrap();
    words.put(three.slot, SlotField::State, FREE);
    words.recover(&is_alive);
    check(&words);
    assert!(read(&words, 1).is_some() && read(&words, 2).is_some() && read(&words, 3).is_none());
    assert!(!words.is_still(&three), "who was copying from it sees that it is gone");
}

#[test]
fn a_reader_of_a_reused_slot_notices() {
    let slab = Slab::new();
    let words = slab.words();
    let one = reserve(&words, 1, PAGE_BYTES, ALIVE).unwrap();
    words.publish(&one).unwrap();
    let reading = words.find(&key(1)).unwrap().unwrap();
    words.remove(&key(1)).unwrap();
    assert!(!words.is_still(&reading));
    let all = words.geometry.capacity();
    assert!(reserve(&words, 2, all, ALIVE).is_some());
    assert!(!words.is_still(&reading));
}

#[test]
fn memory_that_was_written_before_is_used_again_before_any_that_was_not() {
    let slab = Slab::new();
    let words = slab.words();
    let store = |n| {
        let extent = reserve(&words, n, 3 * PAGE_BYTES, ALIVE).unwrap();
        words.publish(&extent).unwrap();
        extent.pages
    };
    let (first, second) = (store(1), store(2));
    words.remove(&key(1)).unwrap();
    assert_eq!(store(3), first);
    words.remove(&key(2)).unwrap();
    assert_eq!(store(4), second);
    check(&words);
}
