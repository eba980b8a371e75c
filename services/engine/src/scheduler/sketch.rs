//! A plan in the making: rows under a budget, in the order in which they were granted.

use crate::blocks::BlockTable;
use crate::cross::{CrossCache, CrossShare};
use crate::plan::{BlockMove, Projection};
use crate::request::SequenceId;
use crate::sequence::{Place, Sequence};
use std::ops::Range;

/// Rows of one branch.
#[derive(Debug)]
pub(super) struct Rows {
    pub place: Place,
    pub branch: usize,
    pub tokens: Range<usize>,
    pub drafts: Vec<u32>,
}

/// A plan in the making.
#[derive(Debug)]
pub(super) struct Sketch {
    /// Rows that may still be added.
    pub budget: usize,
    pub rows: Vec<Rows>,
    pub moves: Vec<BlockMove>,
    pub moved: Vec<SequenceId>,
    pub projections: Vec<Projection>,
    /// Sequences that came onto the device.
    pub n_admitted: usize,
    projected_rows: usize,
}

impl Sketch {
    /// Nothing yet.
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

    /// Adds rows for which there is budget.
    pub fn push(&mut self, rows: Rows) {
        self.budget = self.budget.saturating_sub(rows.tokens.len() + rows.drafts.len());
        self.rows.push(rows);
    }

    /// Adds as many tokens of a resident sequence that reads as it may read and the budget allows.
    ///
    /// A single branch reads to its end. Of several none reads its last token: they do it together, in a step
    /// that then chooses for all of them. What all of them begin with the first one reads, before the others go on.
    pub fn push_reading(&mut self, place: Place, sequence: &Sequence, cache: &CrossCache) {
        let Some(residence) = sequence.residence() else { return };
        // Items that failed were reaped.
        let readable = sequence.readable(sequence.n_computed(), cache).unwrap_or(0);
        let last = if sequence.n_branches() == 1 { sequence.n_tokens() } else { sequence.n_tokens() - 1 };
        let mut first_end = 0;
        for (branch, resident) in residence.branches.iter().enumerate() {
            let start = resident.n_computed;
            if branch > 0 && first_end < start {
                return;
            }
            let n = readable.min(last).min(sequence.n_room()).saturating_sub(start).min(self.budget);
            if branch == 0 {
                first_end = start + n;
            }
            if n > 0 {
                self.push(Rows { place, branch, tokens: start..start + n, drafts: Vec::new() });
            }
        }
    }

    /// Rows of a sequence.
    pub fn n_rows(&self, place: Place) -> usize {
        let rows = self.rows.iter().filter(|rows| rows.place == place);
        rows.map(|rows| rows.tokens.len() + rows.drafts.len()).sum()
    }

    /// Takes back all rows of a sequence.
    pub fn withdraw(&mut self, place: Place) {
        let budget = &mut self.budget;
        self.rows.retain(|rows| {
            let kept = rows.place != place;
            *budget += if kept { 0 } else { rows.tokens.len() + rows.drafts.len() };
            kept
        });
    }

    /// Projections cost as rows do, but may not starve: one is always taken, however large.
    pub fn may_project(&self) -> bool {
        self.projected_rows < self.budget.max(1)
    }

    /// Takes a share, and plans its projection if it is to be filled.
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
