//! From the line onto the device: blocks, a share of the encoder's, and what is known already.

use super::Scheduler;
use super::order::Queue;
use super::preemption::Needed;
use super::sketch::Sketch;
use crate::blocks::{BlockPool, BlockTable, OutOfBlocks, blocks_for};
use crate::config::PrefixCache;
use crate::plan::BlockMove;
use crate::sequence::{Phase, Place, Residence, Resident, Sequence};
use std::time::Instant;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// What became of an attempt to admit a sequence.
enum Admission {
    Admitted,
    /// It waits for an item; others may pass.
    Gated,
    /// It waits for blocks or a running place, and everyone behind it with it.
    NoRoom,
    /// The step has as much to project as it takes.
    Later,
}

/// Blocks of a sequence that is about to run, and what has to be moved there first.
struct Seat {
    branches: Vec<Resident>,
    moves: Vec<BlockMove>,
}

impl Scheduler {
    /// Lets in whoever is next, as long as there is budget and room.
    pub(super) fn admit(&mut self, sketch: &mut Sketch, now: Instant) {
        if sketch.budget == 0 {
            return;
        }
        let mut queue = Queue::of(&self.line);
        while sketch.budget > 0
            && let Some(place) = queue.pop(&self.shares)
        {
            loop {
                match self.try_admit(place, sketch, now) {
                    Admission::Admitted | Admission::Gated => break,
                    Admission::Later => return,
                    Admission::NoRoom => {
                        let Some(last) = self.in_the_way_of(place) else { return };
                        self.preempt(last, sketch);
                    }
                }
            }
        }
    }

    /// Who should give way to a sequence that found no room.
    fn in_the_way_of(&self, place: Place) -> Option<Place> {
        let sequence = self.line.get(&place)?;
        let blocks = blocks_for(sequence.n_tokens()) * sequence.n_branches();
        self.less_urgent(sequence.priority, Needed { blocks, places: sequence.n_places() })
    }

    fn try_admit(&mut self, place: Place, sketch: &mut Sketch, now: Instant) -> Admission {
        if self.is_gated(place) {
            return Admission::Gated;
        }
        // Counted only for those that might run: most of a long line is not looked at, or is gated.
        let n_running = self.n_running();
        let Self { line, pool, cross, bounds, .. } = self;
        let Some(sequence) = line.get_mut(&place) else { return Admission::Gated };
        let Ok(gate) = sequence.readable(sequence.n_computed(), cross) else { return Admission::Gated };
        let key = sequence.cross_key();
        if n_running + sequence.n_places() > bounds.max_sequences {
            return Admission::NoRoom;
        }
        let seat = if let Phase::Swapped(residents) = &sequence.phase {
            move_in(pool, residents, gate)
        } else {
            let known = find_known(pool, sequence, bounds.prefix_cache);
            let n_known = known.blocks().len() * KV_BLOCK_TOKENS;
            let readable = sequence.readable(n_known, cross).unwrap_or(0);
            if readable <= n_known {
                sequence.shut_gate = Some(gate);
                return Admission::Gated;
            }
            take_blocks(sequence, known, readable)
        };
        let Ok(Seat { branches, moves }) = seat else { return Admission::NoRoom };
        // The blocks are given back if those of the other kind are short.
        let cross = match key {
            None => None,
            Some(key) if !sketch.may_project() && !cross.contains(&key) => return Admission::Later,
            Some(key) => match cross.acquire(key) {
                Ok(share) => Some(sketch.project(sequence, share)),
                Err(_) => return Admission::NoRoom,
            },
        };
        if !moves.is_empty() {
            sketch.moves.extend(moves);
            sketch.moved.push(sequence.id());
        }
        sequence.phase = Phase::Running(Residence { branches, cross });
        sequence.shut_gate = None;
        self.start(place, sketch, now);
        Admission::Admitted
    }

    /// Whether a sequence waits for an item, as far as can be said without looking blocks up.
    fn is_gated(&self, place: Place) -> bool {
        let Some(sequence) = self.line.get(&place) else { return true };
        let Ok(gate) = sequence.readable(sequence.n_computed(), &self.cross) else { return true };
        let waits_for_rows = || sequence.cross_key().is_some_and(|key| !self.cross.contains(&key));
        sequence.shut_gate == Some(gate) || (gate == 0 && waits_for_rows())
    }

    /// The first rows of a sequence that was let in.
    fn start(&mut self, place: Place, sketch: &mut Sketch, now: Instant) {
        let Some(sequence) = self.line.get_mut(&place) else { return };
        if sequence.milestones.first_step.is_none() {
            sequence.milestones.first_step = Some(now);
            sequence.tally.n_cached = sequence.n_computed().min(sequence.n_prompt());
            self.counts.prompt_tokens += sequence.n_prompt() as u64;
            self.counts.cached_tokens += sequence.tally.n_cached as u64;
        }
        sketch.n_admitted += 1;
        sketch.push_reading(place, sequence, &self.cross);
        // Whoever is let in next sees what this one got.
        self.charge(place, sketch);
    }
}

/// Blocks whose contents are known already. The last token's is not among them: it is always computed, since the
/// next one is chosen after it.
fn find_known(pool: &BlockPool, sequence: &mut Sequence, prefix_cache: PrefixCache) -> BlockTable {
    let n_tokens = sequence.n_tokens();
    match prefix_cache {
        PrefixCache::On => pool.find(sequence.keys(0, n_tokens - 1)),
        PrefixCache::Off => pool.find(&[]),
    }
}

/// Blocks for the first `n_tokens` tokens of a sequence, beginning with the known ones of its first branch.
/// Branches share what all of them begin with.
fn take_blocks(sequence: &mut Sequence, known: BlockTable, n_tokens: usize) -> Result<Seat, OutOfBlocks> {
    let n_known = known.blocks().len() * KV_BLOCK_TOKENS;
    let mut first = known;
    first.grow(n_tokens)?;
    let n_common = if sequence.n_branches() > 1 { sequence.n_common_blocks() } else { 0 };
    let other = |_| {
        let mut table = first.fork_first(n_common);
        table.grow(n_tokens)?;
        Ok(Resident { table, n_computed: n_common * KV_BLOCK_TOKENS })
    };
    let others: Vec<Resident> = (1..sequence.n_branches()).map(other).collect::<Result<_, _>>()?;
    let mut branches = vec![Resident { table: first, n_computed: n_known }];
    branches.extend(others);
    Ok(Seat { branches, moves: Vec::new() })
}

/// Blocks for the first `n_tokens` tokens of a sequence whose keys and values are on the host.
fn move_in(pool: &BlockPool, residents: &[Resident], n_tokens: usize) -> Result<Seat, OutOfBlocks> {
    let tables: Vec<_> = residents.iter().map(Resident::computed_blocks).collect();
    let (tables, pairs) = pool.mirror(&tables)?;
    let mut branches = Vec::with_capacity(tables.len());
    for (mut table, resident) in tables.into_iter().zip(residents) {
        // Room in a block that branches share is taken, and the block copied, when they write.
        table.grow(n_tokens)?;
        branches.push(Resident { table, n_computed: resident.n_computed });
    }
    Ok(Seat { branches, moves: pairs.into_iter().map(BlockMove::In).collect() })
}
