//! What all answers to one arrival read: tokens in their places, and the items among and behind them.

use crate::cross::CrossKey;
use crate::items::{ItemState, ItemTable, ItemUse};
use crate::prefix;
use crate::request::{Arrival, span_of};
use std::ops::Range;
use triptych_core::{ContentKey, EncoderOutput, Failure, PrefixKey};
use triptych_models::prompt::{CrossInput, ItemSpan};

/// What all answers to one arrival read.
#[derive(Debug)]
pub(super) struct Prompt {
    pub n_tokens: usize,
    positions: Vec<[u32; 3]>,
    next_position: u32,
    spans: Vec<Span>,
    /// Content and place of the spans.
    pub items: Vec<(ContentKey, ItemSpan)>,
    pub cross: Option<Cross>,
    /// What the keys of its blocks begin with.
    pub root: PrefixKey,
}

/// Rows of an item among the tokens.
#[derive(Debug)]
struct Span {
    tokens: Range<usize>,
    item: ItemUse,
}

/// What it cross-attends to.
#[derive(Debug)]
pub(super) struct Cross {
    pub key: CrossKey,
    pub item: ItemUse,
    pub first_token: u32,
}

impl Prompt {
    /// The prompt of an arrival, which was checked.
    pub fn new(arrival: &Arrival, items: &mut ItemTable) -> Self {
        let prepared = &arrival.prepared;
        let declared = |idx: triptych_core::ItemIdx| &arrival.items[idx.0 as usize];
        let mut join = |idx| items.join(declared(idx));
        let spans = prepared.spans.iter().map(|s| Span { tokens: span_of(s), item: join(s.item) }).collect();
        let cross = prepared.cross.map(|input| {
            let CrossInput { item, first_row, n_rows, first_token } = input;
            let key = CrossKey { content: declared(item).key, first_row, n_rows };
            Cross { key, item: join(item), first_token }
        });
        Self {
            n_tokens: prepared.tokens.len(),
            positions: prepared.positions.clone(),
            next_position: prepared.next_position,
            spans,
            items: prepared.spans.iter().map(|s| (declared(s.item).key, *s)).collect(),
            cross,
            root: prefix::root(
                &arrival.tenant,
                prepared.cross.map(|input| (declared(input.item).key, input)),
            ),
        }
    }

    /// The position of token `i`, of the prompt or after it.
    pub fn position(&self, i: usize) -> [u32; 3] {
        let after = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let generated = || [self.next_position.saturating_add(after(i - self.n_tokens)); 3];
        self.positions.get(i).copied().unwrap_or_else(generated)
    }

    /// The token before which an item is missing once the first `n_computed` are computed; past every token when
    /// none is. `needs_rows` says whether the cross-attention input has to be here.
    ///
    /// # Errors
    /// The failure of an item that has still to be read.
    pub fn gate(&self, n_computed: usize, needs_rows: impl Fn(&CrossKey) -> bool) -> Result<usize, Failure> {
        let mut limit = usize::MAX;
        if let Some(cross) = self.cross.as_ref().filter(|cross| needs_rows(&cross.key)) {
            limit = limit.min(gate(&cross.item, 0)?);
        }
        for span in self.spans.iter().filter(|s| s.tokens.end > n_computed) {
            limit = limit.min(gate(&span.item, span.tokens.start)?);
        }
        Ok(limit)
    }

    /// The item rows among tokens `chunk`: for each span that reaches into it the first token, and which rows.
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
}

impl Cross {
    /// The rows, if they are here.
    pub fn rows(&self) -> Option<&EncoderOutput> {
        match self.item.state() {
            ItemState::Ready(output) => Some(output),
            ItemState::Pending | ItemState::Failed(_) => None,
        }
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
