//! What one step executes, laid out flat: no padding, one line of rows for all sequences.
//!
//! A plan owns everything it names (encoder outputs by reference count), so the runner needs nothing else. It
//! is made only by the scheduler; it does not know how a decoder computes.

use crate::blocks::{BlockTable, blocks_for};
use crate::cross::CrossKey;
use crate::request::SequenceId;
use crate::sequence::Sequence;
use std::ops::Range;
use triptych_core::EncoderOutput;
use triptych_models::decoder::PagedBatch;

/// Rows of an encoder output to project into cross-attention slots, before anything else runs.
#[derive(Debug)]
pub struct Projection {
    /// Which rows.
    pub key: CrossKey,
    /// Where they are.
    pub output: EncoderOutput,
    /// Slot of each row, `[n_rows]`.
    pub slots: Vec<u32>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whose.
    pub id: SequenceId,
    /// Which of its tokens.
    pub tokens: Range<usize>,
    /// Whether the last of them is the sequence's last, so that the next token is chosen after it.
    pub samples: bool,
}

/// Rows of the step that are rows of an item.
#[derive(Debug)]
pub struct Embed {
    /// First row of the step.
    pub first_row: usize,
    /// The item.
    pub output: EncoderOutput,
    /// Rows of it.
    pub rows: Range<usize>,
}

/// Block tables of the chunks, in the layout of `PagedBatch`.
#[derive(Debug)]
pub struct PagedTables {
    query_start_loc: Vec<u32>,
    table_start_loc: Vec<u32>,
    block_tables: Vec<u32>,
    seq_lens: Vec<u32>,
}

/// One step.
#[derive(Debug, Default)]
pub struct Plan {
    /// Run first.
    pub projections: Vec<Projection>,
    /// The chunks, in the order of their rows.
    pub chunks: Vec<Chunk>,
    /// `[n_tokens]`.
    pub token_ids: Vec<u32>,
    /// `[n_tokens]`, (temporal, height, width).
    pub positions: Vec<[u32; 3]>,
    /// Ascending and disjoint.
    pub embeds: Vec<Embed>,
    /// Self-attention slot of each row, `[n_tokens]`.
    pub slot_mapping: Vec<u32>,
    /// Self-attention blocks of each chunk.
    pub self_kv: PagedTables,
    /// Cross-attention blocks of each chunk; empty without cross-attention.
    pub cross_kv: PagedTables,
    /// Last row of each chunk that samples.
    pub logit_rows: Vec<u32>,
}

impl Plan {
    /// Nothing to run.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Adds a sequence's tokens `tokens`. The sequence is resident and its table has room for them.
    pub(crate) fn push(&mut self, sequence: &Sequence, tokens: Range<usize>) {
        let Some(residence) = sequence.residence() else { return };
        let first_row = self.token_ids.len();
        for i in tokens.clone() {
            let slot =
                residence.table.slot(i).expect("the scheduler grew the table for every token it plans");
            self.token_ids.push(sequence.tokens()[i]);
            self.positions.push(sequence.position(i));
            self.slot_mapping.push(slot);
        }
        for (token, output, rows) in sequence.item_rows(&tokens) {
            let first_row = first_row + token - tokens.start;
            // A placeholder may lie outside the vocabulary; its row is replaced, so any token does.
            self.token_ids[first_row..first_row + rows.len()].fill(0);
            self.embeds.push(Embed { first_row, output: output.clone(), rows });
        }
        self.self_kv.push(tokens.len(), &residence.table, tokens.end);
        if let (Some(table), Some(key)) = (&residence.cross, sequence.cross_key()) {
            self.cross_kv.push(tokens.len(), table, key.n_rows as usize);
        }
        let samples = tokens.end == sequence.tokens().len();
        if samples {
            self.logit_rows.push(to_u32(self.token_ids.len() - 1));
        }
        self.chunks.push(Chunk { id: sequence.id, tokens, samples });
    }
}

impl Default for PagedTables {
    fn default() -> Self {
        Self {
            query_start_loc: vec![0],
            table_start_loc: vec![0],
            block_tables: Vec::new(),
            seq_lens: Vec::new(),
        }
    }
}

impl PagedTables {
    /// The view a decoder takes.
    pub fn view(&self) -> PagedBatch<'_> {
        PagedBatch {
            query_start_loc: &self.query_start_loc,
            table_start_loc: &self.table_start_loc,
            block_tables: &self.block_tables,
            seq_lens: &self.seq_lens,
        }
    }

    fn push(&mut self, n_queries: usize, table: &BlockTable, n_keys: usize) {
        let queries = self.query_start_loc.last().copied().unwrap_or(0);
        self.query_start_loc.push(queries + to_u32(n_queries));
        // A prefilling sequence holds blocks ahead of its keys; the decoder sees only those with keys.
        self.block_tables.extend(table.blocks().iter().take(blocks_for(n_keys)).map(|b| b.index()));
        self.table_start_loc.push(to_u32(self.block_tables.len()));
        self.seq_lens.push(to_u32(n_keys));
    }
}

/// Rows, keys and slots of a step are fewer than the slots of the pools, which `MAX_BLOCKS` bounds.
fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("pools are bounded so that slots fit u32")
}
