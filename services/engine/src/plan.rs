//! Work of one step, laid out flat: no padding, one vector of rows for all sequences.
//!
//! A plan owns everything it names (encoder outputs by reference count), so the runner needs nothing else. It
//! does not know how a decoder computes.

use crate::blocks::{BlockPair, BlockTable, KvTables, blocks_for};
use crate::cross::{CrossKey, CrossShare};
use crate::request::SequenceId;
use crate::sequence::{Sequence, SpanRows};
use crate::states::{StateMove, StateSlot};
use std::ops::Range;
use triptych_core::{AdapterId, EncoderOutput};
use triptych_models::decoder::{GroupKv, PagedBatch};

/// A copy of one self-attention block. The order of planning is kept, since a block that one move frees may be
/// filled by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMove {
    /// Within the device, before a forked sequence writes a block that others hold too.
    Copy(BlockPair),
    /// From the device to the host, at a preemption.
    Out(BlockPair),
    /// From the host to the device, at the admission of a swapped sequence.
    In(BlockPair),
}

impl BlockMove {
    /// Source and destination.
    pub fn pair(&self) -> BlockPair {
        match self {
            Self::Copy(pair) | Self::Out(pair) | Self::In(pair) => *pair,
        }
    }
}

/// Consecutive rows of an encoder output to project into cross-attention slots, before any row of the step runs.
#[derive(Debug)]
pub struct ProjectionChunk {
    /// Sequence that waits for them, and fails with the step. Others may wait too.
    pub id: SequenceId,
    /// Entry that the rows belong to.
    pub key: CrossKey,
    /// Encoder output that holds the rows.
    pub output: EncoderOutput,
    /// Range of its rows.
    pub output_rows: Range<usize>,
    /// Range of the entry's rows.
    pub rows: Range<usize>,
    /// Slot of each row, `[rows.len()]`.
    pub slots: Vec<u32>,
}

impl ProjectionChunk {
    /// Rows of a source of a sequence from row `start` on, as many as one encoder output has of them and at most `n`, into their
    /// places in the entry's blocks. `None` if the sequence has no such rows, or they are not loaded.
    pub(crate) fn new(
        sequence: &Sequence,
        (source, table): (usize, &BlockTable),
        start: usize,
        n: usize,
    ) -> Option<Self> {
        let (output, output_rows) = sequence.cross_rows(source, start, n)?;
        let rows = start..start + output_rows.len();
        Some(Self {
            id: sequence.id(),
            key: sequence.cross_keys().nth(source)?,
            output: output.clone(),
            output_rows,
            slots: rows.clone().filter_map(|row| table.slot(row)).collect(),
            rows,
        })
    }
}

/// Consecutive tokens of one branch of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Sequence.
    pub id: SequenceId,
    /// Index of the branch.
    pub branch: usize,
    /// Range of the branch's tokens.
    pub tokens: Range<usize>,
    /// Those of `tokens` after which logits are read for the log-probability of the next token, which is the prompt's.
    pub scored: Range<usize>,
    /// Draft tokens after them, to be verified.
    pub drafts: Vec<u32>,
    /// True if the last of `tokens` is the branch's last, so that the next token is chosen after it.
    pub samples: bool,
}

impl Chunk {
    /// Number of rows in the step.
    pub fn n_rows(&self) -> usize {
        self.tokens.len() + self.drafts.len()
    }

    /// Rows of logits that tokens are chosen by: after its last token, and after each draft token.
    pub fn n_choices(&self) -> usize {
        if self.samples { 1 + self.drafts.len() } else { 0 }
    }

    /// All rows of logits that it needs; those that are scored come first.
    pub fn n_logits(&self) -> usize {
        self.scored.len() + self.n_choices()
    }
}

/// Item rows that replace token embeddings of the step.
#[derive(Debug)]
pub struct ItemEmbedding {
    /// First row in the step.
    pub first_row: usize,
    /// Encoder output of the item.
    pub output: EncoderOutput,
    /// Range of its rows, a row for each token.
    pub rows: Range<usize>,
    /// True if the last of them is the last of its span.
    pub ends_span: bool,
}

/// Block tables of the chunks, in the layout of `PagedBatch`.
#[derive(Debug)]
pub struct PagedTables {
    query_start_loc: Vec<u32>,
    table_start_loc: Vec<u32>,
    block_tables: Vec<u32>,
    seq_lens: Vec<u32>,
}

