//! One sequence: its tokens, its items, and how far the decoder has read.
//!
//! Waiting → Prefilling → Decoding → gone; preemption and abort lead back or out from anywhere. Blocks and
//! the count of computed tokens live together in a [`Residence`], which only a running sequence has: to be
//! preempted is to lose it, and with it the blocks. Where the tokens come from is not known here.

use crate::blocks::BlockTable;
use crate::cross::{CrossCache, CrossKey};
use crate::items::{ItemState, ItemTable, ItemUse};
use crate::request::{Arrival, SequenceId, span_of};
use std::ops::Range;
use std::time::Instant;
use triptych_core::{EncoderOutput, Failure};

/// A place in line, given once, in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(pub(crate) u64);

/// What a running sequence holds on the device.
#[derive(Debug)]
pub struct Residence {
    /// Self-attention blocks, for all tokens so far.
    pub table: BlockTable,
    /// Its share of the cross-attention blocks, with cross-attention.
    pub cross: Option<BlockTable>,
    /// Tokens whose keys and values are in the blocks.
    pub n_computed: usize,
}

/// How far a sequence is.
#[derive(Debug)]
pub enum Phase {
    /// In line, without blocks: new, or preempted.
    Waiting,
    /// Reading tokens it has already: its prompt, and after a preemption what it had written.
    Prefilling(Residence),
    /// Writing: all tokens but the newest are computed.
    Decoding(Residence),
}

/// Rows of an item among the tokens.
#[derive(Debug)]
struct Span {
    tokens: Range<usize>,
    item: ItemUse,
}

/// What it cross-attends to.
#[derive(Debug)]
struct Cross {
    key: CrossKey,
    item: ItemUse,
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

/// A sequence in the scheduler's line.
#[derive(Debug)]
pub struct Sequence {
    /// Its name.
    pub id: SequenceId,
    /// When it has to have ended.
    pub deadline: Instant,
    /// When things happened to it.
    pub milestones: Milestones,
    /// How far it is.
    pub phase: Phase,
    /// Prompt, then what was written. Only grows, so positions and spans stay true.
    tokens: Vec<u32>,
    n_prompt: usize,
    positions: Vec<[u32; 3]>,
    next_position: u32,
    spans: Vec<Span>,
    cross: Option<Cross>,
}

impl Sequence {
    /// A sequence that waits. The arrival was checked.
    pub fn new(arrival: &Arrival, id: SequenceId, items: &mut ItemTable, now: Instant) -> Self {
        let prepared = &arrival.prepared;
        let mut join = |idx: triptych_core::ItemIdx| items.join(&arrival.items[idx.0 as usize]);
        let spans = prepared.spans.iter().map(|s| Span { tokens: span_of(s), item: join(s.item) }).collect();
        let cross = prepared.cross.map(|cross| {
            let item = join(cross.item);
            let content = item.declared().key;
            Cross { key: CrossKey { content, first_row: cross.first_row, n_rows: cross.n_rows }, item }
        });
        Self {
            id,
            deadline: arrival.deadline,
            milestones: Milestones { arrived: now, first_step: None, first_token: None },
            phase: Phase::Waiting,
            tokens: prepared.tokens.clone(),
            n_prompt: prepared.tokens.len(),
            positions: prepared.positions.clone(),
            next_position: prepared.next_position,
            spans,
            cross,
        }
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens written.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.n_prompt..]
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// What it holds on the device, if it runs.
    pub fn residence(&self) -> Option<&Residence> {
        match &self.phase {
            Phase::Waiting => None,
            Phase::Prefilling(residence) | Phase::Decoding(residence) => Some(residence),
        }
    }

    /// The same, to change.
    pub fn residence_mut(&mut self) -> Option<&mut Residence> {
        match &mut self.phase {
            Phase::Waiting => None,
            Phase::Prefilling(residence) | Phase::Decoding(residence) => Some(residence),
        }
    }

    /// What it cross-attends to.
    pub fn cross_key(&self) -> Option<CrossKey> {
        self.cross.as_ref().map(|c| c.key)
    }

    /// The encoder output it cross-attends to, if it is here.
    pub fn cross_rows(&self) -> Option<&EncoderOutput> {
        match self.cross.as_ref()?.item.state() {
            ItemState::Ready(output) => Some(output),
            ItemState::Pending | ItemState::Failed(_) => None,
        }
    }

    /// The position of token `i`.
    pub fn position(&self, i: usize) -> [u32; 3] {
        let after = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let generated = || [self.next_position.saturating_add(after(i - self.n_prompt)); 3];
        self.positions.get(i).copied().unwrap_or_else(generated)
    }

    /// Tokens that may be computed: all of them, or those before the first item that is not here. 0 when its
    /// cross-attention input is missing; an entry of the cache stands in for the rows.
    ///
    /// # Errors
    /// The failure of an item that it still has to read.
    pub fn readable(&self, cache: &CrossCache) -> Result<usize, Failure> {
        let n_computed = self.residence().map_or(0, |r| r.n_computed);
        let mut limit = self.tokens.len();
        if let (Phase::Waiting, Some(cross)) = (&self.phase, &self.cross)
            && !cache.contains(&cross.key)
        {
            limit = limit.min(gate(&cross.item, 0)?);
        }
        for span in self.spans.iter().filter(|s| s.tokens.end > n_computed) {
            limit = limit.min(gate(&span.item, span.tokens.start)?);
        }
        Ok(limit)
    }

    /// The item rows among tokens `chunk`: for each span that reaches into it the first token, and which rows.
    /// The chunk ends before the first item that is not here.
    pub fn item_rows(
        &self,
        chunk: &Range<usize>,
    ) -> impl Iterator<Item = (usize, &EncoderOutput, Range<usize>)> {
        self.spans.iter().filter_map(move |span| {
            let start = span.tokens.start.max(chunk.start);
            let end = span.tokens.end.min(chunk.end);
            match span.item.state() {
                ItemState::Ready(output) if start < end => {
                    Some((start, output, start - span.tokens.start..end - span.tokens.start))
                }
                _ => None,
            }
        })
    }

    /// Tokens up to `end` are computed.
    pub fn advance(&mut self, end: usize) {
        let n_tokens = self.tokens.len();
        self.phase = match std::mem::replace(&mut self.phase, Phase::Waiting) {
            Phase::Waiting => Phase::Waiting,
            Phase::Prefilling(r) if end < n_tokens => Phase::Prefilling(Residence { n_computed: end, ..r }),
            Phase::Prefilling(r) | Phase::Decoding(r) => Phase::Decoding(Residence { n_computed: end, ..r }),
        };
    }

    /// Writes a token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }
}

/// How far a sequence may read if `start` is where it needs the item.
fn gate(item: &ItemUse, start: usize) -> Result<usize, Failure> {
    match item.state() {
        ItemState::Ready(_) => Ok(usize::MAX),
        ItemState::Pending => Ok(start),
        ItemState::Failed(failure) => Err(failure),
    }
}
