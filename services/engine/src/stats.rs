//! Counts of an engine at a moment, for whoever watches it.

use crate::scheduler::Scheduler;

/// Counts at a moment. What counts since the start only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Running places taken: sequences that hold blocks, and each beam that one may have.
    pub running: usize,
    /// Sequences that write.
    pub decoding: usize,
    /// Answers in line.
    pub waiting: usize,
    /// Tokens that sequences still have to read before they write.
    pub waiting_tokens: usize,
    /// Self-attention blocks in use.
    pub self_used: usize,
    /// Self-attention blocks kept for the next sequence that begins with the same; free when needed.
    pub self_cached: usize,
    /// Self-attention blocks in all.
    pub self_total: usize,
    /// Host blocks that hold what was swapped out.
    pub host_used: usize,
    /// Host blocks in all.
    pub host_total: usize,
    /// Cross-attention blocks that sequences hold.
    pub cross_used: usize,
    /// Cross-attention blocks kept for the next sequence over the same input; free when needed.
    pub cross_cached: usize,
    /// Cross-attention blocks in all.
    pub cross_total: usize,
    /// Encoder outputs that are here.
    pub items_ready: usize,
    /// Encoder outputs that are waited for.
    pub items_pending: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Of those, how many left their keys and values on the host.
    pub swaps: u64,
    /// Prompt tokens of sequences that started, since the start.
    pub prompt_tokens: u64,
    /// Of those, how many were found in the prefix cache.
    pub cached_tokens: u64,
    /// Rows that steps computed, since the start.
    pub computed_tokens: u64,
    /// Tokens guessed ahead since the start.
    pub drafted_tokens: u64,
    /// Of those, how many were right.
    pub accepted_tokens: u64,
}

impl Stats {
    /// The counts of a scheduler.
    pub fn of(scheduler: &Scheduler) -> Self {
        let (items_ready, items_pending) = scheduler.items().counts();
        let (pool, host, cross) = (scheduler.pool(), scheduler.host(), scheduler.cross());
        let counts = scheduler.counts();
        Self {
            running: scheduler.n_running(),
            decoding: scheduler.n_decoding(),
            waiting: scheduler.n_waiting(),
            waiting_tokens: scheduler.n_waiting_tokens(),
            self_used: pool.used(),
            self_cached: pool.idle(),
            self_total: pool.total(),
            host_used: host.used(),
            host_total: host.total(),
            cross_used: cross.held(),
            cross_cached: cross.cached(),
            cross_total: cross.total(),
            items_ready,
            items_pending,
            preemptions: counts.preemptions,
            swaps: counts.swaps,
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            computed_tokens: counts.computed_tokens,
            drafted_tokens: counts.drafted_tokens,
            accepted_tokens: counts.accepted_tokens,
        }
    }
}
