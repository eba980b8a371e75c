//! Prefix keys of blocks: hashes of everything their contents depend on, chained from the first token on.
//!
//! A key covers the tenant, the adapter, and for every token so far its id, its position, the item row that replaces it, if
//! any, and the encoder rows that tokens cross-attend to from it on. It does not cover the model: a pool belongs to one engine, an engine to
//! one model.

use crate::request::span_of;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{AdapterId, ContentKey, PrefixKey, TenantId};
use triptych_models::prompt::{CrossInput, ItemSpan};

/// Root of a sequence's key chain. No two of its lists of parts are of one length and mean different things.
pub fn root(tenant: &TenantId, adapter: Option<AdapterId>) -> PrefixKey {
    PrefixKey::root(tenant, adapter.iter().map(|adapter| adapter.as_bytes().as_slice()))
}

/// Tokens of one block, and the items that replace some.
#[derive(Clone, Copy, Debug)]
pub struct BlockParts<'a> {
    /// Index of the first token.
    pub first_token: usize,
    /// Token ids, `[KV_BLOCK_TOKENS]`.
    pub tokens: &'a [u32],
    /// Positions, `[KV_BLOCK_TOKENS]`, (temporal, height, width).
    pub positions: &'a [[u32; 3]; KV_BLOCK_TOKENS],
    /// All items of the sequence.
    pub items: &'a [(ContentKey, ItemSpan)],
    /// All that the sequence cross-attends to.
    pub cross: &'a [(ContentKey, CrossInput)],
}

impl BlockParts<'_> {
    /// Key of the block after the one of key `before`.
    pub fn key(&self, before: &PrefixKey) -> PrefixKey {
        let bytes = |values: &mut dyn Iterator<Item = u32>| -> Vec<u8> {
            values.flat_map(u32::to_le_bytes).collect()
        };
        let end = self.first_token + self.tokens.len();
        let mut parts = vec![
            bytes(&mut self.tokens.iter().copied()),
            bytes(&mut self.positions.iter().flatten().copied()),
        ];
        for (content, span) in self.items {
            let rows = span_of(span);
            let from = rows.start.max(self.first_token);
            let to = rows.end.min(end);
            if from < to {
                let first_row = from - rows.start + span.first_row as usize;
                let overlap = [from - self.first_token, first_row, to - from];
                parts.push(content.as_bytes().to_vec());
                parts.push(bytes(&mut overlap.iter().map(|n| *n as u32)));
            }
        }
        for (content, input) in self.cross {
            let first = input.first_token as usize;
            if (self.first_token..end).contains(&first) {
                // Longer than the part of a span, so neither is taken for the other.
                let at = (first - self.first_token) as u32;
                parts.push(content.as_bytes().to_vec());
                parts.push(bytes(&mut [at, input.first_row, input.n_rows, 1].into_iter()));
            }
        }
        before.then(parts.iter().map(Vec::as_slice))
    }
}