/// Slots and block tables of one group of layers.
#[derive(Debug, Default)]
pub struct GroupTables {
    /// Slot of each row, `[n_tokens]`.
    pub slot_mapping: Vec<u32>,
    /// Blocks of each chunk.
    pub tables: PagedTables,
}

/// Work of one step.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Block copies, run first and in this order.
    pub moves: Vec<BlockMove>,
    /// Work on slots of recurrent states, run before the forward and in this order.
    pub state_moves: Vec<StateMove>,
    /// Sequences whose blocks or states are copied.
    pub moved: Vec<SequenceId>,
    /// Rows to project, run next and together: they depend on nothing else, nor on each other.
    pub projections: Vec<ProjectionChunk>,
    /// Chunks in the order of their rows, `[n_chunks]`.
    pub chunks: Vec<Chunk>,
    /// Token of each row, `[n_tokens]`.
    pub token_ids: Vec<u32>,
    /// Position of each row, `[n_tokens]`, (temporal, height, width).
    pub positions: Vec<[u32; 3]>,
    /// Item rows, ascending and disjoint.
    pub embeds: Vec<ItemEmbedding>,
    /// Self-attention KV of each group of layers; none of a plan without rows.
    pub self_kv: Vec<GroupTables>,
    /// Cross-attention blocks of the runs of `cross_rows` that attend to the same keys: one of each chunk where every token
    /// attends to one source.
    pub cross_kv: PagedTables,
    /// Rows that cross-attend, ascending.
    pub cross_rows: Vec<u32>,
    /// Slot of each chunk's recurrent state, `[n_chunks]`; empty for a model without such states.
    pub state_slots: Vec<u32>,
    /// Checkpoints of recurrent states: (source, destination), copied after the forward.
    pub checkpoints: Vec<(u32, u32)>,
    /// Rows of each adapter, ascending; rows in none have none.
    pub adapters: Vec<(AdapterId, Vec<u32>)>,
    /// Rows whose logits are needed, ascending.
    pub logit_rows: Vec<u32>,
}

