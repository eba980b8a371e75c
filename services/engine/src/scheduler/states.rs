//! Recurrent states: slots of sequences that are admitted, copies for forks, and checkpoints.

use super::Scheduler;
use super::plan_builder::{PlanBuilder, PlannedRows};
use crate::blocks::{BlockPool, KvTables};
use crate::config::PrefixCache;
use crate::request::SequenceId;
use crate::sequence::{BranchKv, Sequence};
use crate::states::{StateMove, StatePool, StateSlot};
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Slots of a sequence that is about to run, and what must be in them first.
pub(super) struct StateAllocation {
    /// Slots of branches that are yet to come.
    pub spare: Vec<StateSlot>,
    /// Zeros, or copies of a checkpoint, for the branches that are there.
    pub moves: Vec<StateMove>,
}

impl Scheduler {
    /// An empty plan, but for the copies of states that forks wait for.
    pub(super) fn begin_plan(&mut self) -> PlanBuilder {
        let mut builder = PlanBuilder::new(self.config.token_budget, &self.capacity.decoder);
        builder.keeps_states = self.keeps_states();
        builder.state_moves = std::mem::take(&mut self.state_copies);
        builder.moved = std::mem::take(&mut self.copied);
        builder
    }

    fn keeps_states(&self) -> bool {
        self.states.total() > 0 && self.config.prefix_cache == PrefixCache::On
    }

    /// Takes slots for the checkpoints of a plan: states at ends of chunks of prompts that are ends of blocks. Returns the copies
    /// to make once it has run. Without a free slot there is no checkpoint.
    pub(super) fn plan_checkpoints(&mut self, rows: &[PlannedRows]) -> Vec<(u32, u32)> {
        let mut copies = Vec::new();
        if !self.keeps_states() {
            return copies;
        }
        for rows in rows.iter().filter(|rows| rows.tokens.end.is_multiple_of(KV_BLOCK_TOKENS)) {
            let Some(sequence) = self.sequences.get_mut(&rows.queue_key) else { continue };
            if sequence.n_branches() > 1 || sequence.is_decoding() {
                continue;
            }
            let Some(key) = sequence.keys(0, rows.tokens.end).last().copied() else { continue };
            let state = sequence.device_kv().and_then(|device_kv| device_kv.branches[0].state.as_ref());
            let Some(from) = state.map(StateSlot::index) else { continue };
            let is_planned = self.checkpoints.iter().any(|(_, planned)| *planned == key);
            if is_planned || self.states.find(&key).is_some() {
                continue;
            }
            if let Some(slot) = self.states.take() {
                copies.push((from, slot.index()));
                self.checkpoints.push((slot, key));
            }
        }
        copies
    }

    /// The checkpoints of a plan that ran are found from here on.
    pub(super) fn publish_checkpoints(&mut self) {
        for (slot, key) in self.checkpoints.drain(..) {
            slot.publish(key);
        }
    }

    /// Queues copies of states for a sequence, which its next step needs.
    pub(super) fn queue_copies(&mut self, id: SequenceId, copies: Vec<StateMove>) {
        if !copies.is_empty() {
            self.state_copies.extend(copies);
            self.copied.push(id);
        }
    }
}

/// The longest prefix of a sequence whose blocks are published and whose last one has a checkpoint: its blocks, and the checkpoint.
/// Where blocks go on without one, the sequence is to make one at their end.
pub(super) fn find_checkpoint(
    pool: &BlockPool,
    states: &StatePool,
    sequence: &mut Sequence,
) -> (KvTables, Option<StateSlot>) {
    // Branches begin with one state, so not behind what they have in common.
    let n_common = if sequence.n_branches() > 1 { sequence.n_common_blocks() } else { usize::MAX };
    let keys = sequence.keys(0, sequence.n_tokens() - 1);
    let keys = &keys[..n_common.min(keys.len())];
    let n_known = pool.find_whole(keys).n_blocks();
    let (n_found, checkpoint) = match states.find_longest(&keys[..n_known]) {
        Some((n_blocks, checkpoint)) => (n_blocks, Some(checkpoint)),
        None => (0, None),
    };
    let found = pool.find_whole(&keys[..n_found]);
    sequence.checkpoint_at = (n_known > n_found).then_some(n_known * KV_BLOCK_TOKENS);
    (found, checkpoint)
}

/// Slots for a sequence of `width` branches at most, of which `branches` are there, each of whom gets one. `None` if there are too
/// few.
pub(super) fn take_states(
    states: &StatePool,
    branches: &mut [BranchKv],
    width: usize,
    checkpoint: Option<&StateSlot>,
) -> Option<StateAllocation> {
    let mut spare: Vec<StateSlot> =
        (0..width.max(branches.len())).map(|_| states.take()).collect::<Option<_>>()?;
    let mut moves = Vec::new();
    for branch in branches {
        branch.state = spare.pop();
        let to = branch.state.as_ref().map(StateSlot::index);
        moves.extend(to.map(|to| match checkpoint {
            Some(checkpoint) => StateMove::Copy { from: checkpoint.index(), to },
            None => StateMove::Reset(to),
        }));
    }
    Some(StateAllocation { spare, moves })
}
