//! Accounting of a pool over random schedules, and its rules one by one.

use super::*;
use proptest::prelude::*;

fn key(n: usize) -> PrefixKey {
    PrefixKey::from_bytes([n as u8; 32])
}

/// A checkpoint under a key.
fn checkpoint(pool: &StatePool, n: usize) {
    pool.take().expect("a free slot").publish(key(n));
}

#[derive(Clone, Debug)]
enum Step {
    Take,
    Checkpoint(usize),
    Find(usize),
    Longest(usize),
    Drop(usize),
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        4 => Just(Step::Take),
        4 => (0usize..12).prop_map(Step::Checkpoint),
        2 => (0usize..12).prop_map(Step::Find),
        2 => (0usize..12).prop_map(Step::Longest),
        4 => any::<usize>().prop_map(Step::Drop),
        1 => Just(Step::Reset),
    ];
    prop::collection::vec(one, 0..100)
}

proptest! {
    #[test]
    fn every_slot_is_free_or_held_once(n_slots in 0usize..9, steps in steps()) {
        let pool = StatePool::new(n_slots);
        let mut held: Vec<StateSlot> = Vec::new();
        let mut is_checkpoint: Vec<bool> = Vec::new();
        for step in steps {
            let found = match step {
                Step::Take => pool.take().map(|slot| (slot, false)),
                Step::Checkpoint(n) => {
                    if let Some(slot) = pool.take() {
                        slot.publish(key(n));
                    }
                    None
                }
                Step::Find(n) => pool.find(&key(n)).map(|slot| (slot, true)),
                Step::Longest(n) => {
                    let keys: Vec<PrefixKey> = (0..n).map(key).collect();
                    let found = pool.find_longest(&keys);
                    let expect = (0..n).rev().find(|i| pool.find(&key(*i)).is_some());
                    prop_assert_eq!(found.as_ref().map(|(n, _)| n - 1), expect);
                    found.map(|(_, slot)| (slot, true))
                }
                Step::Drop(i) => {
                    if !held.is_empty() {
                        is_checkpoint.remove(i % held.len());
                        held.remove(i % held.len());
                    }
                    None
                }
                Step::Reset => {
                    pool.reset();
                    None
                }
            };
            if let Some((slot, checkpoint)) = found {
                held.push(slot);
                is_checkpoint.push(checkpoint);
            }
            let mut indices: Vec<u32> = held.iter().map(StateSlot::index).collect();
            indices.sort_unstable();
            indices.dedup();
            prop_assert_eq!(pool.used(), indices.len());
            prop_assert_eq!(pool.free() + pool.used(), pool.total());
            prop_assert!(pool.checkpoints() <= pool.free());
            // What a sequence writes to is nobody else's.
            let own = held.iter().zip(&is_checkpoint).filter(|(_, checkpoint)| !**checkpoint);
            for (slot, _) in own {
                prop_assert_eq!(held.iter().filter(|other| other.index() == slot.index()).count(), 1);
            }
        }
        drop(held);
        prop_assert_eq!(pool.used(), 0);
    }
}

#[test]
fn the_least_recently_used_checkpoint_goes_first() {
    let pool = StatePool::new(2);
    checkpoint(&pool, 1);
    checkpoint(&pool, 2);
    drop(pool.find(&key(1)));
    let slot = pool.take().expect("the slot of a checkpoint");
    assert!(pool.find(&key(2)).is_none() && pool.find(&key(1)).is_some());
    assert_eq!((pool.used(), pool.checkpoints()), (1, 1));
    drop(slot);
}

#[test]
fn checkpoints_never_keep_a_sequence_from_a_slot() {
    let pool = StatePool::new(3);
    (0..3).for_each(|n| checkpoint(&pool, n));
    let slots: Vec<StateSlot> = (0..3).filter_map(|_| pool.take()).collect();
    assert_eq!((slots.len(), pool.checkpoints()), (3, 0));
    assert!(pool.take().is_none());
}

#[test]
fn the_longest_prefix_with_a_checkpoint_is_found() {
    let pool = StatePool::new(4);
    checkpoint(&pool, 1);
    checkpoint(&pool, 3);
    let keys: Vec<PrefixKey> = [1, 2, 3, 4].map(key).to_vec();
    let longest = |n: usize| pool.find_longest(&keys[..n]).map(|(n, _)| n);
    assert_eq!([0, 1, 2, 3, 4].map(longest), [None, Some(1), Some(1), Some(3), Some(3)]);
    pool.reset();
    assert_eq!(longest(4), None);
}
