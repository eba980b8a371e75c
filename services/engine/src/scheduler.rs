//! Continuous batching over one queue of sequences.
//!
//! A step fills a budget of rows: first every decoding sequence (one row for each of its branches), then waiting ones that are
//! due before those that prefill, then these, then other waiting ones. The rules, each with a test of its name in `tests/engine`:
//!
//! - Order of admission: the smaller priority, then the least served tenant, then the shortest prefill, with ageing: arrival plus
//!   four times the time that the prompt still takes.
//! - A sequence prefills up to the first item that is not loaded. There it leaves the device; its blocks stay in
//!   the prefix cache, and it goes on when the item is loaded. Others overtake a sequence that waits for an
//!   item, not one that waits for blocks.
//! - A sequence prefills once its cross-attention blocks are filled. Their rows are projected in chunks under the
//!   same budget, charged by what they cost beside a token; sequences over the same input fill them together.
//! - After a step that prefilled beside decoding sequences, these run alone until they have had their share of
//!   time.
//! - Admission takes blocks for all tokens so far, so a prefill that started never runs out of them. Groups of layers with a window
//!   take those of each chunk when it is planned, and give back what is behind the window: a prefill that finds none preempts
//!   others as decoding does.
//! - Where layers keep a recurrent state, each branch that runs has a slot for it. A prefix is found as far as a checkpoint of
//!   that state reaches; a prefill stops where one is to be made.
//! - When decoding runs out of blocks, the least urgent and youngest sequence is preempted and keeps its place
//!   in the queue; its KV is swapped to the host or recomputed. The first in the queue always advances, so every
//!   step makes progress. A more urgent new sequence preempts less urgent ones in the same way.
//! - The queue is bounded. A sequence ends at its deadline, or before it costs work if even the best rate
//!   measured so far cannot meet the deadline. A sequence that ended holds nothing.
//!
//! Pure: it reads no clock, runs no decoder and chooses no token. The idea is that of vLLM's v1 scheduler
//! (<https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py>), where prefill is
//! decode with more than one token left; fairness is that of virtual token counters
//! (<https://arxiv.org/abs/2401.00588>).

mod admission;
mod deadline;
mod expiry;
mod fair_queue;
mod decode_pacing;
mod preemption;
mod running;
mod plan_builder;
mod row_uses;
mod slack;
mod states;

use crate::blocks::BlockPool;
use crate::config::{PoolSizes, Preemption, PrefixCache, RowRetention};
use crate::cross::{CrossCache, CrossKey};
use crate::items::ItemTable;
use crate::output::RowUse;
use crate::plan::StepPlan;
use crate::request::{Capacity, SequenceId, SequenceRequest};
use crate::sequence::{QueueKey, Sequence, SequenceStatus};
use crate::states::{StateMove, StatePool, StateSlot};
use crate::step_rates::{StepRates, StepRows};
use deadline::DeadlineCheck;
use decode_pacing::{DecodePacing, StepMix};
pub use fair_queue::AdmissionOrder;
use fair_queue::TenantShares;
use plan_builder::PlanBuilder;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};
use triptych_core::{AdapterId, Failure, FailureClass, PrefixKey};
use triptych_models::decoder::DecoderInfo;

/// Bounds of the queue and the running batch, and the preemption policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most rows of a step; rows of encoder outputs to project count as far as they cost.
    pub token_budget: usize,
    /// Share of engine time for decode-only steps while prompts wait, in percent.
    pub decode_share: u8,
    /// Mean time per token after the first that each sequence is to keep; the share then follows from it.
    pub tpot_slo: Option<Duration>,
    /// Time to which that gives way while first tokens are waited for; `None`, or less than it: it does not.
    pub max_tpot_slo: Option<Duration>,
    /// Most run slots; a beam takes one.
    pub max_sequences: usize,
    /// Most completions that wait.
    pub max_waiting: usize,
    /// Most distinct adapters among the running sequences.
    pub max_loras: usize,
    /// Reuse of full blocks by prefix key.
    pub prefix_cache: PrefixCache,
    /// Fate of the KV of a preempted sequence.
    pub preemption: Preemption,
    /// Time for which a sequence keeps the rows of its items.
    pub rows: RowRetention,
    /// Order of admission among the sequences of a tenant.
    pub order: AdmissionOrder,
}

