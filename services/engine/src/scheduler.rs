//! Who runs next: continuous batching over one line of sequences.
//!
//! A step serves, under a budget of rows: first every decoding sequence (one row for each of its branches),
//! then those that are reading their prompt, then new ones. The rules, each with a test of its name in
//! `tests/engine`:
//!
//! - Who goes first: the smaller priority, then the tenant that was served least, then who came first.
//! - A sequence reads up to the first item that is not here. There it gives up its place and its blocks, whose
//!   contents stay findable while nobody needs them, and goes on when the item has come: one that waits for an
//!   item is passed over, one that waits for blocks is not.
//! - After a step that read beside those that write, these go on alone until they have had their share of the time.
//! - Blocks for all tokens so far are taken on admission, so a prompt that started is never short of them.
//! - When decoding runs out of blocks, the least urgent and youngest gives up its own and keeps its place in
//!   line; its keys and values go to the host or are computed again. The first in line always gets on, so
//!   every step makes progress. A more urgent newcomer makes less urgent ones give way in the same manner.
//! - The line is bounded; a sequence ends when its time is over, and before it costs work if even the best
//!   rate measured so far cannot make it; what ended holds nothing.
//!
//! Pure: it reads no clock, runs no decoder and chooses no token. The idea is that of vLLM's v1 scheduler
//! (<https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/v1/core/sched/scheduler.py>), where prefill is
//! decode with more than one token left; fairness is that of virtual token counters
//! (<https://arxiv.org/abs/2401.00588>).

mod admission;
mod ending;
mod order;
mod pace;
mod preemption;
mod serving;
mod sketch;

use crate::blocks::BlockPool;
use crate::config::{Pools, Preemption, PrefixCache};
use crate::cross::CrossCache;
use crate::items::ItemTable;
use crate::plan::Plan;
use crate::rates::{Rates, StepShape};
use crate::request::{Arrival, Capacity, SequenceId};
use crate::sequence::{Phase, Place, Sequence};
use order::Shares;
use pace::{Did, Pace};
use sketch::Sketch;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{Failure, FailureClass};
use triptych_models::decoder::DecoderInfo;

/// How much runs and waits at once, and how it gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Rows of a step; also where projections of a step stop.
    pub token_budget: usize,
    /// Hundredths of the time in which sequences that write go on alone, while others read.
    pub decode_share: u8,
    /// Sequences that hold blocks; a beam counts as one.
    pub max_sequences: usize,
    /// Answers in line that do not.
    pub max_waiting: usize,
    /// Whether full blocks are found again.
    pub prefix_cache: PrefixCache,
    /// What becomes of the blocks of a sequence that gives way.
    pub preemption: Preemption,
}

/// Tokens that may follow those of single greedy sequences, by the name of the sequence.
pub type Drafts = HashMap<SequenceId, Vec<u32>>;

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sequences that gave up their blocks for others.
    pub preemptions: u64,
    /// Of those, how many left their keys and values on the host.
    pub swaps: u64,
    /// Prompt tokens of sequences that started.
    pub prompt_tokens: u64,
    /// Of those, how many were found in blocks.
    pub cached_tokens: u64,
    /// Rows that steps computed.
    pub computed_tokens: u64,
    /// Tokens that were proposed.
    pub drafted_tokens: u64,
    /// Of those, how many were right.
    pub accepted_tokens: u64,
}

/// The line, and the blocks that sequences in it hold.
#[derive(Debug)]
pub struct Scheduler {
    bounds: Bounds,
    capacity: Capacity,
    pool: BlockPool,
    host: BlockPool,
    cross: CrossCache,
    items: ItemTable,
    /// Every live sequence at its place. A preempted one never leaves it.
    line: BTreeMap<Place, Sequence>,
    /// Where each answer is.
    places: HashMap<SequenceId, Place>,
    shares: Shares,
    rates: Rates,
    pace: Pace,
    n_arrived: u64,
    counts: Counts,
}

/// What comes of planning a step.
#[derive(Debug, Default)]
pub struct Step {
    /// What to run.
    pub plan: Plan,
    /// Answers that ended before it.
    pub failed: Vec<(SequenceId, Failure)>,
    /// Whether a sequence came onto the device or left it: the next step may have something to run when this one
    /// had nothing.
    pub changed: bool,
}

