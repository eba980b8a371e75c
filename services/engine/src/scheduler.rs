//! Who runs next: continuous batching over one line of sequences, in the order of their arrival.
//!
//! A step serves, under a budget of rows: first every decoding sequence (one row each), then those that are
//! reading their prompt, then new ones. The rules, each with a test of its name in `tests/engine/rules.rs`:
//!
//! - A sequence reads up to the first item that is not here, and does not start on nothing: one that waits
//!   for an item is passed over, one that waits for blocks is not.
//! - Blocks for all tokens so far are taken on admission, so a prompt that started is never short of them.
//! - When decoding runs out of blocks, the youngest gives up all of its own, keeps its place in line, and
//!   later reads again what it had (recompute). The oldest always gets on, so every step makes progress.
//! - The line is bounded, deadlines end sequences wherever they are, and what ended holds nothing.
//!
//! Pure: it reads no clock, runs no decoder and chooses no token. The idea is that of vLLM's v1 scheduler
//! (<https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py>), where prefill is
//! decode with more than one token left.

use crate::blocks::{BlockPool, BlockTable};
use crate::cross::{CrossCache, CrossShare};
use crate::items::ItemTable;
use crate::plan::{Plan, Projection};
use crate::request::{Arrival, Capacity, SequenceId};
use crate::sequence::{Phase, Place, Residence, Sequence};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{Failure, FailureClass};
use triptych_models::decoder::DecoderInfo;

/// How much runs and waits at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Rows of a step; also where projections of a step stop.
    pub token_budget: usize,
    /// Sequences that hold blocks.
    pub max_sequences: usize,
    /// Sequences in line that do not.
    pub max_waiting: usize,
}

/// The line, and the blocks that sequences in it hold.
#[derive(Debug)]
pub struct Scheduler {
    bounds: Bounds,
    capacity: Capacity,
    pool: BlockPool,
    cross: CrossCache,
    items: ItemTable,
    /// Every live sequence at its place. A preempted one never leaves it.
    line: BTreeMap<Place, Sequence>,
    places: HashMap<SequenceId, Place>,
    n_arrived: u64,
    n_preempted: u64,
}

/// What comes of planning a step.
#[derive(Debug, Default)]
pub struct Step {
    /// What to run.
    pub plan: Plan,
    /// Sequences that ended before it.
    pub failed: Vec<(SequenceId, Failure)>,
    /// Sequences that gave up their blocks.
    pub n_preempted: usize,
}

/// A plan in the making.
struct Draft {
    budget: usize,
    chunks: Vec<(Place, std::ops::Range<usize>)>,
    projections: Vec<Projection>,
    projected_rows: usize,
}

/// What became of an attempt to admit a sequence.
enum Admission {
    Admitted,
    /// It waits for an item; others may pass.
    Gated,
    /// It waits for blocks, and everyone behind it with it.
    NoRoom,
}

impl Scheduler {
    /// An empty line over pools of the given sizes.
    pub fn new(bounds: Bounds, decoder: DecoderInfo, self_blocks: usize, cross_blocks: usize) -> Self {
        let context = decoder.max_context.min(self_blocks.saturating_mul(KV_BLOCK_TOKENS));
        Self {
            bounds,
            capacity: Capacity { decoder, self_blocks, context, cross_blocks },
            pool: BlockPool::new(self_blocks),
            cross: CrossCache::new(cross_blocks),
            items: ItemTable::default(),
            line: BTreeMap::new(),
            places: HashMap::new(),
            n_arrived: 0,
            n_preempted: 0,
        }
    }

    /// Puts a sequence at the end of the line.
    ///
    /// # Errors
    /// It can never run here ([`Arrival::check`]), or the line is full ([`FailureClass::Overloaded`]).
    pub fn arrive(&mut self, arrival: &Arrival, now: Instant) -> Result<(), Failure> {
        arrival.check(&self.capacity)?;
        let limit = self.bounds.max_waiting;
        if self.n_waiting() + arrival.ids.len() > limit {
            let text = format!("{limit} sequences are waiting, which is the limit; try again later");
            return Err(Failure::new(FailureClass::Overloaded, text));
        }
        for id in &arrival.ids {
            let place = Place(self.n_arrived);
            self.n_arrived += 1;
            self.line.insert(place, Sequence::new(arrival, *id, &mut self.items, now));
            self.places.insert(*id, place);
        }
        Ok(())
    }

    /// Where items are delivered.
    pub fn items(&self) -> &ItemTable {
        &self.items
    }