/// Sequences of an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterLoad {
    /// Run slots in use.
    pub running: usize,
    /// Completions that wait.
    pub waiting: usize,
}

/// Draft tokens of single greedy sequences, by sequence id.
pub type DraftTokens = HashMap<SequenceId, Vec<u32>>;

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounters {
    /// Preempted sequences.
    pub preemptions: u64,
    /// Preempted sequences whose KV was swapped to the host.
    pub swaps: u64,
    /// Prompt tokens of sequences that started.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Sequences that began with a checkpoint of a recurrent state.
    pub checkpoint_hits: u64,
    /// Rows that steps computed.
    pub computed_tokens: u64,
    /// Time of steps beyond that of the fastest step that only decodes, in microseconds.
    pub step_work_us: u64,
    /// Time of the fastest step that only decodes, for each step that decodes, in microseconds.
    pub step_fixed_us: u64,
    /// Time that those steps may take by the TPOT SLO, the longer the more drafts are accepted, in microseconds; 0: no SLO, or none
    /// that a step can meet.
    pub step_slo_us: u64,
    /// Draft tokens that were verified.
    pub drafted_tokens: u64,
    /// Draft tokens that were accepted.
    pub accepted_tokens: u64,
}

/// The queue of sequences, and the blocks and slots that they hold.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    capacity: Capacity,
    pool: BlockPool,
    host: BlockPool,
    cross: CrossCache,
    /// Slots of recurrent states; none of a model without them.
    states: StatePool,
    /// Copies of states that forks wait for: the next plan begins with them.
    state_copies: Vec<StateMove>,
    /// Sequences that these copies are for.
    copied: Vec<SequenceId>,
    /// Checkpoints of the last plan, until it has run.
    checkpoints: Vec<(StateSlot, PrefixKey)>,
    items: ItemTable,
    /// Every live sequence in order of arrival; preempted ones keep their key.
    sequences: BTreeMap<QueueKey, Sequence>,
    /// Key of the sequence of each completion.
    queue_keys: HashMap<SequenceId, QueueKey>,
    shares: TenantShares,
    rates: StepRates,
    decode_pacing: DecodePacing,
    n_requests: u64,
    counts: SchedulerCounters,
    /// Accepted drafts before the last step that decoded.
    n_accepted_before: u64,
    /// Uses of rows that were not told yet.
    row_uses: Vec<(SequenceId, RowUse)>,
}

/// Result of planning a step.
#[derive(Debug, Default)]
pub struct ScheduledStep {
    /// Work of the step.
    pub plan: StepPlan,
    /// Completions that failed before the step.
    pub failed: Vec<(SequenceId, Failure)>,
    /// True if a sequence came onto the device or left it: the next step may have work when this one has none.
    pub changed: bool,
}

impl Scheduler {
    /// An empty queue over pools of the given sizes.
    pub fn new(config: SchedulerConfig, decoder: DecoderInfo, pools: PoolSizes) -> Self {
        // A run slot has a slot of the recurrent state.
        let max_sequences = match decoder.state_slot_bytes {
            Some(_) => config.max_sequences.min(pools.states),
            None => config.max_sequences,
        };
        let config = SchedulerConfig { max_sequences, ..config };
        Self {
            config,
            capacity: Capacity {
                decoder,
                self_blocks: pools.own,
                token_budget: config.token_budget,
                cross_blocks: pools.cross,
                max_sequences,
            },
            pool: BlockPool::new(pools.own).with_groups(decoder.kv_groups),
            host: BlockPool::new(pools.host),
            cross: CrossCache::new(pools.cross),
            states: StatePool::new(pools.states),
            state_copies: Vec::new(),
            copied: Vec::new(),
            checkpoints: Vec::new(),
            items: ItemTable::default(),
            sequences: BTreeMap::new(),
            queue_keys: HashMap::new(),
            shares: TenantShares::default(),
            rates: StepRates::default(),
            decode_pacing: DecodePacing::new(config.decode_share, config.tpot_slo, config.max_tpot_slo),
            n_requests: 0,
            counts: SchedulerCounters::default(),
            n_accepted_before: 0,
            row_uses: Vec::new(),
        }
    }

