//! Giving way: what becomes of the keys and values of a sequence that loses its blocks.

use super::Scheduler;
use super::sketch::Sketch;
use crate::config::Preemption;
use crate::plan::BlockMove;
use crate::sequence::{Phase, Place, Residence, Resident, Sequence};
use std::time::Duration;

impl Scheduler {
    /// Takes a running sequence off the device; it keeps its place in line.
    pub(super) fn preempt(&mut self, place: Place, sketch: &mut Sketch) {
        let Some(sequence) = self.line.get_mut(&place) else { return };
        let was_decoding = sequence.is_decoding();
        let Phase::Running(residence) = std::mem::replace(&mut sequence.phase, Phase::Waiting) else {
            return;
        };
        self.counts.preemptions += 1;
        sketch.withdraw(place);
        // While several branches read, the later ones count on what the first has not computed yet.
        let is_whole = residence.branches.len() == 1 || was_decoding;
        if is_whole
            && self.is_worth_moving(&residence)
            && let Some(residents) = self.move_out(&residence, sketch)
            && let Some(sequence) = self.line.get_mut(&place)
        {
            sequence.phase = Phase::Swapped(residents);
            sketch.moved.push(sequence.id());
            self.counts.swaps += 1;
        }
    }

    /// Whether moving the computed blocks there and back is expected to take less time than computing them again.
    fn is_worth_moving(&self, residence: &Residence) -> bool {
        let swap_bytes_per_s = match self.bounds.preemption {
            Preemption::Recompute => return false,
            Preemption::Swap => return true,
            Preemption::Cheapest { swap_bytes_per_s } => swap_bytes_per_s,
        };
        let n_blocks: usize = residence.branches.iter().map(|b| b.computed_blocks().len()).sum();
        let n_tokens: usize = residence.branches.iter().map(|b| b.n_computed).sum();
        let bytes = 2.0 * (n_blocks * self.capacity.decoder.self_block_bytes) as f64;
        let moving = Duration::try_from_secs_f64(bytes / swap_bytes_per_s as f64).unwrap_or(Duration::MAX);
        self.rates.reading(n_tokens).is_some_and(|computing| moving < computing)
    }

    /// The computed blocks on the host. `None` if they do not fit there.
    fn move_out(&self, residence: &Residence, sketch: &mut Sketch) -> Option<Vec<Resident>> {
        let tables: Vec<_> = residence.branches.iter().map(Resident::computed_blocks).collect();
        let (tables, pairs) = self.host.mirror(&tables).ok()?;
        sketch.moves.extend(pairs.into_iter().map(BlockMove::Out));
        let residents = tables.into_iter().zip(&residence.branches);
        Some(residents.map(|(table, b)| Resident { table, n_computed: b.n_computed }).collect())
    }

    /// The last in line of those less urgent than `priority` that run; `None` if giving way would not help,
    /// because all of them together hold less than is needed.
    pub(super) fn less_urgent(&self, priority: i32, needed: Needed) -> Option<Place> {
        let less: Vec<Place> = self.running(|s| s.priority > priority);
        let held = |s: &Sequence| {
            s.residence().map_or(0, |r| r.branches.iter().map(|b| b.table.blocks().len()).sum())
        };
        let sequences = less.iter().filter_map(|place| self.line.get(place));
        let (blocks, places) = sequences.fold((0, 0), |(b, p), s| (b + held(s), p + s.n_places()));
        let free_places = self.bounds.max_sequences.saturating_sub(self.n_running());
        let helps = needed.blocks <= self.pool.free() + blocks && needed.places <= free_places + places;
        less.last().copied().filter(|_| helps)
    }
}

/// What a sequence in line needs to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needed {
    pub blocks: usize,
    pub places: usize,
}
