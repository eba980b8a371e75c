//! Encoder rows that a prompt cross-attends to: which of them belong to one entry of the cache, and which tokens see how many.
//!
//! Inputs at consecutive tokens are one source: their rows lie one after another in the blocks of one entry, so that a
//! token attends to the first `n` rows of one entry whatever number of images it sees. An image by itself is a source of
//! one part, whose entry every prompt with that image shares. It knows neither blocks nor the cache.

use crate::cross::CrossKey;
use crate::items::{ItemState, ItemTable, ItemUse};
use crate::request::{SequenceRequest, cross_runs};
use std::ops::Range;
use triptych_core::{ContentKey, EncoderOutput};
use triptych_models::prompt::CrossInput;

/// Encoder rows of one entry, and the tokens that attend to them.
#[derive(Clone, Debug)]
pub(crate) struct CrossSource {
    /// Key of the entry.
    pub key: CrossKey,
    /// One for each input, in the order of their tokens; at least one.
    parts: Vec<CrossPart>,
}

/// Rows of one input.
#[derive(Clone, Debug)]
struct CrossPart {
    item: ItemUse,
    /// First row in the encoder output.
    first_row: usize,
    /// Rows in the entry.
    rows: Range<usize>,
    first_token: usize,
}

/// Tokens that attend to the first `n_keys` rows of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CrossView {
    /// Index of the source.
    pub source: usize,
    /// The tokens.
    pub tokens: Range<usize>,
    /// Number of rows.
    pub n_keys: usize,
}

impl CrossSource {
    /// The sources of a checked request, in the order of their tokens.
    pub fn all(request: &SequenceRequest, items: &mut ItemTable) -> Vec<Self> {
        cross_runs(&request.prepared.cross).map(|run| Self::new(run, request, items)).collect()
    }

    fn new(run: &[CrossInput], request: &SequenceRequest, items: &mut ItemTable) -> Self {
        let mut n_rows = 0;
        let parts = run.iter().map(|input| {
            let first = n_rows;
            n_rows += input.n_rows as usize;
            CrossPart {
                item: items.join(&request.items[input.item.0 as usize]),
                first_row: input.first_row as usize,
                rows: first..n_rows,
                first_token: input.first_token as usize,
            }
        });
        let parts = parts.collect();
        Self { key: key(run, request), parts }
    }

    /// Items whose rows are projected.
    pub fn items(&self) -> impl Iterator<Item = &ItemUse> {
        self.parts.iter().map(|part| &part.item)
    }

    /// The same, to be released or joined again.
    pub fn items_mut(&mut self) -> impl Iterator<Item = &mut ItemUse> {
        self.parts.iter_mut().map(|part| &mut part.item)
    }

    /// Loaded rows of the entry from row `start` on, as many as one encoder output has of them and at most `n`: the output,
    /// and their range in it. `None` if there are none, or they are not loaded.
    pub fn rows(&self, start: usize, n: usize) -> Option<(&EncoderOutput, Range<usize>)> {
        let part = self.parts.iter().find(|part| part.rows.contains(&start))?;
        let ItemState::Ready(output) = part.item.state() else { return None };
        let first = part.first_row + start - part.rows.start;
        Some((output, first..first + n.min(part.rows.end - start)))
    }
}

/// Tokens among `tokens` that attend to encoder rows, ascending.
pub(crate) fn views(sources: &[CrossSource], tokens: &Range<usize>) -> Vec<CrossView> {
    let parts =
        || sources.iter().enumerate().flat_map(|(i, source)| source.parts.iter().map(move |part| (i, part)));
    let ends = parts().skip(1).map(|(_, part)| part.first_token).chain([usize::MAX]);
    let view = |((source, part), end): ((usize, &CrossPart), usize)| CrossView {
        source,
        tokens: part.first_token.max(tokens.start)..end.min(tokens.end),
        n_keys: part.rows.end,
    };
    parts().zip(ends).map(view).filter(|view| !view.tokens.is_empty()).collect()
}

/// Key of the entry of a run. Of several inputs its content is a hash of theirs, and of the rows of each.
fn key(run: &[CrossInput], request: &SequenceRequest) -> CrossKey {
    let content = |input: &CrossInput| request.items[input.item.0 as usize].key;
    let adapter = request.adapter;
    let n_rows = run.iter().fold(0_u32, |sum, input| sum.saturating_add(input.n_rows));
    if let [one] = run {
        return CrossKey { content: content(one), first_row: one.first_row, n_rows, adapter };
    }
    let rows = |input: &CrossInput| [input.first_row, input.n_rows].map(u32::to_le_bytes).concat();
    let parts: Vec<Vec<u8>> =
        run.iter().flat_map(|input| [content(input).as_bytes().to_vec(), rows(input)]).collect();
    let content = ContentKey::joined(parts.iter().map(Vec::as_slice));
    CrossKey { content, first_row: 0, n_rows, adapter }
}