    /// Appends a sequence to the queue.
    ///
    /// # Errors
    /// The sequence can never run here ([`SequenceRequest::check`]), or the queue is full
    /// ([`FailureClass::Overloaded`]).
    pub fn add(&mut self, request: &SequenceRequest, now: Instant) -> Result<(), Failure> {
        request.check(&self.capacity)?;
        let limit = self.config.max_waiting;
        if self.n_waiting() + request.ids.len() > limit {
            let text = format!("{limit} sequences are waiting, which is the limit; try again later");
            return Err(Failure::new(FailureClass::Overloaded, text));
        }
        let limit = self.capacity.limit(request);
        let mut sequence = Sequence::new(request, limit, &mut self.items, now);
        DeadlineCheck { rates: &self.rates, pool: &self.pool, now }.check(&mut sequence)?;
        let queue_key = QueueKey { request: self.n_requests, completion: 0 };
        self.n_requests += 1;
        self.shares.join(sequence.tenant);
        self.sequences.insert(queue_key, sequence);
        self.queue_keys.extend(request.ids.iter().map(|id| (*id, queue_key)));
        Ok(())
    }

    /// Encoder outputs by content key; items are delivered here.
    pub fn items(&self) -> &ItemTable {
        &self.items
    }

    /// A live sequence, by any of its completions.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(self.queue_keys.get(&id)?)
    }

    /// Single sequences that decode, for which draft tokens may be proposed.
    pub fn decoding(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values().filter(|s| s.is_single() && s.is_decoding())
    }

    /// Plans the next step.
    pub fn step(&mut self, now: Instant, drafts: &mut DraftTokens) -> ScheduledStep {
        let n_preempted = self.counts.preemptions;
        let failed = self.take_failed(now);
        self.relax_slo(now);
        let mut builder = self.begin_plan();
        let suspended = self.suspend_blocked();
        self.decode(&mut builder, drafts);
        if builder.rows.is_empty() || !self.only_decodes(now) {
            let started = self.running(|s| !s.is_decoding());
            self.admit_ahead(&mut builder, now);
            self.prefill(started, &mut builder);
            self.admit(&mut builder, now);
        }
        let changed = suspended || builder.n_admitted > 0 || self.counts.preemptions > n_preempted;
        ScheduledStep { plan: self.build_plan(builder), failed, changed }
    }

    fn build_plan(&mut self, builder: PlanBuilder) -> StepPlan {
        let checkpoints = self.plan_checkpoints(&builder.rows);
        let PlanBuilder { moves, state_moves, moved, projections, .. } = builder;
        let projections = projections.into_iter().map(|planned| planned.chunk).collect();
        let mut plan =
            StepPlan { moves, state_moves, moved, projections, checkpoints, ..StepPlan::default() };
        for rows in builder.rows {
            if let Some(sequence) = self.sequences.get_mut(&rows.queue_key) {
                sequence.counters.n_drafted += rows.drafts.len();
                self.counts.drafted_tokens += rows.drafts.len() as u64;
                plan.push(sequence, rows.branch, rows.tokens, rows.drafts);
            }
        }
        plan
    }

    /// Records that the plan ran, or runs before any later one: its KV is readable from here on.
    pub fn commit(&mut self, plan: &StepPlan) {
        self.publish_checkpoints();
        for chunk in &plan.projections {
            if self.cross.fill_to(&chunk.key, chunk.rows.end) {
                self.share_filled(chunk.key);
            }
        }
        self.counts.computed_tokens += plan.n_rows() as u64;
        for chunk in &plan.chunks {
            self.advance(chunk.id, chunk.branch, chunk.tokens.end);
            self.release_read_rows(chunk.id);
        }
    }

    /// Records the time that a plan took.
    pub fn observe(&mut self, plan: &StepPlan, took: Duration) {
        let rows = self.step_rows(plan);
        let prefills = rows.prefills;
        let fixed = self.rates.least(0, 1);
        let n_decoding = plan.chunks.iter().filter(|c| c.tokens.len() == 1).count();
        let decodes = n_decoding > 0;
        let add = |sum: &mut u64, n: u64| *sum = sum.saturating_add(n);
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        add(&mut self.counts.step_work_us, micros(took.saturating_sub(fixed)));
        if decodes {
            add(&mut self.counts.step_fixed_us, micros(fixed));
            // A sequence gets a token in each step, and the drafts of the step before that were accepted.
            let n_accepted = self.counts.accepted_tokens - self.n_accepted_before;
            self.n_accepted_before = self.counts.accepted_tokens;
            let tokens = 1.0 + n_accepted as f64 / n_decoding as f64;
            let token_us = self.decode_pacing.stretched_target(fixed).map_or(0, micros);
            add(&mut self.counts.step_slo_us, (token_us as f64 * tokens) as u64);
        }
        self.rates.observe(rows, took);
        self.decode_pacing.observe(StepMix { prefills, decodes }, took, self.rates.least(0, 1));
    }

    /// Properties of a plan that its time depends on.
    fn step_rows(&self, plan: &StepPlan) -> StepRows {
        let projected = plan.n_projected().div_ceil(self.capacity.decoder.cross_rows_per_token.max(1));
        StepRows {
            n_rows: plan.n_rows() + projected,
            prefills: plan.chunks.iter().any(|c| c.tokens.len() > 1) || !plan.projections.is_empty(),
        }
    }

    /// Time that a plan is expected to take, by the steps so far; `None` before it is known.
    pub fn expected_time(&self, plan: &StepPlan) -> Option<Duration> {
        self.rates.expected(self.step_rows(plan))
    }

    /// Appends a placeholder for the token that the last plan chooses, so that the next plan computes it.
    pub fn push_placeholder(&mut self, id: SequenceId) {
        if let Some(sequence) = self.get_mut(id) {
            sequence.push_placeholder();
        }
    }

    /// Discards a plan that did not run: none of its KV is ever read. The caller retires the sequences that it
    /// computes something for ([`StepPlan::ids`]); other sequences whose blocks it was to move are recomputed, and
    /// those that wait for its projections plan them again.
    pub fn roll_back(&mut self, plan: &StepPlan) {
        self.checkpoints.clear();
        for id in &plan.moved {
            if let Some(sequence) = self.get_mut(*id) {
                sequence.status = SequenceStatus::Waiting;
            }
        }
    }

    /// Appends a token. `false` when the context is full.
    pub fn push(&mut self, id: SequenceId, token: u32, now: Instant) -> bool {
        self.get_mut(id).is_some_and(|sequence| {
            sequence.mark_token(now);
            sequence.push(token);
            sequence.n_tokens() < sequence.limit()
        })
    }

    /// Marks the token just appended as an accepted draft, whose KV is computed already.
    pub fn accept(&mut self, id: SequenceId) {
        let Some(sequence) = self.get_mut(id) else { return };
        sequence.counters.n_accepted += 1;
        let n_computed = sequence.n_computed() + 1;
        self.counts.accepted_tokens += 1;
        self.advance(id, 0, n_computed);
    }

    /// Splits all completions but the first into sequences of their own, next to it in the queue. Forks without
    /// a run slot wait. Returns all ids, the first one's first.
    pub fn fork(&mut self, id: SequenceId) -> Vec<SequenceId> {
        let Some(queue_key) = self.queue_keys.get(&id).copied() else { return Vec::new() };
        let n_running = self.n_running();
        let Some(sequence) = self.sequences.get_mut(&queue_key) else { return Vec::new() };
        let completions = sequence.completions.clone();
        sequence.completions.truncate(1);
        let (mut forks, mut copies) = (Vec::new(), Vec::new());
        for (i, completion) in (1..).zip(&completions[1..]) {
            let mut fork = sequence.fork(*completion);
            let fits = n_running + i as usize <= self.config.max_sequences;
            match fits.then(|| sequence.copy_states_to(&mut fork, &self.states)).flatten() {
                Some(more) => copies.push((*completion, more)),
                None => fork.status = SequenceStatus::Waiting,
            }
            forks.push((QueueKey { completion: queue_key.completion + i, ..queue_key }, fork));
        }
        for (queue_key, fork) in forks {
            self.queue_keys.insert(fork.id(), queue_key);
            self.shares.join(fork.tenant);
            self.sequences.insert(queue_key, fork);
        }
        copies.into_iter().for_each(|(id, copies)| self.queue_copies(id, copies));
        completions
    }

    /// Replaces the branches of a sequence; each child continues a present branch. `false` when the context is
    /// full.
    pub fn branch(&mut self, id: SequenceId, children: &[(usize, u32)], now: Instant) -> bool {
        let Some(sequence) = self.get_mut(id) else { return false };
        sequence.mark_token(now);
        let copies = sequence.branch(children.iter().copied());
        let fits_more = sequence.n_tokens() < sequence.limit();
        self.queue_copies(id, copies);
        fits_more
    }

    /// Removes a sequence with all its completions. Its blocks are free when the result is dropped.
    pub fn retire(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.sequences.remove(self.queue_keys.get(&id)?)?;
        for completion in &sequence.completions {
            self.queue_keys.remove(completion);
        }
        self.shares.leave(&sequence.tenant);
        Some(sequence)
    }

    /// Cancels a completion. A sequence ends with its last completion; otherwise returns its new id.
    pub fn abandon(&mut self, id: SequenceId) -> Option<SequenceId> {
        let sequence = self.get_mut(id)?;
        if sequence.completions.len() == 1 {
            self.retire(id);
            return None;
        }
        sequence.completions.retain(|completion| *completion != id);
        let name = sequence.id();
        self.queue_keys.remove(&id);
        Some(name)
    }

    /// Clears the prefix cache, its checkpoints, and the cross-attention cache.
    pub fn reset(&mut self) {
        self.pool.reset();
        self.cross.reset();
        self.states.reset();
    }

    /// Earliest deadline of all sequences.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.sequences.values().map(|s| s.deadline).min()
    }

    /// Run slots in use.
    pub fn n_running(&self) -> usize {
        self.sequences.values().filter(|s| s.device_kv().is_some()).map(Sequence::n_run_slots).sum()
    }

    /// Running sequences that decode.
    pub fn n_decoding(&self) -> usize {
        self.sequences.values().filter(|s| s.device_kv().is_some() && s.is_decoding()).count()
    }

    /// Completions whose sequences do not run.
    pub fn n_waiting(&self) -> usize {
        self.sequences.values().filter(|s| s.device_kv().is_none()).map(|s| s.completions.len()).sum()
    }

    /// Tokens to prefill, over all sequences.
    pub fn n_waiting_tokens(&self) -> usize {
        let reading = self.sequences.values().filter(|s| !s.is_decoding());
        reading.map(|s| s.n_tokens().saturating_sub(s.n_computed())).sum()
    }

    /// Run slots in use, and completions that wait, of each adapter that a sequence has.
    pub fn adapter_loads(&self) -> BTreeMap<AdapterId, AdapterLoad> {
        let mut loads: BTreeMap<AdapterId, AdapterLoad> = BTreeMap::new();
        for (sequence, adapter) in self.sequences.values().filter_map(|s| Some((s, s.adapter()?))) {
            let load = loads.entry(adapter).or_default();
            match sequence.device_kv() {
                Some(_) => load.running += sequence.n_run_slots(),
                None => load.waiting += sequence.completions.len(),
            }
        }
        loads
    }

    /// Time of a prompt token in recent steps; `None` before the second that has some.
    pub fn prefill_row(&self) -> Option<Duration> {
        self.rates.prefill_row()
    }

    /// Counters since the start.
    pub fn counts(&self) -> SchedulerCounters {
        self.counts
    }

    /// Pool of self-attention blocks on the device.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Pool of self-attention blocks on the host.
    pub fn host(&self) -> &BlockPool {
        &self.host
    }

    /// Cross-attention blocks.
    pub fn cross(&self) -> &CrossCache {
        &self.cross
    }

    /// Slots of recurrent states.
    pub fn states(&self) -> &StatePool {
        &self.states
    }

    fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.get_mut(self.queue_keys.get(&id)?)
    }

    /// Marks the shares of an entry as filled.
    fn share_filled(&mut self, key: CrossKey) {
        for sequence in self.sequences.values_mut() {
            let filled: Vec<usize> = sequence.fills().filter(|(_, of)| *of == key).map(|(i, _)| i).collect();
            let Some(device_kv) = sequence.device_kv_mut() else { continue };
            for source in filled {
                device_kv.cross[source].set_filled();
            }
        }
    }

    fn advance(&mut self, id: SequenceId, branch: usize, end: usize) {
        if let Some(sequence) = self.get_mut(id) {
            sequence.advance(branch, end);
        }
    }

    /// Running sequences that match, most urgent first.
    fn running(&self, which: impl Fn(&Sequence) -> bool) -> Vec<QueueKey> {
        let running = self.sequences.iter().filter(|(_, s)| s.device_kv().is_some() && which(s));
        let mut queue_keys: Vec<(i32, QueueKey)> =
            running.map(|(queue_key, s)| (s.priority, *queue_key)).collect();
        queue_keys.sort_unstable();
        queue_keys.into_iter().map(|(_, queue_key)| queue_key).collect()
    }
}