impl StepPlan {
    /// True if there is nothing to run.
    pub fn is_empty(&self) -> bool {
        let is_moving = !self.moves.is_empty() || !self.state_moves.is_empty();
        self.chunks.is_empty() && !is_moving && self.projections.is_empty()
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Number of encoder rows to project.
    pub fn n_projected(&self) -> usize {
        self.projections.iter().map(|chunk| chunk.rows.len()).sum()
    }

    /// Ids of the sequences that it computes something for, with repetitions.
    pub fn ids(&self) -> impl Iterator<Item = SequenceId> {
        self.chunks.iter().map(|chunk| chunk.id).chain(self.projections.iter().map(|chunk| chunk.id))
    }

    /// Adds tokens `tokens` of a branch, and draft tokens after them. The sequence is resident and its table has
    /// room.
    pub(crate) fn push(
        &mut self,
        sequence: &mut Sequence,
        branch: usize,
        tokens: Range<usize>,
        drafts: Vec<u32>,
    ) {
        let scored = sequence.take_scored(&tokens);
        let Some(device_kv) = sequence.device_kv() else { return };
        let known = sequence.tokens(branch);
        let rows = SequenceRows {
            tokens: [&known[tokens.clone()], &drafts].concat(),
            first: tokens.start,
            tables: &device_kv.branches[branch].tables,
            cross: device_kv.cross.iter().map(CrossShare::table).collect(),
        };
        let first_row = to_u32(self.n_rows());
        self.push_rows(sequence, rows);
        self.state_slots.extend(device_kv.branches[branch].state.as_ref().map(StateSlot::index));
        if let Some(adapter) = sequence.adapter() {
            self.push_adapter(adapter, first_row..to_u32(self.n_rows()));
        }
        let samples = tokens.end == known.len();
        let scored_rows = scored.start - tokens.start..scored.end - tokens.start;
        let chunk = Chunk { id: sequence.id(), branch, tokens, scored, drafts, samples };
        self.logit_rows.extend(scored_rows.map(|row| first_row + to_u32(row)));
        self.ask_for(chunk.n_choices());
        self.chunks.push(chunk);
    }

    /// Adds rows of a sequence over any block tables.
    pub(crate) fn push_rows(&mut self, sequence: &Sequence, rows: SequenceRows<'_>) {
        let first_row = self.n_rows();
        let range = rows.first..rows.first + rows.tokens.len();
        for (i, token) in range.clone().zip(&rows.tokens) {
            self.token_ids.push(*token);
            self.positions.push(sequence.position(i));
        }
        for SpanRows { first_token, output, rows, ends_span } in sequence.item_rows(&range) {
            let first_row = first_row + first_token - range.start;
            // A placeholder may lie outside the vocabulary; its row is replaced, so any token does.
            self.token_ids[first_row..first_row + rows.len()].fill(0);
            self.embeds.push(ItemEmbedding { first_row, output: output.clone(), rows, ends_span });
        }
        let groups = rows.tables.groups();
        self.self_kv.resize_with(groups.len(), GroupTables::default);
        for (planned, table) in self.self_kv.iter_mut().zip(groups) {
            planned.push(table, range.clone());
        }
        for view in sequence.cross_views(&range) {
            let first = to_u32(first_row + view.tokens.start - range.start);
            self.cross_rows.extend(first..first + to_u32(view.tokens.len()));
            let blocks = rows.cross.get(view.source).map_or(&[][..], |table| table.blocks());
            self.cross_kv.push(view.tokens.len(), blocks, view.n_keys);
        }
    }

    /// Adds rows of an adapter, which are behind those that it has.
    fn push_adapter(&mut self, adapter: AdapterId, rows: Range<u32>) {
        match self.adapters.iter_mut().find(|(known, _)| *known == adapter) {
            Some((_, known)) => known.extend(rows),
            None => self.adapters.push((adapter, rows.collect())),
        }
    }

    /// True if rows or projections of the plan need an adapter.
    pub fn uses(&self, adapter: AdapterId) -> bool {
        self.adapters.iter().any(|(used, _)| *used == adapter)
            || self.projections.iter().any(|chunk| chunk.key.adapter == Some(adapter))
    }

    /// Requests the logits of the last `n` rows.
    pub(crate) fn ask_for(&mut self, n: usize) {
        let n_rows = self.n_rows();
        self.logit_rows.extend((n_rows - n..n_rows).map(to_u32));
    }
}

/// Consecutive rows of one sequence.
#[derive(Debug)]
pub(crate) struct SequenceRows<'a> {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Index of the first of them in the sequence.
    pub first: usize,
    /// Self-attention blocks; the tables have room for the rows.
    pub tables: &'a KvTables,
    /// Cross-attention blocks of each source.
    pub cross: Vec<&'a BlockTable>,
}

impl GroupTables {
    /// View for a decoder.
    pub fn view(&self) -> GroupKv<'_> {
        GroupKv { slot_mapping: &self.slot_mapping, tables: self.tables.view() }
    }

    /// Adds the rows of tokens `tokens` of a sequence.
    fn push(&mut self, table: &BlockTable, tokens: Range<usize>) {
        self.tables.push(tokens.len(), table.blocks(), tokens.end);
        let slot = |token| table.slot(token).expect("a table grows before its rows are planned");
        self.slot_mapping.extend(tokens.map(slot));
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
    /// View for a decoder.
    pub fn view(&self) -> PagedBatch<'_> {
        PagedBatch {
            query_start_loc: &self.query_start_loc,
            table_start_loc: &self.table_start_loc,
            block_tables: &self.block_tables,
            seq_lens: &self.seq_lens,
        }
    }

    /// Adds a sequence's queries and the blocks of its keys.
    fn push(&mut self, n_queries: usize, blocks: &[crate::blocks::BlockId], n_keys: usize) {
        let queries = self.query_start_loc.last().copied().unwrap_or(0);
        self.query_start_loc.push(queries + to_u32(n_queries));
        // A sequence in prefill holds blocks ahead of its keys; the decoder sees only those with keys.
        self.block_tables.extend(blocks.iter().take(blocks_for(n_keys)).map(|b| b.index()));
        self.table_start_loc.push(to_u32(self.block_tables.len()));
        self.seq_lens.push(to_u32(n_keys));
    }
}

/// Rows, keys and slots of a step are fewer than the slots of the pools, which `MAX_BLOCKS` bounds.
fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("pools are bounded so that slots fit u32")
}
