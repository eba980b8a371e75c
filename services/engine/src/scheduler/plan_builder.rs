//! A step plan under construction: rows under a budget, in the order in which they were granted.

use crate::cross::{CrossCache, CrossKey};
use crate::plan::{BlockMove, ProjectionChunk};
use crate::request::SequenceId;
use crate::sequence::{QueueKey, Sequence};
use crate::states::{CHECKPOINT_TOKENS, StateMove};
use std::ops::Range;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_models::decoder::DecoderInfo;

/// Planned rows of one branch.
#[derive(Debug)]
pub(super) struct PlannedRows {
    pub queue_key: QueueKey,
    pub branch: usize,
    pub tokens: Range<usize>,
    pub drafts: Vec<u32>,
}

/// Planned encoder rows, and what they cost.
#[derive(Debug)]
pub(super) struct PlannedProjection {
    pub queue_key: QueueKey,
    pub chunk: ProjectionChunk,
    /// In rows of the step.
    cost: usize,
}

/// Most encoder rows of a step, whatever they cost: they lie in memory as f32 while they are projected.
const MAX_PROJECTED: usize = 4096;

/// Most tokens of prompts of a step whose log-probabilities are computed: each has a row of logits in host memory.
const MAX_SCORED: usize = 64;

/// End of a chunk that begins with token `start`, would end with token `end`, and without a budget with token `most`: where a
/// recurrent state is to be kept, or else the end of a block if the budget cuts it.
///
/// A state is kept at the end of a prefix that others had, and at the last end of a block, which the same prompt finds again.
fn checkpoint_end(sequence: &Sequence, start: usize, [end, most]: [usize; 2]) -> usize {
    let border = |n: usize| n / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    let last = border(most.saturating_sub(1));
    let kept = [sequence.checkpoint_at.unwrap_or(last), last].into_iter();
    let is_worth = |at: &usize| (start + CHECKPOINT_TOKENS..end).contains(at);
    match kept.filter(is_worth).min() {
        Some(at) => at,
        None if end < most && border(end) > start => border(end),
        None => end,
    }
}

/// A step plan under construction.
#[derive(Debug)]
pub(super) struct PlanBuilder {
    /// Rows that may still be added.
    pub budget: usize,
    pub rows: Vec<PlannedRows>,
    pub moves: Vec<BlockMove>,
    pub moved: Vec<SequenceId>,
    pub state_moves: Vec<StateMove>,
    pub projections: Vec<PlannedProjection>,
    /// Tokens of prompts whose log-probabilities may still be computed.
    score_room: usize,
    /// Sequences that came onto the device.
    pub n_admitted: usize,
    /// Encoder rows that cost as much as one row of the step.
    cross_rows_per_token: usize,
    /// True if rows of an item's span attend to each other: no chunk ends within one.
    mutual_items: bool,
    /// True if chunks of prompts end where a recurrent state is to be kept.
    pub keeps_states: bool,
}

impl PlanBuilder {
    /// An empty plan with a budget in rows, for a decoder of these sizes.
    pub fn new(budget: usize, decoder: &DecoderInfo) -> Self {
        Self {
            budget,
            cross_rows_per_token: decoder.cross_rows_per_token.max(1),
            mutual_items: decoder.mutual_items,
            rows: Vec::new(),
            moves: Vec::new(),
            moved: Vec::new(),
            state_moves: Vec::new(),
            keeps_states: false,
            projections: Vec::new(),
            score_room: MAX_SCORED,
            n_admitted: 0,
        }
    }

    /// Adds rows that fit the budget.
    pub fn push(&mut self, rows: PlannedRows) {
        self.budget = self.budget.saturating_sub(rows.tokens.len() + rows.drafts.len());
        self.rows.push(rows);
    }

    /// Adds as many prompt tokens of a resident sequence as are readable and fit the budget.
    ///
    /// None before its cross-attention blocks are filled, by this plan at the latest: projections run first.
    ///
    /// A single branch prefills to its end. Of several branches none computes its last token: they do that
    /// together, in a step that then chooses for all of them. The first branch computes the common prefix before
    /// the others go on.
    pub fn push_prefill(&mut self, queue_key: QueueKey, sequence: &Sequence, cache: &CrossCache) {
        let Some(device_kv) = sequence.device_kv() else { return };
        if sequence.fills().any(|(_, key)| self.n_projected(&key, cache) < key.n_rows as usize) {
            return;
        }
        // Failed items ended their sequences earlier in the step.
        let readable = sequence.readable(sequence.n_computed(), cache).unwrap_or(0);
        let last = if sequence.n_branches() == 1 { sequence.n_tokens() } else { sequence.n_tokens() - 1 };
        let mut first_end = 0;
        for (branch, branch_kv) in device_kv.branches.iter().enumerate() {
            let start = branch_kv.n_computed;
            if branch > 0 && first_end < start {
                return;
            }
            let most = readable.min(last).min(sequence.n_room());
            let end = self.chunk_end(sequence, start, most);
            if branch == 0 {
                first_end = end;
            }
            if end > start {
                if sequence.is_scored() {
                    self.score_room = self.score_room.saturating_sub(end - start);
                }
                self.push(PlannedRows { queue_key, branch, tokens: start..end, drafts: Vec::new() });
            }
        }
    }

