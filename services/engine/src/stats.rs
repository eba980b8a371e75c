//! Counters and gauges of an engine, for metrics and load reports.

use crate::scheduler::Scheduler;
use std::time::Duration;

/// Counters and gauges of an engine. Counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Run slots in use: one for each running sequence, or for each beam that it may have.
    pub running: usize,
    /// Sequences that decode.
    pub decoding: usize,
    /// Completions that wait.
    pub waiting: usize,
    /// Tokens still to prefill.
    pub waiting_tokens: usize,
    /// Self-attention blocks in use.
    pub self_used: usize,
    /// Cached self-attention blocks, which are free when needed.
    pub self_cached: usize,
    /// All self-attention blocks.
    pub self_total: usize,
    /// Host blocks of swapped sequences.
    pub host_used: usize,
    /// All host blocks.
    pub host_total: usize,
    /// Cross-attention blocks that sequences hold.
    pub cross_used: usize,
    /// Cross-attention blocks kept for the next sequence over the same input, which are free when needed.
    pub cross_cached: usize,
    /// All cross-attention blocks.
    pub cross_total: usize,
    /// Slots of recurrent states that sequences hold.
    pub states_used: usize,
    /// Checkpoints of recurrent states, which are free when needed.
    pub state_checkpoints: usize,
    /// All slots of recurrent states; 0 of a model without them.
    pub states_total: usize,
    /// Encoder outputs that are loaded.
    pub items_ready: usize,
    /// Encoder outputs that are pending.
    pub items_pending: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Preemptions that swapped to the host.
    pub swaps: u64,
    /// Prompt tokens of sequences that started, since the start.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Sequences that began with a checkpoint of a recurrent state.
    pub checkpoint_hits: u64,
    /// Rows that steps computed, since the start.
    pub computed_tokens: u64,
    /// Draft tokens that were verified since the start.
    pub drafted_tokens: u64,
    /// Draft tokens that were accepted.
    pub accepted_tokens: u64,
    /// Time of steps beyond that of the fastest step that only decodes, in microseconds: what rows cost, without what any step
    /// does.
    pub step_work_us: u64,
    /// The other part: time of the fastest step that only decodes, for each step that decodes, in microseconds.
    pub step_fixed_us: u64,
    /// Time that those steps may take by the TPOT SLO, the longer the more drafts are accepted, in microseconds; 0: no SLO, or none
    /// that a step can meet.
    pub step_slo_us: u64,
    /// Time of a prompt token in recent steps, without what any step takes; `None` before the second that has
    /// some.
    pub prefill_row: Option<Duration>,
}

impl Stats {
    /// Reads the statistics of a scheduler.
    pub fn of(scheduler: &Scheduler) -> Self {
        let (items_ready, items_pending) = scheduler.items().counts();
        let pool = scheduler.pool();
        let host = scheduler.host();
        let cross = scheduler.cross();
        let states = scheduler.states();
        let counts = scheduler.counts();
        Self {
            running: scheduler.n_running(),
            decoding: scheduler.n_decoding(),
            waiting: scheduler.n_waiting(),
            waiting_tokens: scheduler.n_waiting_tokens(),
            self_used: pool.used(),
            self_cached: pool.cached(),
            self_total: pool.total(),
            host_used: host.used(),
            host_total: host.total(),
            cross_used: cross.held(),
            cross_cached: cross.cached(),
            cross_total: cross.total(),
            states_used: states.used(),
            state_checkpoints: states.checkpoints(),
            states_total: states.total(),
            items_ready,
            items_pending,
            preemptions: counts.preemptions,
            swaps: counts.swaps,
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            checkpoint_hits: counts.checkpoint_hits,
            computed_tokens: counts.computed_tokens,
            drafted_tokens: counts.drafted_tokens,
            accepted_tokens: counts.accepted_tokens,
            step_work_us: counts.step_work_us,
            step_fixed_us: counts.step_fixed_us,
            step_slo_us: counts.step_slo_us,
            prefill_row: scheduler.prefill_row(),
        }
    }
}