    /// A live sequence.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.line.get(self.places.get(&id)?)
    }

    /// Plans the next step.
    pub fn step(&mut self, now: Instant) -> Step {
        let n_preempted = self.n_preempted;
        let failed = self.reap(now);
        let mut draft = Draft {
            budget: self.bounds.token_budget,
            chunks: Vec::new(),
            projections: Vec::new(),
            projected_rows: 0,
        };
        self.decode(&mut draft);
        self.prefill(&mut draft);
        self.admit(&mut draft, now);
        let mut plan = Plan { projections: draft.projections, ..Plan::default() };
        for (place, tokens) in draft.chunks {
            if let Some(sequence) = self.line.get(&place) {
                plan.push(sequence, tokens);
            }
        }
        Step { plan, failed, n_preempted: (self.n_preempted - n_preempted) as usize }
    }

    /// The plan ran: what it computed can be read from now on.
    pub fn commit(&mut self, plan: &Plan) {
        for projection in &plan.projections {
            self.cross.filled(&projection.key);
        }
        for chunk in &plan.chunks {
            if let Some(sequence) = self.get_mut(chunk.id) {
                sequence.advance(chunk.tokens.end);
            }
        }
    }

    /// The plan did not run: nothing that it was to write is ever read. The caller retires its sequences.
    pub fn roll_back(&mut self) {
        self.cross.discard_unfilled();
    }

    /// Writes a token, unless the context is full then: `false` when no further one fits.
    pub fn push(&mut self, id: SequenceId, token: u32, now: Instant) -> bool {
        let context = self.capacity.context;
        self.get_mut(id).is_some_and(|sequence| {
            sequence.milestones.first_token.get_or_insert(now);
            sequence.push(token);
            sequence.tokens().len() < context
        })
    }

    /// Ends a sequence, wherever it is. What it held is free when the result is dropped.
    pub fn retire(&mut self, id: SequenceId) -> Option<Sequence> {
        self.line.remove(&self.places.remove(&id)?)
    }

    /// The earliest deadline of all.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.line.values().map(|s| s.deadline).min()
    }

    /// Sequences that hold blocks.
    pub fn n_running(&self) -> usize {
        self.line.len() - self.n_waiting()
    }

    /// Sequences that do not.
    pub fn n_waiting(&self) -> usize {
        self.line.values().filter(|s| matches!(s.phase, Phase::Waiting)).count()
    }

    /// Preemptions so far.
    pub fn n_preempted(&self) -> u64 {
        self.n_preempted
    }

    /// Self-attention blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Cross-attention blocks.
    pub fn cross(&self) -> &CrossCache {
        &self.cross
    }

    fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.line.get_mut(self.places.get(&id)?)
    }

    fn select(&self, which: impl Fn(&Phase) -> bool) -> Vec<Place> {
        self.line.iter().filter(|(_, s)| which(&s.phase)).map(|(place, _)| *place).collect()
    }

    /// Ends those whose time is over and those that need an item that failed.
    fn reap(&mut self, now: Instant) -> Vec<(SequenceId, Failure)> {
        let late = || Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out");
        let verdict = |s: &Sequence| match s.deadline <= now {
            true => Some(late()),
            false => s.readable(&self.cross).err(),
        };
        let failed: Vec<_> = self.line.values().filter_map(|s| Some((s.id, verdict(s)?))).collect();
        for (id, _) in &failed {
            self.retire(*id);
        }
        failed
    }

    /// One row for each decoding sequence, oldest first. The budget holds `max_sequences` rows at least.
    fn decode(&mut self, draft: &mut Draft) {
        for place in self.select(|p| matches!(p, Phase::Decoding(_))) {
            if let Some(n_tokens) = self.grow(place) {
                draft.push(place, n_tokens - 1..n_tokens);
            }
        }
    }

    /// Makes room for all tokens of a decoding sequence, from the youngest if there is no other. Returns their
    /// number; `None` if the sequence itself had to give way.
    fn grow(&mut self, place: Place) -> Option<usize> {
        loop {
            let sequence = self.line.get_mut(&place)?;
            let n_tokens = sequence.tokens().len();
            if sequence.residence_mut()?.table.grow(n_tokens).is_ok() {
                return Some(n_tokens);
            }
            let mut running = self.line.values_mut().rev().filter(|s| s.residence().is_some());
            // Whoever is in the draft already is older than `place`, and `place` itself is running.
            running.next()?.phase = Phase::Waiting;
            self.n_preempted += 1;
        }
    }

    /// Goes on with prompts that are started.
    fn prefill(&mut self, draft: &mut Draft) {
        for (place, sequence) in &self.line {
            if let Phase::Prefilling(residence) = &sequence.phase {
                // Items that failed were reaped.
                let readable = sequence.readable(&self.cross).unwrap_or(0);
                draft.push(*place, residence.n_computed..readable);
            }
        }
    }

    fn admit(&mut self, draft: &mut Draft, now: Instant) {
        let mut n_running = self.n_running();
        for place in self.select(|p| matches!(p, Phase::Waiting)) {
            if draft.budget == 0 || n_running >= self.bounds.max_sequences {
                return;
            }
            match self.try_admit(place, draft, now) {
                Admission::Admitted => n_running += 1,
                Admission::Gated => {}
                Admission::NoRoom => return,
            }
        }
    }

    fn try_admit(&mut self, place: Place, draft: &mut Draft, now: Instant) -> Admission {
        let Some(sequence) = self.line.get_mut(&place) else { return Admission::Gated };
        let Ok(readable @ 1..) = sequence.readable(&self.cross) else { return Admission::Gated };
        // Dropped again, blocks and all, if the other kind is short.
        let Ok(table) = self.pool.table(sequence.tokens().len()) else { return Admission::NoRoom };
        let cross = match sequence.cross_key() {
            None => None,
            Some(key) if draft.may_project() || self.cross.contains(&key) => match self.cross.acquire(key) {
                Ok(share) => Some(draft.project(sequence, share)),
                Err(_) => return Admission::NoRoom,
            },
            Some(_) => return Admission::NoRoom,
        };
        sequence.phase = Phase::Prefilling(Residence { table, cross, n_computed: 0 });
        sequence.milestones.first_step.get_or_insert(now);
        draft.push(place, 0..readable);
        Admission::Admitted
    }
}

impl Draft {
    /// Adds as much of `tokens` as the budget has left.
    fn push(&mut self, place: Place, tokens: std::ops::Range<usize>) {
        let n = tokens.len().min(self.budget);
        if n > 0 {
            self.budget -= n;
            self.chunks.push((place, tokens.start..tokens.start + n));
        }
    }

    /// Projections cost as rows do, but may not starve: one is always taken, however large.
    fn may_project(&self) -> bool {
        self.projected_rows < self.budget.max(1)
    }

    /// Takes a share, and plans its projection if it is to be filled.
    fn project(&mut self, sequence: &Sequence, share: CrossShare) -> BlockTable {
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
