//! One sequence: its tokens, its items, and how far the decoder has read.
//!
//! Waiting → Running → gone; preemption leads back to Waiting, or aside to Swapped; abort leads out from
//! anywhere. Blocks and the count of computed tokens live together in a [`Residence`], which only a running
//! sequence has: to be preempted is to lose it, and with it the blocks.
//!
//! A sequence has one *branch*, its tokens. Under beam search it has one for each live beam, all of one
//! length; they run, wait and give way together. Answers that are sampled are sequences of their own from
//! their first token on ([`Sequence::fork`]). Where tokens come from is not known here.

mod prompt;

use crate::blocks::{BlockTable, blocks_for};
use crate::cross::{CrossCache, CrossKey};
use crate::items::ItemTable;
use crate::prefix::BlockParts;
use crate::request::{Arrival, SequenceId};
use prompt::Prompt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{EncoderOutput, Failure, PrefixKey, TenantId};

/// A place in line, given once: arrivals in their order, the answers to each in theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Number of the arrival.
    pub(crate) arrival: u64,
    /// Number of the answer.
    pub(crate) answer: u32,
}

/// What a running sequence holds on the device.
#[derive(Debug)]
pub struct Residence {
    /// One for each branch.
    pub branches: Vec<Resident>,
    /// Its share of the cross-attention blocks, with cross-attention.
    pub cross: Option<BlockTable>,
}

/// What one branch holds, on the device or on the host.
#[derive(Debug)]
pub struct Resident {
    /// Self-attention blocks: on the device for all tokens so far, on the host for those that are computed.
    pub table: BlockTable,
    /// Tokens whose keys and values are in the blocks.
    pub n_computed: usize,
}

/// Where a sequence is.
#[derive(Debug)]
pub enum Phase {
    /// In line, without blocks: new, preempted, or before an item that is not here.
    Waiting,
    /// In line, its keys and values on the host; one for each branch.
    Swapped(Vec<Resident>),
    /// On the device: reading what it has already, or writing.
    Running(Residence),
}

/// The tokens of one branch.
#[derive(Clone, Debug)]
struct Branch {
    /// Prompt, then what was written. Only grows, so positions and spans stay true.
    tokens: Vec<u32>,
    /// Keys of the full blocks of `tokens`, as far as they were asked for.
    keys: Vec<PrefixKey>,
}

/// When things happened to a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Milestones {
    /// It arrived.
    pub arrived: Instant,
    /// Its first step started.
    pub first_step: Option<Instant>,
    /// Its first token was there.
    pub first_token: Option<Instant>,
}

/// What is counted of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tokens of the prompt that were found in blocks when it first ran.
    pub n_cached: usize,
    /// Tokens that were proposed for it.
    pub n_drafted: usize,
    /// Of those, how many were right.
    pub n_accepted: usize,
}

/// A sequence in the scheduler's line.
#[derive(Debug)]
pub struct Sequence {
    /// The answers that come of it, at least one. The first names it.
    pub answers: Vec<SequenceId>,
    /// Whose it is.
    pub tenant: TenantId,
    /// Smaller runs first.
    pub priority: i32,
    /// When it has to have ended.
    pub deadline: Instant,
    /// When things happened to it.
    pub milestones: Milestones,
    /// What is counted of it.
    pub tally: Tally,
    /// Where it is.
    pub phase: Phase,
    /// The gate at which it gave up its blocks. While that one is shut it does not try again.
    pub shut_gate: Option<usize>,
    /// Most branches it can have.
    width: usize,
    /// Most tokens of a branch.
    limit: usize,
    /// Fewest tokens it writes if nothing goes wrong.
    n_least: usize,
    is_greedy: bool,
    prompt: Arc<Prompt>,
    branches: Vec<Branch>,
}

impl Sequence {
    /// A sequence that waits, and can grow to `limit` tokens. The arrival was checked.
    pub fn new(arrival: &Arrival, limit: usize, items: &mut ItemTable, now: Instant) -> Self {
        let sampling = &arrival.sampling;
        let prompt = Prompt::new(arrival, items);
        let written = arrival.resumed.as_ref().map_or(&[][..], |resumed| &resumed.tokens);
        Self {
            answers: arrival.ids.clone(),
            tenant: arrival.tenant,
            priority: arrival.priority,
            deadline: arrival.deadline,
            milestones: Milestones { arrived: now, first_step: None, first_token: None },
            tally: Tally::default(),
            phase: Phase::Waiting,
            shut_gate: None,
            width: sampling.beams.map_or(1, |b| b.width as usize),
            limit,
            n_least: arrival.least_tokens().min(limit.saturating_sub(prompt.n_tokens)).max(1),
            is_greedy: sampling.beams.is_none() && (sampling.temperature <= 0.0 || sampling.top_k == Some(1)),
            prompt: Arc::new(prompt),
            branches: vec![Branch {
                tokens: [arrival.prepared.tokens.as_slice(), written].concat(),
                keys: Vec::new(),
            }],
        }
    }