impl Scheduler {
    /// An empty line over pools of the given sizes.
    pub fn new(bounds: Bounds, decoder: DecoderInfo, pools: Pools) -> Self {
        let context = decoder.max_context.min(pools.own.saturating_mul(KV_BLOCK_TOKENS));
        let max_sequences = bounds.max_sequences;
        Self {
            bounds,
            capacity: Capacity {
                decoder,
                self_blocks: pools.own,
                context,
                cross_blocks: pools.cross,
                max_sequences,
            },
            pool: BlockPool::new(pools.own),
            host: BlockPool::new(pools.host),
            cross: CrossCache::new(pools.cross),
            items: ItemTable::default(),
            line: BTreeMap::new(),
            places: HashMap::new(),
            shares: Shares::default(),
            rates: Rates::default(),
            pace: Pace::new(bounds.decode_share),
            n_arrived: 0,
            counts: Counts::default(),
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
        let limit = self.capacity.limit(arrival);
        let mut sequence = Sequence::new(arrival, limit, &mut self.items, now);
        ending::can_make_it(&mut sequence, (&self.rates, &self.pool), now)?;
        let place = Place { arrival: self.n_arrived, answer: 0 };
        self.n_arrived += 1;
        self.shares.join(sequence.tenant);
        self.line.insert(place, sequence);
        self.places.extend(arrival.ids.iter().map(|id| (*id, place)));
        Ok(())
    }

    /// Where items are delivered.
    pub fn items(&self) -> &ItemTable {
        &self.items
    }

    /// A live sequence, by any of its answers.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.line.get(self.places.get(&id)?)
    }

    /// Sequences that write one token after the other, for whom drafts may be made.
    pub fn writing(&self) -> impl Iterator<Item = &Sequence> {
        self.line.values().filter(|s| s.is_single() && s.is_decoding())
    }

    /// Plans the next step.
    pub fn step(&mut self, now: Instant, drafts: &mut Drafts) -> Step {
        let n_preempted = self.counts.preemptions;
        let failed = self.reap(now);
        let mut sketch = Sketch::new(self.bounds.token_budget);
        let parked = self.park();
        self.decode(&mut sketch, drafts);
        if sketch.rows.is_empty() || !self.pace.only_writes() {
            self.read(&mut sketch);
            self.admit(&mut sketch, now);
        }
        let changed = parked || sketch.n_admitted > 0 || self.counts.preemptions > n_preempted;
        Step { plan: self.lay_out(sketch), failed, changed }
    }

    fn lay_out(&mut self, sketch: Sketch) -> Plan {
        let Sketch { moves, moved, projections, .. } = sketch;
        let mut plan = Plan { moves, moved, projections, ..Plan::default() };
        for rows in sketch.rows {
            if let Some(sequence) = self.line.get_mut(&rows.place) {
                sequence.tally.n_drafted += rows.drafts.len();
                self.counts.drafted_tokens += rows.drafts.len() as u64;
                plan.push(sequence, rows.branch, rows.tokens, rows.drafts);
            }
        }
        plan
    }

    /// The plan ran, and took this long: what it computed can be read from now on.
    pub fn commit(&mut self, plan: &Plan, took: Duration) {
        for projection in &plan.projections {
            self.cross.filled(&projection.key);
        }
        self.counts.computed_tokens += plan.n_rows() as u64;
        let reads = plan.chunks.iter().any(|c| c.tokens.len() > 1) || !plan.projections.is_empty();
        self.rates.observe(StepShape { n_rows: plan.n_rows(), reads }, took);
        let writes = plan.chunks.iter().any(|c| c.tokens.len() == 1);
        self.pace.note(Did { reads, writes }, took);
        for chunk in &plan.chunks {
            self.advance(chunk.id, chunk.branch, chunk.tokens.end);
        }
    }

    /// The plan did not run: nothing that it was to write is ever read. The caller retires the sequences of its
    /// chunks; others whose blocks it was to move compute them again.
    pub fn roll_back(&mut self, plan: &Plan) {
        self.cross.discard_unfilled();
        for id in &plan.moved {
            if let Some(sequence) = self.get_mut(*id) {
                sequence.phase = Phase::Waiting;
            }
        }
    }

    /// Writes a token, unless the context is full then: `false` when no further one fits.
    pub fn push(&mut self, id: SequenceId, token: u32, now: Instant) -> bool {
        self.get_mut(id).is_some_and(|sequence| {
            sequence.milestones.first_token.get_or_insert(now);
            sequence.push(token);
            sequence.n_tokens() < sequence.limit()
        })
    }