    /// Token with which a chunk that begins with token `start` ends at the latest: by the budget, or the end of a span that is
    /// not cut.
    pub fn latest_end(&self, sequence: &Sequence, start: usize) -> usize {
        let end = start + self.budget;
        let span = sequence.span_across(end).filter(|_| self.mutual_items && self.budget > 0);
        span.map_or(end, |span| span.end)
    }

    /// End of a chunk that begins with token `start` and ends with token `most` at the latest.
    ///
    /// A span whose rows attend to each other is not cut. One that does not fit what is left of the budget waits for the next
    /// step; the first of a step's prompts may exceed it by a span, so that none waits for ever.
    fn chunk_end(&self, sequence: &Sequence, start: usize, most: usize) -> usize {
        let room = if sequence.is_scored() { self.budget.min(self.score_room) } else { self.budget };
        let end = start + most.saturating_sub(start).min(room);
        if self.keeps_states && sequence.n_branches() == 1 {
            return checkpoint_end(sequence, start, [end, most]);
        }
        let Some(span) = sequence.span_across(end).filter(|_| self.mutual_items && end > start) else {
            return end;
        };
        let is_first = self.rows.iter().all(|rows| rows.tokens.len() == 1);
        match (span.start > start, span.end <= most && is_first) {
            (true, _) => span.start,
            (false, true) => span.end,
            (false, false) => start,
        }
    }

    /// Cost of what is planned for a sequence, in rows.
    pub fn cost(&self, queue_key: QueueKey) -> usize {
        let rows = self.rows.iter().filter(|rows| rows.queue_key == queue_key);
        let projections = self.projections.iter().filter(|planned| planned.queue_key == queue_key);
        rows.map(|rows| rows.tokens.len() + rows.drafts.len()).sum::<usize>()
            + projections.map(|planned| planned.cost).sum::<usize>()
    }

    /// Removes all rows of a sequence.
    pub fn withdraw(&mut self, queue_key: QueueKey) {
        let budget = &mut self.budget;
        self.rows.retain(|rows| {
            let kept = rows.queue_key != queue_key;
            *budget += if kept { 0 } else { rows.tokens.len() + rows.drafts.len() };
            kept
        });
    }

    /// Removes projections into blocks that no sequence holds any more: the blocks may be taken by the next.
    pub fn withdraw_unheld(&mut self, cache: &CrossCache) {
        let budget = &mut self.budget;
        self.projections.retain(|planned| {
            let kept = cache.is_held(&planned.chunk.key);
            *budget += if kept { 0 } else { planned.cost };
            kept
        });
    }

    /// Encoder rows that may still be added.
    pub fn projection_room(&self) -> usize {
        let n_planned: usize = self.projections.iter().map(|planned| planned.chunk.rows.len()).sum();
        self.budget.saturating_mul(self.cross_rows_per_token).min(MAX_PROJECTED.saturating_sub(n_planned))
    }

    /// Adds as many rows of a resident sequence's cross-attention sources as are missing and fit the budget.
    pub fn push_projection(&mut self, queue_key: QueueKey, sequence: &Sequence, cache: &CrossCache) {
        let Some(device_kv) = sequence.device_kv() else { return };
        for (source, key) in sequence.fills() {
            loop {
                let start = self.n_projected(&key, cache);
                let n = (key.n_rows as usize).saturating_sub(start).min(self.projection_room());
                let table = device_kv.cross[source].table();
                // A sequence holds a share that is not filled only if it has the rows.
                let chunk = (n > 0).then(|| ProjectionChunk::new(sequence, (source, table), start, n));
                let Some(chunk) = chunk.flatten() else { break };
                let cost = chunk.rows.len().div_ceil(self.cross_rows_per_token);
                self.budget = self.budget.saturating_sub(cost);
                self.projections.push(PlannedProjection { queue_key, chunk, cost });
            }
        }
    }

    /// Encoder rows of an entry that are projected once the plan has run, from the first.
    fn n_projected(&self, key: &CrossKey, cache: &CrossCache) -> usize {
        let planned = self.projections.iter().filter(|planned| planned.chunk.key == *key);
        planned.map(|planned| planned.chunk.rows.end).fold(cache.n_filled(key), usize::max)
    }
}
