//! Preemption: swap or recompute the KV of a sequence that loses its blocks.

use super::Scheduler;
use super::plan_builder::PlanBuilder;
use crate::config::Preemption;
use crate::plan::BlockMove;
use crate::sequence::{BranchKv, DeviceKv, QueueKey, Sequence, SequenceStatus};
use std::time::Duration;

impl Scheduler {
    /// Takes a running sequence off the device; it keeps its place in the queue. What was projected for it stays in
    /// the cache while there is room.
    pub(super) fn preempt(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder) {
        self.take_off(queue_key, builder);
        builder.withdraw_unheld(&self.cross);
    }

    fn take_off(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder) {
        let Some(sequence) = self.sequences.get_mut(&queue_key) else { return };
        let was_decoding = sequence.is_decoding();
        let SequenceStatus::Running(device_kv) =
            std::mem::replace(&mut sequence.status, SequenceStatus::Waiting)
        else {
            return;
        };
        self.counts.preemptions += 1;
        builder.withdraw(queue_key);
        // During the prefill of several branches, the later ones rely on blocks that the first has not computed
        // yet.
        let is_whole = device_kv.branches.len() == 1 || was_decoding;
        if is_whole
            && self.is_swap_cheaper(&device_kv)
            && let Some(branches) = self.swap_out(&device_kv, builder)
            && let Some(sequence) = self.sequences.get_mut(&queue_key)
        {
            sequence.status = SequenceStatus::Swapped(branches);
            builder.moved.push(sequence.id());
            self.counts.swaps += 1;
        }
    }

    /// True if swapping the computed blocks out and in is expected to take less time than computing them again.
    fn is_swap_cheaper(&self, device_kv: &DeviceKv) -> bool {
        let swap_bytes_per_s = match self.config.preemption {
            Preemption::Recompute => return false,
            // A recurrent state is not swapped, and blocks without it are of no use.
            _ if self.states.total() > 0 => return false,
            Preemption::Swap => return true,
            Preemption::Cheapest { swap_bytes_per_s } => swap_bytes_per_s,
        };
        let n_blocks: usize =
            device_kv.branches.iter().flat_map(BranchKv::computed_blocks).map(|t| t.held().len()).sum();
        let n_tokens: usize = device_kv.branches.iter().map(|b| b.n_computed).sum();
        let bytes = 2.0 * (n_blocks * self.capacity.decoder.self_block_bytes) as f64;
        let moving = Duration::try_from_secs_f64(bytes / swap_bytes_per_s as f64).unwrap_or(Duration::MAX);
        self.rates.prefill_time(n_tokens).is_some_and(|computing| moving < computing)
    }

    /// Copies of the computed blocks on the host. `None` if they do not fit there.
    fn swap_out(&self, device_kv: &DeviceKv, builder: &mut PlanBuilder) -> Option<Vec<BranchKv>> {
        let tables: Vec<_> = device_kv.branches.iter().map(BranchKv::computed_blocks).collect();
        let (tables, pairs) = self.host.mirror_branches(&tables).ok()?;
        builder.moves.extend(pairs.into_iter().map(BlockMove::Out));
        let branches = tables.into_iter().zip(&device_kv.branches);
        Some(branches.map(|(tables, b)| BranchKv { tables, n_computed: b.n_computed, state: None }).collect())
    }

    /// Youngest of the running sequences less urgent than `priority`; `None` if preempting all of them would not
    /// free enough.
    pub(super) fn preemption_victim(&self, priority: i32, needed: ResourceNeed) -> Option<QueueKey> {
        let less: Vec<QueueKey> = self.running(|s| s.priority > priority && !s.awaits_token());
        let held =
            |s: &Sequence| s.device_kv().map_or(0, |r| r.branches.iter().map(|b| b.tables.n_held()).sum());
        let sequences = less.iter().filter_map(|queue_key| self.sequences.get(queue_key));
        let (blocks, run_slots) = sequences.fold((0, 0), |(b, p), s| (b + held(s), p + s.n_run_slots()));
        let free_slots = self.config.max_sequences.saturating_sub(self.n_running());
        let helps = needed.blocks <= self.pool.free() + blocks && needed.run_slots <= free_slots + run_slots;
        less.last().copied().filter(|_| helps)
    }
}

/// Resources that a waiting sequence needs to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResourceNeed {
    pub blocks: usize,
    pub run_slots: usize,
}
