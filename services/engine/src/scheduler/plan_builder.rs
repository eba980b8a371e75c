//! A step plan under construction: rows under a budget, in the order in which they were granted.

use crate::blocks::BlockTable;
use crate::cross::{CrossCache, CrossShare};
use crate::plan::{BlockMove, Projection};
use crate::request::SequenceId;
use crate::sequence::{QueueKey, Sequence};
use std::ops::Range;

/// Planned rows of one branch.
#[derive(Debug)]
pub(super) struct PlannedRows {
    pub queue_key: QueueKey,
    pub branch: usize,
    pub tokens: Range<usize>,
    pub drafts: Vec<u32>,
}

/// A step plan under construction.
#[derive(Debug)]
pub(super) struct PlanBuilder {
    /// Rows that may still be added.
    pub budget: usize,
    pub rows: Vec<PlannedRows>,
    pub moves: Vec<BlockMove>,
    pub moved: Vec<SequenceId>,
    pub projections: Vec<Projection>,
    /// Sequences that came onto the device.
    pub n_admitted: usize,
    projected_rows: usize,
}

impl PlanBuilder {
    /// An empty plan with a budget in rows.
    pub fn new(budget: usize) -> Self {
        Self {
            budget,
            rows: Vec::new(),
            moves: Vec::new(),
            moved: Vec::new(),
            projections: Vec::new(),
            n_admitted: 0,
            projected_rows: 0,
        }
    }

    /// Adds rows that fit the budget.
    pub fn push(&mut self, rows: PlannedRows) {
        self.budget = self.budget.saturating_sub(rows.tokens.len() + rows.drafts.len());
        self.rows.push(rows);
    }

    /// Adds as many prompt tokens of a resident sequence as are readable and fit the budget.
    ///
    /// A single branch prefills to its end. Of several branches none computes its last token: they do that
    /// together, in a step that then chooses for all of them. The first branch computes the common prefix before
    /// the others go on.
    pub fn push_prefill(&mut self, queue_key: QueueKey, sequence: &Sequence, cache: &CrossCache) {
        let Some(device_kv) = sequence.device_kv() else { return };
        // Failed items ended their sequences earlier in the step.
        let readable = sequence.readable(sequence.n_computed(), cache).unwrap_or(0);
        let last = if sequence.n_branches() == 1 { sequence.n_tokens() } else { sequence.n_tokens() - 1 };
        let mut first_end = 0;
        for (branch, branch_kv) in device_kv.branches.iter().enumerate() {
            let start = branch_kv.n_computed;
            if branch > 0 && first_end < start {
                return;
            }
            let n = readable.min(last).min(sequence.n_room()).saturating_sub(start).min(self.budget);
            if branch == 0 {
                first_end = start + n;
            }
            if n > 0 {
                self.push(PlannedRows { queue_key, branch, tokens: start..start + n, drafts: Vec::new() });
            }
        }
    }

    /// Planned rows of a sequence.
    pub fn n_rows(&self, queue_key: QueueKey) -> usize {
        let rows = self.rows.iter().filter(|rows| rows.queue_key == queue_key);
        rows.map(|rows| rows.tokens.len() + rows.drafts.len()).sum()
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

    /// Projections cost as rows do, but must not starve: one is always taken, however large.
    pub fn may_project(&self) -> bool {
        self.projected_rows < self.budget.max(1)
    }

    /// Takes a share of cross-attention KV, and plans its projection if it is new.
    pub fn project(&mut self, sequence: &Sequence, share: CrossShare) -> BlockTable {
        let table = match share {
            CrossShare::Filled(table) => return table,
            CrossShare::ToFill(table) => table,
        };
        if let (Some(key), Some(output)) = (sequence.cross_key(), sequence.cross_rows()) {
            let slots: Vec<u32> = (0..key.n_rows as usize).filter_map(|row| table.slot(row)).collect();
            self.projected_rows += slots.len();
            self.projections.push(Projection { key, output: output.clone(), slots });
        }
        table
    }
}