    /// The name of the sequence: that of its first answer.
    pub fn id(&self) -> SequenceId {
        self.answers[0]
    }

    /// Branches there are.
    pub fn n_branches(&self) -> usize {
        self.branches.len()
    }

    /// Running places it takes: one for each branch that it may come to have.
    pub fn n_places(&self) -> usize {
        self.width
    }

    /// Whether it is one answer from its first token to its last, and none of several beams.
    pub fn is_single(&self) -> bool {
        self.width == 1 && self.answers.len() == 1
    }

    /// All tokens of a branch.
    pub fn tokens(&self, branch: usize) -> &[u32] {
        &self.branches[branch].tokens
    }

    /// Tokens of each branch; they have the same number.
    pub fn n_tokens(&self) -> usize {
        self.branches[0].tokens.len()
    }

    /// The tokens written on a branch.
    pub fn generated(&self, branch: usize) -> &[u32] {
        &self.branches[branch].tokens[self.prompt.n_tokens..]
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.prompt.n_tokens
    }

    /// Whether it writes the most probable token each time, on one branch.
    pub fn is_greedy(&self) -> bool {
        self.is_greedy
    }

    /// Most tokens of a branch.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Tokens for which every branch has blocks.
    pub fn n_room(&self) -> usize {
        let rooms = self.residence().into_iter().flat_map(|r| &r.branches).map(|b| b.table.blocks().len());
        rooms.min().unwrap_or(0) * KV_BLOCK_TOKENS
    }

    /// Fewest tokens it writes if nothing goes wrong, at least 1.
    pub fn n_least(&self) -> usize {
        self.n_least
    }

    /// What it holds on the device, if it runs.
    pub fn residence(&self) -> Option<&Residence> {
        match &self.phase {
            Phase::Running(residence) => Some(residence),
            Phase::Waiting | Phase::Swapped(_) => None,
        }
    }

    /// The same, to change.
    pub fn residence_mut(&mut self) -> Option<&mut Residence> {
        match &mut self.phase {
            Phase::Running(residence) => Some(residence),
            Phase::Waiting | Phase::Swapped(_) => None,
        }
    }

    /// Whether it runs and all its tokens but the newest are computed.
    pub fn is_decoding(&self) -> bool {
        let all_but_one = self.n_tokens() - 1;
        self.residence().is_some_and(|r| r.branches.iter().all(|b| b.n_computed == all_but_one))
    }

    /// What it cross-attends to.
    pub fn cross_key(&self) -> Option<CrossKey> {
        self.prompt.cross.as_ref().map(|c| c.key)
    }

    /// The token from which on it does so.
    pub fn cross_from(&self) -> u32 {
        self.prompt.cross.as_ref().map_or(0, |c| c.first_token)
    }

    /// The encoder output it cross-attends to, if it is here.
    pub fn cross_rows(&self) -> Option<&EncoderOutput> {
        self.prompt.cross.as_ref()?.rows()
    }

    /// The position of token `i`.
    pub fn position(&self, i: usize) -> [u32; 3] {
        self.prompt.position(i)
    }

    /// Tokens that may be computed once the first `n_computed` are: all of them, or those before the first item
    /// that is not here. 0 when its cross-attention input is missing; an entry of the cache stands in for the rows.
    ///
    /// # Errors
    /// The failure of an item that it still has to read.
    pub fn readable(&self, n_computed: usize, cache: &CrossCache) -> Result<usize, Failure> {
        let needs_rows = |key: &CrossKey| self.residence().is_none() && !cache.contains(key);
        Ok(self.prompt.gate(n_computed, needs_rows)?.min(self.n_tokens()))
    }

