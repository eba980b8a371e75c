//! A step of decoding with rows of padding behind its own.

use crate::decoder::{GroupKv, StepInput};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::ops::{PADDING_SLOT, PagedBatch};

/// The arrays of a padded step.
pub(super) struct PaddedStep {
    token_ids: Vec<u32>,
    positions: Vec<[u32; 3]>,
    own: Vec<PaddedGroup>,
    cross: Option<PaddedTables>,
    state_slots: Option<Vec<u32>>,
}

/// Self-attention KV of a group.
struct PaddedGroup {
    slot_mapping: Vec<u32>,
    tables: PaddedTables,
}

/// Block tables, in the layout of [`PagedBatch`].
struct PaddedTables {
    query_start_loc: Vec<u32>,
    table_start_loc: Vec<u32>,
    seq_lens: Vec<u32>,
}

impl PaddedStep {
    /// A step of one row for each sequence, padded to `n_seqs` of them. Rows of padding have slots of their own from block
    /// `spare_block` on.
    pub fn new(step: &StepInput<'_>, n_seqs: usize, spare_block: usize) -> Self {
        let n = step.token_ids.len();
        let padding = n..n_seqs.max(n);
        let first = spare_block * KV_BLOCK_TOKENS;
        // Groups may share them: nobody reads what is written there.
        let slots = padding.clone().map(|row| u32::try_from(first + row - n).unwrap_or(u32::MAX));
        let group = |of: &GroupKv<'_>| PaddedGroup {
            slot_mapping: of.slot_mapping.iter().copied().chain(slots.clone()).collect(),
            tables: PaddedTables::new(of.tables, padding.len()),
        };
        Self {
            token_ids: step.token_ids.iter().copied().chain(padding.clone().map(|_| 0)).collect(),
            positions: step.positions.iter().copied().chain(padding.clone().map(|_| [0; 3])).collect(),
            own: step.self_kv.iter().map(group).collect(),
            cross: step.cross_kv.map(|kv| PaddedTables::new(kv, padding.len())),
            state_slots: step
                .state_slots
                .map(|slots| slots.iter().copied().chain(padding.clone().map(|_| PADDING_SLOT)).collect()),
        }
    }

    /// The same step without recurrent states: its rows read none and leave all as they are.
    pub fn without_states(mut self) -> Self {
        self.state_slots.iter_mut().flatten().for_each(|slot| *slot = PADDING_SLOT);
        self
    }

    /// The padded KV of each group of the step that it was made of.
    pub fn groups<'a>(&'a self, step: &StepInput<'a>) -> Vec<GroupKv<'a>> {
        let groups = self.own.iter().zip(step.self_kv);
        let padded = groups.map(|(padded, of)| GroupKv {
            slot_mapping: &padded.slot_mapping,
            tables: padded.tables.view(of.tables),
        });
        padded.collect()
    }

    /// The padded form of the step that it was made of, with its groups. It asks for no logits.
    pub fn input<'a>(&'a self, step: &StepInput<'a>, groups: &'a [GroupKv<'a>]) -> StepInput<'a> {
        let cross_kv = step.cross_kv.zip(self.cross.as_ref()).map(|(kv, padded)| padded.view(kv));
        StepInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            self_kv: groups,
            cross_kv,
            cross_rows: None,
            state_slots: self.state_slots.as_deref(),
            logit_rows: &[],
            ..*step
        }
    }
}

impl PaddedTables {
    /// Tables with so many sequences behind their own, of one query and no keys each.
    fn new(batch: PagedBatch<'_>, n_padding: usize) -> Self {
        let last = |offsets: &[u32]| offsets.last().copied().unwrap_or(0);
        let rows = (1..).take(n_padding).map(|i| last(batch.query_start_loc) + i);
        let blocks = std::iter::repeat_n(last(batch.table_start_loc), n_padding);
        Self {
            query_start_loc: batch.query_start_loc.iter().copied().chain(rows).collect(),
            table_start_loc: batch.table_start_loc.iter().copied().chain(blocks).collect(),
            seq_lens: batch.seq_lens.iter().copied().chain(std::iter::repeat_n(0, n_padding)).collect(),
        }
    }

    fn view<'a>(&'a self, batch: PagedBatch<'a>) -> PagedBatch<'a> {
        PagedBatch {
            query_start_loc: &self.query_start_loc,
            table_start_loc: &self.table_start_loc,
            block_tables: batch.block_tables,
            seq_lens: &self.seq_lens,
        }
    }
}
