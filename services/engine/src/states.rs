//! Slots of recurrent states: a pool of ids, guards that hold one each, and checkpoints that outlive their sequences.
//!
//! A cache of its own kind beside KV blocks. Layers that recur over tokens keep a state of constant size for each sequence, which
//! cannot be cut back to an earlier token. So a state at the end of a block of tokens is copied to a slot of its own, a
//! *checkpoint*, and published under the prefix key of that block. A sequence with the same prefix begins with a copy of it.
//!
//! A slot is a number here; its bytes live in a decoder's cache. A checkpoint is free to be taken: the least recently used one goes
//! when a sequence or a newer checkpoint needs its slot. `free + used = total` always; checkpoints count as free.
//!
//! Checkpoints at the ends of blocks are those of vLLM's prefix caching for Mamba layers
//! (<https://github.com/vllm-project/vllm/blob/v0.13.0/vllm/v1/core/single_type_kv_cache_manager.py>); one where a known prefix is
//! left after Marconi (<https://arxiv.org/abs/2411.19379>).

use crate::blocks::{BlockPool, BlockTable};
use triptych_core::PrefixKey;

/// Tokens that a prompt must have before a checkpoint, from the last one on, for it to be worth a step that ends there.
pub const CHECKPOINT_TOKENS: usize = 32;

/// A fixed number of slots.
#[derive(Debug)]
pub struct StatePool {
    // A slot is accounted for as a block is: held, published and free, or free.
    slots: BlockPool,
}

/// A slot that is held. Given back when dropped: as a checkpoint if it was published.
#[derive(Debug)]
pub struct StateSlot {
    // Of one block.
    table: BlockTable,
    index: u32,
}

/// Work on slots, in the order of planning: a slot that one gives up may be the next one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMove {
    /// Zeros, for a sequence from its first token.
    Reset(u32),
    /// A copy of a whole slot.
    Copy {
        /// Source.
        from: u32,
        /// Destination.
        to: u32,
    },
}

impl StatePool {
    /// A pool of `n_slots` free slots.
    pub fn new(n_slots: usize) -> Self {
        Self { slots: BlockPool::new(n_slots) }
    }

    /// Number of all slots.
    pub fn total(&self) -> usize {
        self.slots.total()
    }

    /// Number of slots that are not held, checkpoints included.
    pub fn free(&self) -> usize {
        self.slots.free()
    }

    /// Number of slots that are held.
    pub fn used(&self) -> usize {
        self.slots.used()
    }

    /// Number of checkpoints.
    pub fn checkpoints(&self) -> usize {
        self.slots.cached()
    }

    /// A free slot, in place of the least recently used checkpoint if no other is free. `None` if all are held.
    pub fn take(&self) -> Option<StateSlot> {
        StateSlot::of(self.slots.table(1).ok()?)
    }

    /// The checkpoint of a key, held.
    pub fn find(&self, key: &PrefixKey) -> Option<StateSlot> {
        StateSlot::of(self.slots.find(std::slice::from_ref(key)))
    }

    /// Number of the longest prefix of `keys` whose last key has a checkpoint, and that checkpoint, held.
    pub fn find_longest(&self, keys: &[PrefixKey]) -> Option<(usize, StateSlot)> {
        keys.iter().enumerate().rev().find_map(|(i, key)| Some((i + 1, self.find(key)?)))
    }

    /// Clears all checkpoints: none is found again.
    pub fn reset(&self) {
        self.slots.reset();
    }
}

impl StateSlot {
    fn of(table: BlockTable) -> Option<Self> {
        let index = table.blocks().first()?.index();
        Some(Self { table, index })
    }

    /// Index of the slot in the decoder's cache.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Publishes a slot that is written and will not be written again. No effect when another slot has the key.
    pub fn publish(&self, key: PrefixKey) {
        self.table.publish(0, key);
    }
}

#[cfg(test)]
mod tests;
