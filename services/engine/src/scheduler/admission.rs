//! From the queue onto the device: blocks, a share of the cross-attention KV, and cached prefixes.

use super::Scheduler;
use super::fair_queue::{AdmissionOrder, Due, FairQueue};
use super::plan_builder::PlanBuilder;
use super::preemption::ResourceNeed;
use super::states::{find_checkpoint, take_states};
use crate::blocks::{BlockPool, KvTables, OutOfBlocks, blocks_for};
use crate::config::PrefixCache;
use crate::plan::BlockMove;
use crate::sequence::{BranchKv, DeviceKv, QueueKey, Sequence, SequenceStatus};
use crate::states::StateSlot;
use crate::step_rates::StepRates;
use std::collections::BTreeSet;
use std::time::Instant;
use triptych_core::AdapterId;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Result of an attempt to admit a sequence.
enum AdmitOutcome {
    Admitted,
    /// It waits for an item; others may overtake it.
    WaitsForItem,
    /// It waits for blocks or a run slot, and so does everyone behind it.
    NoRoom,
    /// The step takes no further projection.
    ProjectionsFull,
}

/// Tokens of a sequence that blocks are taken for.
#[derive(Clone, Copy)]
struct Room {
    n_tokens: usize,
    /// End of the first chunk at the latest.
    chunk_end: usize,
}

/// Blocks of a sequence that is about to run, and the block moves that must come first.
struct Allocation {
    branches: Vec<BranchKv>,
    moves: Vec<BlockMove>,
    /// Tokens that it is admitted with, a multiple of a block's.
    n_admitted: usize,
    /// Checkpoint that its recurrent states begin with.
    checkpoint: Option<StateSlot>,
}

impl Scheduler {
    /// Admits sequences in order, as long as there is budget and room.
    pub(super) fn admit(&mut self, builder: &mut PlanBuilder, now: Instant) {
        self.admit_before(None, builder, now);
    }

    /// Admits those that are due before every prefill that runs, so that they do not wait for the end of a long one.
    pub(super) fn admit_ahead(&mut self, builder: &mut PlanBuilder, now: Instant) {
        let Some(rates) = self.ordering_rates() else { return };
        let running = self.sequences.iter().filter(|(_, s)| s.device_kv().is_some() && !s.is_decoding());
        let place = |(key, s): (&QueueKey, &Sequence)| (s.priority, Due::of(*key, s, Some(rates)));
        if let Some(first) = running.map(place).min() {
            self.admit_before(Some(first), builder, now);
        }
    }

    /// Measured rates by which waiting sequences are put in order; `None`: they have the order of their arrival.
    fn ordering_rates(&self) -> Option<&StepRates> {
        let is_measured = self.rates.prefill_time(1).is_some();
        (self.config.order == AdmissionOrder::LeastWorkLeft && is_measured).then_some(&self.rates)
    }

    fn admit_before(&mut self, limit: Option<(i32, Due)>, builder: &mut PlanBuilder, now: Instant) {
        if builder.budget == 0 {
            return;
        }
        let mut queue = FairQueue::of(&self.sequences, self.ordering_rates());
        let mut adapters_are_full = false;
        while builder.budget > 0
            && let Some(queue_key) = queue.pop(&self.shares, limit)
        {
            // Later sequences with adapters do not overtake one that waits for a place, so that running adapters run out.
            adapters_are_full |= self.lacks_adapter_room(queue_key);
            if adapters_are_full && self.has_adapter(queue_key) {
                continue;
            }
            loop {
                match self.try_admit(queue_key, builder, now) {
                    AdmitOutcome::Admitted | AdmitOutcome::WaitsForItem => {
                        self.ask_for_rows(queue_key);
                        break;
                    }
                    AdmitOutcome::ProjectionsFull => return,
                    AdmitOutcome::NoRoom => {
                        let Some(last) = self.victim_for(queue_key) else { return };
                        self.preempt(last, builder);
                    }
                }
            }
        }
    }

    /// Sequence to preempt for one that found no room.
    fn victim_for(&self, queue_key: QueueKey) -> Option<QueueKey> {
        let sequence = self.sequences.get(&queue_key)?;
        let blocks = self.capacity.n_blocks(sequence.n_tokens(), sequence.n_branches());
        self.preemption_victim(sequence.priority, ResourceNeed { blocks, run_slots: sequence.n_run_slots() })
    }