    /// The token just written was a draft of the step that ran, so it is computed.
    pub fn accept(&mut self, id: SequenceId) {
        let Some(sequence) = self.get_mut(id) else { return };
        sequence.tally.n_accepted += 1;
        let n_computed = sequence.n_computed() + 1;
        self.counts.accepted_tokens += 1;
        self.advance(id, 0, n_computed);
    }

    /// All answers but the first become sequences of their own, at their places in line; those for whom there is
    /// no running place wait. Returns all names, the first one's first.
    pub fn fork(&mut self, id: SequenceId) -> Vec<SequenceId> {
        let Some(place) = self.places.get(&id).copied() else { return Vec::new() };
        let n_running = self.n_running();
        let Some(sequence) = self.line.get_mut(&place) else { return Vec::new() };
        let answers = sequence.answers.clone();
        sequence.answers.truncate(1);
        let mut forks = Vec::new();
        for (i, answer) in (1..).zip(&answers[1..]) {
            let mut fork = sequence.fork(*answer);
            if n_running + i as usize > self.bounds.max_sequences {
                fork.phase = Phase::Waiting;
            }
            forks.push((Place { answer: place.answer + i, ..place }, fork));
        }
        for (place, fork) in forks {
            self.places.insert(fork.id(), place);
            self.shares.join(fork.tenant);
            self.line.insert(place, fork);
        }
        answers
    }

    /// The branches of a sequence from now on, each a continuation of one there is; `false` when the context is
    /// full then.
    pub fn branch(&mut self, id: SequenceId, children: &[(usize, u32)], now: Instant) -> bool {
        self.get_mut(id).is_some_and(|sequence| {
            sequence.milestones.first_token.get_or_insert(now);
            sequence.branch(children.iter().copied());
            sequence.n_tokens() < sequence.limit()
        })
    }

    /// Ends a sequence with all its answers, wherever it is. What it held is free when the result is dropped.
    pub fn retire(&mut self, id: SequenceId) -> Option<Sequence> {
        let sequence = self.line.remove(self.places.get(&id)?)?;
        for answer in &sequence.answers {
            self.places.remove(answer);
        }
        self.shares.leave(&sequence.tenant);
        Some(sequence)
    }

    /// Nobody wants this answer any more. A sequence ends with its last answer; otherwise its name from now on
    /// is returned.
    pub fn abandon(&mut self, id: SequenceId) -> Option<SequenceId> {
        let sequence = self.get_mut(id)?;
        if sequence.answers.len() == 1 {
            self.retire(id);
            return None;
        }
        sequence.answers.retain(|answer| *answer != id);
        let name = sequence.id();
        self.places.remove(&id);
        Some(name)
    }

    /// Forgets every block that is kept for later.
    pub fn reset(&mut self) {
        self.pool.reset();
        self.cross.reset();
    }

    /// The earliest deadline of all.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.line.values().map(|s| s.deadline).min()
    }

    /// Running places that are taken.
    pub fn n_running(&self) -> usize {
        self.line.values().filter(|s| s.residence().is_some()).map(Sequence::n_places).sum()
    }

    /// Sequences that run and write.
    pub fn n_decoding(&self) -> usize {
        self.line.values().filter(|s| s.residence().is_some() && s.is_decoding()).count()
    }

    /// Answers whose sequences do not run.
    pub fn n_waiting(&self) -> usize {
        self.line.values().filter(|s| s.residence().is_none()).map(|s| s.answers.len()).sum()
    }

    /// Tokens that are there and not computed, of sequences that do not write.
    pub fn n_waiting_tokens(&self) -> usize {
        let reading = self.line.values().filter(|s| !s.is_decoding());
        reading.map(|s| s.n_tokens().saturating_sub(s.n_computed())).sum()
    }

    /// What happened since the start.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Self-attention blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Self-attention blocks on the host.
    pub fn host(&self) -> &BlockPool {
        &self.host
    }

    /// Cross-attention blocks.
    pub fn cross(&self) -> &CrossCache {
        &self.cross
    }

    fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.line.get_mut(self.places.get(&id)?)
    }

    fn advance(&mut self, id: SequenceId, branch: usize, end: usize) {
        if let Some(sequence) = self.get_mut(id) {
            sequence.advance(branch, end);
        }
    }

    /// Running sequences, the first to be served first.
    fn running(&self, which: impl Fn(&Sequence) -> bool) -> Vec<Place> {
        let running = self.line.iter().filter(|(_, s)| s.residence().is_some() && which(s));
        let mut places: Vec<(i32, Place)> = running.map(|(place, s)| (s.priority, *place)).collect();
        places.sort_unstable();
        places.into_iter().map(|(_, place)| place).collect()
    }
}
