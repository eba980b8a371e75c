//! The prompt that all completions of a request share: tokens, positions, and items within or beside them.

use super::cross_source::CrossSource;
use crate::cross::CrossKey;
use crate::items::{ItemState, ItemTable, ItemUse};
use crate::prefix;
use crate::request::{SequenceRequest, span_of};
use std::ops::Range;
use triptych_core::{AdapterId, ContentKey, EncoderOutput, Failure, PrefixKey};
use triptych_models::prompt::{CrossInput, ItemSpan};

/// The prompt that all completions of a request share.
#[derive(Clone, Debug)]
pub(super) struct SharedPrompt {
    pub n_tokens: usize,
    positions: Vec<[u32; 3]>,
    next_position: u32,
    spans: Vec<PromptSpan>,
    /// Content key and position of the spans.
    pub items: Vec<(ContentKey, ItemSpan)>,
    /// Content key and tokens of what it cross-attends to.
    pub cross_inputs: Vec<(ContentKey, CrossInput)>,
    /// The same as entries of the cross-attention cache, in the order of their tokens.
    pub cross: Vec<CrossSource>,
    pub adapter: Option<AdapterId>,
    /// Root of the chain of prefix keys.
    pub root: PrefixKey,
}

/// Rows of an item among the tokens.
#[derive(Clone, Debug)]
struct PromptSpan {
    tokens: Range<usize>,
    first_row: usize,
    item: ItemUse,
}

impl SharedPrompt {
    /// The prompt of a checked request.
    pub fn new(request: &SequenceRequest, items: &mut ItemTable) -> Self {
        let prepared = &request.prepared;
        let declared = |idx: triptych_core::ItemIdx| &request.items[idx.0 as usize];
        let mut join = |idx| items.join(declared(idx));
        let spans = prepared
            .spans
            .iter()
            .map(|s| PromptSpan { tokens: span_of(s), first_row: s.first_row as usize, item: join(s.item) })
            .collect();
        Self {
            n_tokens: prepared.tokens.len(),
            positions: prepared.positions.clone(),
            next_position: prepared.next_position,
            spans,
            items: prepared.spans.iter().map(|s| (declared(s.item).key, *s)).collect(),
            cross_inputs: prepared.cross.iter().map(|c| (declared(c.item).key, *c)).collect(),
            cross: CrossSource::all(request, items),
            adapter: request.adapter,
            root: prefix::root(&request.tenant, request.adapter),
        }
    }

    /// True if token `i` stands for a row of an item.
    pub fn is_of_item(&self, i: usize) -> bool {
        self.spans.iter().any(|span| span.tokens.contains(&i))
    }

    /// Position of token `i`, of the prompt or after it: (temporal, height, width).
    pub fn position(&self, i: usize) -> [u32; 3] {
        let after = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let generated = || [self.next_position.saturating_add(after(i - self.n_tokens)); 3];
        self.positions.get(i).copied().unwrap_or_else(generated)
    }

    /// Tokens that are readable once the first `n_computed` are computed, that is, those before the first item
    /// that is not loaded; `usize::MAX` when all items are. `needs_rows` says whether the rows of a
    /// cross-attention source, by its number, must be loaded.
    ///
    /// # Errors
    /// The failure of an item that is still needed.
    pub fn readable(
        &self,
        n_computed: usize,
        needs_rows: impl Fn(usize, &CrossKey) -> bool,
    ) -> Result<usize, Failure> {
        let mut limit = usize::MAX;
        let needed = self.cross.iter().enumerate().filter(|(i, source)| needs_rows(*i, &source.key));
        for item in needed.flat_map(|(_, source)| source.items()) {
            limit = limit.min(readable_before(item, 0)?);
        }
        for span in self.spans.iter().filter(|s| s.tokens.end > n_computed) {
            limit = limit.min(readable_before(&span.item, span.tokens.start)?);
        }
        Ok(limit)
    }

    /// Uses of items, within and beside the tokens.
    fn uses_mut(&mut self) -> impl Iterator<Item = &mut ItemUse> {
        let crossed = self.cross.iter_mut().flat_map(CrossSource::items_mut);
        self.spans.iter_mut().map(|s| &mut s.item).chain(crossed)
    }

    /// True if the rows of an item are here or awaited.
    pub fn reads_items(&self) -> bool {
        let crossed = self.cross.iter().flat_map(CrossSource::items);
        self.spans.iter().map(|s| &s.item).chain(crossed).any(ItemUse::is_joined)
    }

    /// Gives the rows of all items back.
    pub fn release_items(&mut self) {
        self.uses_mut().for_each(ItemUse::release);
    }

    /// Waits for the rows of all items again.
    pub fn rejoin_items(&mut self, items: &mut ItemTable) {
        self.uses_mut().for_each(|item| item.rejoin(items));
    }

    /// The span that has tokens before token `end` and from it on.
    pub fn span_across(&self, end: usize) -> Option<Range<usize>> {
        let mut spans = self.spans.iter().map(|span| &span.tokens);
        spans.find(|tokens| tokens.start < end && end < tokens.end).cloned()
    }

    /// Item rows among tokens `chunk`, of each span that overlaps it.
    pub fn item_rows(&self, chunk: &Range<usize>) -> impl Iterator<Item = SpanRows<'_>> {
        self.spans.iter().filter_map(move |span| {
            let start = span.tokens.start.max(chunk.start);
            let end = span.tokens.end.min(chunk.end);
            match span.item.state() {
                ItemState::Ready(output) if start < end => {
                    let row = |token: usize| token - span.tokens.start + span.first_row;
                    let ends_span = end == span.tokens.end;
                    Some(SpanRows { first_token: start, output, rows: row(start)..row(end), ends_span })
                }
                _ => None,
            }
        })
    }
}

/// Rows of an item in the place of consecutive tokens.
#[derive(Debug)]
pub struct SpanRows<'a> {
    /// The first of the tokens.
    pub first_token: usize,
    /// Encoder output of the item.
    pub output: &'a EncoderOutput,
    /// Range of its rows, a row for each token.
    pub rows: Range<usize>,
    /// True if the last of them is the last of the span.
    pub ends_span: bool,
}

/// Readable tokens when token `start` needs the item.
fn readable_before(item: &ItemUse, start: usize) -> Result<usize, Failure> {
    match item.state() {
        ItemState::Ready(_) => Ok(usize::MAX),
        ItemState::Pending => Ok(start),
        ItemState::Failed(failure) => Err(failure),
    }
}