    fn try_admit(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder, now: Instant) -> AdmitOutcome {
        if self.waits_for_item(queue_key) {
            return AdmitOutcome::WaitsForItem;
        }
        // Counted only for those that might run: most of a long queue is not looked at, or waits for items.
        let n_running = self.n_running();
        let Some(sequence) = self.sequences.get(&queue_key) else { return AdmitOutcome::WaitsForItem };
        if n_running + sequence.n_run_slots() > self.config.max_sequences {
            return AdmitOutcome::NoRoom;
        }
        let allocation = match self.allocate(queue_key, builder) {
            Ok(allocation) => allocation,
            Err(outcome) => return outcome,
        };
        let Allocation { mut branches, moves, n_admitted, checkpoint } = allocation;
        let Self { sequences, cross, states, counts, .. } = self;
        let Some(sequence) = sequences.get_mut(&queue_key) else { return AdmitOutcome::WaitsForItem };
        let has_states = states.total() > 0;
        // On this return the self-attention blocks are given back.
        if builder.projection_room() == 0 && sequence.cross_keys().any(|key| !cross.contains(&key)) {
            return AdmitOutcome::ProjectionsFull;
        }
        let shares: Result<Vec<_>, _> = sequence.cross_keys().map(|key| cross.acquire(key)).collect();
        let Ok(cross) = shares else { return AdmitOutcome::NoRoom };
        let mut spare_states = Vec::new();
        if has_states {
            let width = sequence.n_run_slots();
            let Some(taken) = take_states(states, &mut branches, width, checkpoint.as_ref()) else {
                return AdmitOutcome::NoRoom;
            };
            builder.state_moves.extend(taken.moves);
            spare_states = taken.spare;
            counts.checkpoint_hits += u64::from(checkpoint.is_some());
        }
        if !moves.is_empty() || has_states {
            builder.moves.extend(moves);
            builder.moved.push(sequence.id());
        }
        sequence.status = SequenceStatus::Running(DeviceKv { branches, n_admitted, cross, spare_states });
        sequence.blocked_at = None;
        self.plan_first_rows(queue_key, builder, now);
        AdmitOutcome::Admitted
    }

    /// Self-attention blocks of a waiting sequence, and the checkpoint that its recurrent states begin with.
    fn allocate(&mut self, queue_key: QueueKey, builder: &PlanBuilder) -> Result<Allocation, AdmitOutcome> {
        let Self { sequences, pool, cross, states, config, .. } = self;
        let sequence = sequences.get_mut(&queue_key).ok_or(AdmitOutcome::WaitsForItem)?;
        let n_computed = sequence.n_computed();
        let readable_now = sequence.readable(n_computed, cross).map_err(|_| AdmitOutcome::WaitsForItem)?;
        if let SequenceStatus::Swapped(branches) = &sequence.status {
            let chunk_end = builder.latest_end(sequence, n_computed);
            return swap_in(pool, branches, Room { n_tokens: readable_now, chunk_end })
                .map_err(|OutOfBlocks { .. }| AdmitOutcome::NoRoom);
        }
        let has_states = states.total() > 0;
        let prefix_cache = if sequence.is_scored() { PrefixCache::Off } else { config.prefix_cache };
        let (cached, checkpoint) = match (has_states, prefix_cache) {
            (true, PrefixCache::On) => find_checkpoint(pool, states, sequence),
            _ => (find_cached(pool, sequence, prefix_cache), None),
        };
        let n_cached = cached.n_room();
        let readable = sequence.readable(n_cached, cross).unwrap_or(0);
        if readable <= n_cached {
            sequence.blocked_at = Some(readable_now);
            return Err(AdmitOutcome::WaitsForItem);
        }
        let n_common = match sequence.n_branches() {
            1 => 0,
            _ if has_states => cached.n_blocks(),
            _ => sequence.n_common_blocks(),
        };
        let room = Room { n_tokens: readable, chunk_end: builder.latest_end(sequence, n_cached) };
        let taken = take_blocks(sequence, cached, n_common, room);
        let taken = taken.map_err(|OutOfBlocks { .. }| AdmitOutcome::NoRoom)?;
        Ok(Allocation { checkpoint, ..taken })
    }

    fn has_adapter(&self, queue_key: QueueKey) -> bool {
        self.sequences.get(&queue_key).is_some_and(|sequence| sequence.adapter().is_some())
    }

    /// True if a sequence would bring one adapter too many among those that run, and waits for nothing else.
    fn lacks_adapter_room(&self, queue_key: QueueKey) -> bool {
        let Some(adapter) = self.sequences.get(&queue_key).and_then(Sequence::adapter) else { return false };
        let on_device = self.sequences.values().filter(|s| s.device_kv().is_some());
        let running: BTreeSet<AdapterId> = on_device.filter_map(Sequence::adapter).collect();
        let is_full = !running.contains(&adapter) && running.len() >= self.config.max_loras;
        is_full && !self.waits_for_item(queue_key)
    }

