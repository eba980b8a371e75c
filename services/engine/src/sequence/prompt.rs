//! The prompt that all completions of a request share: tokens, positions, and items within or beside them.

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
    pub cross: Option<CrossSource>,
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

/// The cross-attention input.
#[derive(Clone, Debug)]
pub(super) struct CrossSource {
    pub key: CrossKey,
    pub item: ItemUse,
    pub first_token: u32,
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
        let cross = prepared.cross.map(|input| {
            let CrossInput { item, first_row, n_rows, first_token } = input;
            let key = CrossKey { content: declared(item).key, first_row, n_rows, adapter: request.adapter };
            CrossSource { key, item: join(item), first_token }
        });
        Self {
            n_tokens: prepared.tokens.len(),
            positions: prepared.positions.clone(),
            next_position: prepared.next_position,
            spans,
            items: prepared.spans.iter().map(|s| (declared(s.item).key, *s)).collect(),
            cross,
            adapter: request.adapter,
            root: prefix::root(
                &request.tenant,
                request.adapter,
                prepared.cross.map(|input| (declared(input.item).key, input)),
            ),
        }
    }

    /// Position of token `i`, of the prompt or after it: (temporal, height, width).
    pub fn position(&self, i: usize) -> [u32; 3] {
        let after = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let generated = || [self.next_position.saturating_add(after(i - self.n_tokens)); 3];
        self.positions.get(i).copied().unwrap_or_else(generated)
    }

    /// Tokens that are readable once the first `n_computed` are computed, that is, those before the first item
    /// that is not loaded; `usize::MAX` when all items are. `needs_rows` says whether the cross-attention input
    /// must be loaded.
    ///
    /// # Errors
    /// The failure of an item that is still needed.
    pub fn readable(
        &self,
        n_computed: usize,
        needs_rows: impl Fn(&CrossKey) -> bool,
    ) -> Result<usize, Failure> {
        let mut limit = usize::MAX;
        if let Some(cross) = self.cross.as_ref().filter(|cross| needs_rows(&cross.key)) {
            limit = limit.min(readable_before(&cross.item, 0)?);
        }
        for span in self.spans.iter().filter(|s| s.tokens.end > n_computed) {
            limit = limit.min(readable_before(&span.item, span.tokens.start)?);
        }
        Ok(limit)
    }

    /// Uses of items, within and beside the tokens.
    fn uses_mut(&mut self) -> impl Iterator<Item = &mut ItemUse> {
        self.spans.iter_mut().map(|s| &mut s.item).chain(self.cross.as_mut().map(|c| &mut c.item))
    }

    /// True if the rows of an item are here or awaited.
    pub fn reads_items(&self) -> bool {
        let uses = self.spans.iter().map(|s| &s.item).chain(self.cross.as_ref().map(|c| &c.item));
        uses.into_iter().any(ItemUse::is_joined)
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

impl CrossSource {
    /// Encoder output rows, if loaded.
    pub fn rows(&self) -> Option<&EncoderOutput> {
        match self.item.state() {
            ItemState::Ready(output) => Some(output),
            ItemState::Pending | ItemState::Failed(_) => None,
        }
    }
}

/// Readable tokens when token `start` needs the item.
fn readable_before(item: &ItemUse, start: usize) -> Result<usize, Failure> {
    match item.state() {
        ItemState::Ready(_) => Ok(usize::MAX),
        ItemState::Pending => Ok(start),
        ItemState::Failed(failure) => Err(failure),
    }
}
