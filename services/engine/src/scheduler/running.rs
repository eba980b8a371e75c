//! Rows of running sequences: one for each decoding branch, chunks for those that prefill.

use super::plan_builder::{PlanBuilder, PlannedRows};
use super::{DraftTokens, Scheduler};
use crate::blocks::KvTables;
use crate::plan::BlockMove;
use crate::sequence::{QueueKey, Sequence, SequenceStatus};

impl Scheduler {
    /// Takes running sequences off the device that reached an item which is not loaded, or whose cross-attention
    /// blocks a reset left unfinished. True if there were any.
    pub(super) fn suspend_blocked(&mut self) -> bool {
        let mut suspended = false;
        for sequence in self.sequences.values_mut().filter(|s| s.device_kv().is_some() && !s.awaits_token()) {
            // Failed items ended their sequences earlier in the step.
            let n_computed = sequence.n_computed();
            let readable = sequence.readable(n_computed, &self.cross).unwrap_or(0);
            // A prefill has blocks up to the item that was missing at admission; a decoding sequence takes them
            // as it goes.
            let is_out_of_room = n_computed >= sequence.n_admitted() && !sequence.is_decoding();
            let is_unfinished = sequence.fills().any(|(_, key)| !self.cross.contains(&key));
            if readable <= n_computed || is_out_of_room || is_unfinished {
                sequence.status = SequenceStatus::Waiting;
                sequence.blocked_at =
                    sequence.readable(0, &self.cross).ok().filter(|_| readable <= n_computed);
                suspended = true;
            }
        }
        suspended
    }

    /// One row for each branch of each decoding sequence, most urgent first. The budget holds `max_sequences`
    /// rows at least; the rest may go to draft tokens.
    pub(super) fn decode(&mut self, builder: &mut PlanBuilder, drafts: &mut DraftTokens) {
        let decoding = self.running(Sequence::is_decoding);
        let n_rows: usize =
            decoding.iter().filter_map(|p| self.sequences.get(p)).map(Sequence::n_branches).sum();
        let mut n_spare = builder.budget.saturating_sub(n_rows);
        for queue_key in decoding {
            if !self.grow(queue_key, builder) {
                continue;
            }
            let Some(sequence) = self.sequences.get_mut(&queue_key) else { continue };
            let n_tokens = sequence.n_tokens();
            for branch in 0..sequence.n_branches() {
                let mut draft = drafts.remove(&sequence.id()).unwrap_or_default();
                draft.truncate(n_spare.min(sequence.limit().saturating_sub(n_tokens + 1)));
                let tables = sequence.device_kv_mut().map(|r| &mut r.branches[branch].tables);
                // Drafts may take free blocks, but never preempt another sequence.
                if tables.is_some_and(|tables| tables.grow(n_tokens + draft.len()).is_err()) {
                    draft.clear();
                }
                n_spare -= draft.len();
                builder.push(PlannedRows {
                    queue_key,
                    branch,
                    tokens: n_tokens - 1..n_tokens,
                    drafts: draft,
                });
            }
            self.charge(queue_key, builder);
        }
    }

    /// Makes room for the newest token of each branch of a decoding sequence; preempts the last in the queue if
    /// there is none. True if the sequence itself still runs.
    fn grow(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&queue_key) else { return false };
            let n_tokens = sequence.n_tokens();
            let Some(device_kv) = sequence.device_kv_mut() else { return false };
            let tables = device_kv.branches.iter_mut().map(|b| &mut b.tables);
            let n_moves = builder.moves.len();
            let all_grew = grow_all(tables, n_tokens, &mut builder.moves);
            if builder.moves.len() > n_moves {
                builder.moved.push(sequence.id());
            }
            if all_grew {
                return true;
            }
            // Sequences with planned rows come before this one, which itself is running.
            if !self.preempt_last(builder) {
                return false;
            }
        }
    }

    /// Preempts the last running sequence in the queue; `false` if there is none. One that awaits its token keeps its blocks until
    /// it has it.
    fn preempt_last(&mut self, builder: &mut PlanBuilder) -> bool {
        let Some(last) = self.running(|s| !s.awaits_token()).pop() else { return false };
        self.preempt(last, builder);
        true
    }

    /// Makes room for the next chunk of a prefill where that was not taken at its admission; preempts the last in the queue if
    /// there is none. True if the sequence itself still runs.
    fn grow_prefill(&mut self, queue_key: QueueKey, builder: &mut PlanBuilder) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&queue_key) else { return false };
            if sequence.device_kv().is_none() {
                return false;
            }
            let chunk_end = builder.latest_end(sequence, sequence.n_computed());
            if sequence.grow_prefill(chunk_end).is_ok() {
                return true;
            }
            if !self.preempt_last(builder) {
                return false;
            }
        }
    }

    /// Continues the prefills that were started before this step, each with the projection of its encoder input.
    pub(super) fn prefill(&mut self, started: Vec<QueueKey>, builder: &mut PlanBuilder) {
        for queue_key in started {
            if !self.grow_prefill(queue_key, builder) {
                continue;
            }
            if let Some(sequence) = self.sequences.get(&queue_key) {
                builder.push_projection(queue_key, sequence, &self.cross);
                builder.push_prefill(queue_key, sequence, &self.cross);
            }
            self.charge(queue_key, builder);
        }
    }

    /// Charges a tenant for what is planned for a sequence.
    pub(super) fn charge(&mut self, queue_key: QueueKey, builder: &PlanBuilder) {
        if let Some(sequence) = self.sequences.get(&queue_key) {
            self.shares.charge(&sequence.tenant, builder.cost(queue_key));
        }
    }
}

/// Room for token number `n_tokens - 1` in each table, in a block of its own. Tables that grew stay grown when
/// another cannot: the next try begins there.
fn grow_all<'a>(
    branches: impl Iterator<Item = &'a mut KvTables>,
    n_tokens: usize,
    moves: &mut Vec<BlockMove>,
) -> bool {
    for tables in branches {
        let mut copies = Vec::new();
        let grew = tables.grow(n_tokens).and_then(|()| tables.own(n_tokens - 1, &mut copies));
        moves.extend(copies.into_iter().map(BlockMove::Copy));
        if grew.is_err() {
            return false;
        }
    }
    true
}