    /// True if a sequence waits for an item, without looking blocks up.
    pub(super) fn waits_for_item(&self, queue_key: QueueKey) -> bool {
        let Some(sequence) = self.sequences.get(&queue_key) else { return true };
        if sequence.has_placeholder() {
            // Preempted in this plan; its last token is known in the next.
            return true;
        }
        let Ok(readable) = sequence.readable(sequence.n_computed(), &self.cross) else { return true };
        let waits_for_rows = || sequence.cross_keys().any(|key| !self.cross.is_ready(&key));
        sequence.blocked_at == Some(readable) || (readable == 0 && waits_for_rows())
    }

    /// Plans the first rows of an admitted sequence.
    fn plan_first_rows(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder, now: Instant) {
        let Some(sequence) = self.sequences.get_mut(&queue_key) else { return };
        if sequence.milestones.first_step.is_none() {
            sequence.milestones.first_step = Some(now);
            sequence.counters.n_cached = sequence.n_computed().min(sequence.n_prompt());
            self.counts.prompt_tokens += sequence.n_prompt() as u64;
            self.counts.cached_tokens += sequence.counters.n_cached as u64;
        }
        builder.n_admitted += 1;
        builder.push_projection(queue_key, sequence, &self.cross);
        builder.push_prefill(queue_key, sequence, &self.cross);
        // The next admission sees this charge.
        self.charge(queue_key, builder);
    }
}

/// Cached blocks of a sequence's prefix. The last token is always computed, since the next one is chosen after
/// it, so its block is never among them.
fn find_cached(pool: &BlockPool, sequence: &mut Sequence, prefix_cache: PrefixCache) -> KvTables {
    let n_tokens = sequence.n_tokens();
    match prefix_cache {
        // Branches begin where the common prefix ends, which may be earlier than the first branch does.
        PrefixCache::On if sequence.n_branches() > 1 => pool.find_whole(sequence.keys(0, n_tokens - 1)),
        PrefixCache::On => pool.find_seen(sequence.keys(0, n_tokens - 1)),
        PrefixCache::Off => pool.tables(),
    }
}

/// Blocks for the tokens of `room`, beginning with the cached ones of a sequence's first branch. Branches share their first
/// `n_common` blocks.
fn take_blocks(
    sequence: &Sequence,
    cached: KvTables,
    n_common: usize,
    room: Room,
) -> Result<Allocation, OutOfBlocks> {
    let n_cached = cached.n_room();
    let mut first = cached;
    room.take(&mut first, sequence.n_branches())?;
    let other = |_| {
        let mut tables = first.fork_first(n_common);
        tables.grow(room.n_tokens)?;
        Ok(BranchKv { tables, n_computed: n_common * KV_BLOCK_TOKENS, state: None })
    };
    let others: Vec<BranchKv> = (1..sequence.n_branches()).map(other).collect::<Result<_, _>>()?;
    let mut branches = vec![BranchKv { tables: first, n_computed: n_cached, state: None }];
    branches.extend(others);
    Ok(Allocation { branches, moves: Vec::new(), n_admitted: room.n_admitted(), checkpoint: None })
}

/// Blocks for the tokens of `room` of a swapped sequence.
fn swap_in(pool: &BlockPool, swapped: &[BranchKv], room: Room) -> Result<Allocation, OutOfBlocks> {
    let tables: Vec<_> = swapped.iter().map(BranchKv::computed_blocks).collect();
    let (tables, pairs) = pool.mirror_branches(&tables)?;
    let mut branches = Vec::with_capacity(tables.len());
    for (mut tables, branch) in tables.into_iter().zip(swapped) {
        // A block that branches share is copied when one of them writes.
        room.take(&mut tables, swapped.len())?;
        branches.push(BranchKv { tables, n_computed: branch.n_computed, state: None });
    }
    let moves = pairs.into_iter().map(BlockMove::In).collect();
    Ok(Allocation { branches, moves, n_admitted: room.n_admitted(), checkpoint: None })
}

impl Room {
    /// Its tokens, up to the end of a block.
    fn n_admitted(self) -> usize {
        blocks_for(self.n_tokens) * KV_BLOCK_TOKENS
    }

    /// Grows the tables of one of `n_branches` branches. Several have all their blocks from the start, since some rely on others
    /// to compute them.
    fn take(self, tables: &mut KvTables, n_branches: usize) -> Result<(), OutOfBlocks> {
        match n_branches {
            1 => tables.grow_prefill(self.n_tokens, self.chunk_end),
            _ => tables.grow(self.n_tokens),
        }
    }
}