    /// Tokens that every branch has computed.
    pub fn n_computed(&self) -> usize {
        let residents = match &self.phase {
            Phase::Waiting => return 0,
            Phase::Swapped(residents) => residents,
            Phase::Running(residence) => &residence.branches,
        };
        residents.iter().map(|r| r.n_computed).min().unwrap_or(0)
    }

    /// The item rows among tokens `chunk`: for each span that reaches into it the first token, and which rows.
    /// The chunk ends before the first item that is not here.
    pub fn item_rows(
        &self,
        chunk: &Range<usize>,
    ) -> impl Iterator<Item = (usize, &EncoderOutput, Range<usize>)> {
        self.prompt.item_rows(chunk)
    }

    /// Keys of the full blocks among the first `n_tokens` tokens of a branch.
    pub fn keys(&mut self, branch: usize, n_tokens: usize) -> &[PrefixKey] {
        let n_blocks = n_tokens.min(self.n_tokens()) / KV_BLOCK_TOKENS;
        for place in self.branches[branch].keys.len()..n_blocks {
            let first_token = place * KV_BLOCK_TOKENS;
            let positions = std::array::from_fn(|i| self.position(first_token + i));
            let branch = &mut self.branches[branch];
            let parts = BlockParts {
                first_token,
                tokens: &branch.tokens[first_token..first_token + KV_BLOCK_TOKENS],
                positions: &positions,
                items: &self.prompt.items,
            };
            let key = parts.key(branch.keys.last().unwrap_or(&self.prompt.root));
            branch.keys.push(key);
        }
        &self.branches[branch].keys[..n_blocks]
    }

    /// Full blocks that all branches begin with, the last token's not counted.
    pub fn n_common_blocks(&mut self) -> usize {
        let n_known = self.n_tokens() - 1;
        let first = self.keys(0, n_known).to_vec();
        let agree = |keys: &[PrefixKey]| first.iter().zip(keys).take_while(|(a, b)| a == b).count();
        (1..self.n_branches()).map(|i| agree(self.keys(i, n_known))).min().unwrap_or(first.len())
    }

    /// Tokens of branch `branch` up to `end` are computed, and its full blocks can be found by others.
    pub fn advance(&mut self, branch: usize, end: usize) {
        let Phase::Running(residence) = &mut self.phase else { return };
        let resident = &mut residence.branches[branch];
        let before = resident.n_computed;
        resident.n_computed = end;
        let (first, last) = (before / KV_BLOCK_TOKENS, end / KV_BLOCK_TOKENS);
        if first == last {
            return;
        }
        self.keys(branch, end);
        let Phase::Running(residence) = &self.phase else { return };
        for (place, key) in self.branches[branch].keys.iter().enumerate().take(last).skip(first) {
            residence.branches[branch].table.publish(place, *key);
        }
    }

    /// Writes a token on its only branch.
    pub fn push(&mut self, token: u32) {
        self.branches[0].tokens.push(token);
    }

    /// Another sequence of the same tokens and shared blocks, for the answer `id`.
    pub fn fork(&self, id: SequenceId) -> Self {
        let phase = match self.residence() {
            None => Phase::Waiting,
            Some(residence) => Phase::Running(Residence {
                branches: residence.branches.iter().map(Resident::fork).collect(),
                cross: residence.cross.as_ref().map(BlockTable::fork),
            }),
        };
        Self {
            answers: vec![id],
            phase,
            prompt: Arc::clone(&self.prompt),
            branches: self.branches.clone(),
            ..*self
        }
    }

    /// Its branches from now on: each continues one of those there are with a token.
    pub fn branch(&mut self, children: impl IntoIterator<Item = (usize, u32)> + Clone) {
        let child = |(parent, token): (usize, u32)| {
            let mut branch = self.branches[parent].clone();
            branch.tokens.push(token);
            branch
        };
        let branches = children.clone().into_iter().map(child).collect();
        if let Phase::Running(residence) = &mut self.phase {
            let parents = children.into_iter().map(|(parent, _)| parent);
            residence.branches = parents.map(|parent| residence.branches[parent].fork()).collect();
        }
        self.branches = branches;
    }
}

impl Resident {
    /// Blocks whose contents count.
    pub fn computed_blocks(&self) -> &[crate::blocks::BlockId] {
        let n = blocks_for(self.n_computed).min(self.table.blocks().len());
        &self.table.blocks()[..n]
    }

    fn fork(&self) -> Self {
        Self { table: self.table.fork(), n_computed: self.n_computed }
    }
}
