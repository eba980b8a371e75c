//! Rows for those that run: one for each that writes, chunks for those that read.

use super::sketch::{Rows, Sketch};
use super::{Drafts, Scheduler};
use crate::blocks::BlockTable;
use crate::plan::BlockMove;
use crate::sequence::{Phase, Place, Sequence};

impl Scheduler {
    /// Running sequences at an item that is not here give up what they hold. Whether any did.
    pub(super) fn park(&mut self) -> bool {
        let mut parked = false;
        for sequence in self.line.values_mut().filter(|s| s.residence().is_some()) {
            // Items that failed were reaped.
            let n_computed = sequence.n_computed();
            let readable = sequence.readable(n_computed, &self.cross).unwrap_or(0);
            // One that reads got blocks up to the gate that was shut then; one that writes gets them as it does.
            let is_out_of_room = n_computed >= sequence.n_room() && !sequence.is_decoding();
            if readable <= n_computed || is_out_of_room {
                sequence.phase = Phase::Waiting;
                sequence.shut_gate =
                    sequence.readable(0, &self.cross).ok().filter(|_| readable <= n_computed);
                parked = true;
            }
        }
        parked
    }

    /// One row for each branch of each decoding sequence, most urgent first. The budget holds `max_sequences`
    /// rows at least; what is left of it then may go to drafts.
    pub(super) fn decode(&mut self, sketch: &mut Sketch, drafts: &mut Drafts) {
        let decoding = self.running(Sequence::is_decoding);
        let n_rows: usize = decoding.iter().filter_map(|p| self.line.get(p)).map(Sequence::n_branches).sum();
        let mut n_spare = sketch.budget.saturating_sub(n_rows);
        for place in decoding {
            if !self.grow(place, sketch) {
                continue;
            }
            let Some(sequence) = self.line.get_mut(&place) else { continue };
            let n_tokens = sequence.n_tokens();
            for branch in 0..sequence.n_branches() {
                let mut guess = drafts.remove(&sequence.id()).unwrap_or_default();
                guess.truncate(n_spare.min(sequence.limit().saturating_sub(n_tokens + 1)));
                let resident = sequence.residence_mut().map(|r| &mut r.branches[branch].table);
                // A guess is worth blocks that nobody needs, and nobody's preemption.
                if resident.is_some_and(|table| table.grow(n_tokens + guess.len()).is_err()) {
                    guess.clear();
                }
                n_spare -= guess.len();
                sketch.push(Rows { place, branch, tokens: n_tokens - 1..n_tokens, drafts: guess });
            }
            self.charge(place, sketch);
        }
    }

    /// Makes room for the newest token of each branch of a decoding sequence, at the cost of the last in line if
    /// there is no other. Whether the sequence itself still runs.
    fn grow(&mut self, place: Place, sketch: &mut Sketch) -> bool {
        loop {
            let Some(sequence) = self.line.get_mut(&place) else { return false };
            let n_tokens = sequence.n_tokens();
            let Some(residence) = sequence.residence_mut() else { return false };
            let tables = residence.branches.iter_mut().map(|b| &mut b.table);
            let n_moves = sketch.moves.len();
            let all_grew = grow_all(tables, n_tokens, &mut sketch.moves);
            if sketch.moves.len() > n_moves {
                sketch.moved.push(sequence.id());
            }
            if all_grew {
                return true;
            }
            // Whoever has rows in the sketch goes before `place`, and `place` itself is running.
            let Some(last) = self.running(|_| true).pop() else { return false };
            self.preempt(last, sketch);
        }
    }

    /// Goes on with prompts that are started.
    pub(super) fn read(&mut self, sketch: &mut Sketch) {
        for place in self.running(|s| !s.is_decoding()) {
            if let Some(sequence) = self.line.get(&place) {
                sketch.push_reading(place, sequence, &self.cross);
            }
            self.charge(place, sketch);
        }
    }

    /// Charges a tenant for the rows of a sequence.
    pub(super) fn charge(&mut self, place: Place, sketch: &Sketch) {
        if let Some(sequence) = self.line.get(&place) {
            self.shares.charge(&sequence.tenant, sketch.n_rows(place));
        }
    }
}

/// Room for token number `n_tokens - 1` in each table, in a block of its own. What one table got stays when
/// another gets nothing: the next try begins there.
fn grow_all<'a>(
    tables: impl Iterator<Item = &'a mut BlockTable>,
    n_tokens: usize,
    moves: &mut Vec<BlockMove>,
) -> bool {
    for table in tables {
        match table.grow(n_tokens).and_then(|()| table.own(n_tokens - 1)) {
            Ok(pair) => moves.extend(pair.map(BlockMove::Copy)),
            Err(_) => return false,
        }
    }
    true
}
