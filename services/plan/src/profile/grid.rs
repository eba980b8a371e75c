//! Engine steps that are measured, and their arrays. Keys that were never written cost what others
//! cost, so no prompt has to be read to measure what comes after it.

use super::error::ProfileError;
use super::settings::{Extent, ProfileSettings};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_models::decoder::{DecoderInfo, GroupKv, PagedBatch, StepInput};
use triptych_models::sampling::{ChooseBatch, ChooseRow};

/// A step to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCase {
    /// Prompt tokens, of one sequence.
    pub prefill: u32,
    /// Its tokens that were read before.
    pub before: u32,
    /// Sequences that write a token.
    pub decodes: u32,
    /// Keys of each of them.
    pub context: u32,
    /// Rows of encoder output that are projected first.
    pub projected: u32,
}

/// The cases, and the memory they need.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Steps in the order of measurement.
    pub cases: Vec<StepCase>,
    /// Blocks of self-attention.
    pub self_blocks: usize,
    /// Blocks of cross-attention.
    pub cross_blocks: usize,
    /// Rows that each sequence cross-attends to; 0 without cross-attention.
    pub cross_rows: u32,
}

impl Grid {
    /// Sequences of the largest case.
    pub fn n_sequences(&self) -> usize {
        let of = |case: &StepCase| case.decodes as usize + usize::from(case.prefill > 0);
        self.cases.iter().map(of).max().unwrap_or(0)
    }

    /// The grid of a decoder; `largest` is the number of rows of the largest item.
    ///
    /// # Errors
    /// [`ProfileError::Memory`] if not one case fits.
    pub fn new(info: &DecoderInfo, settings: &ProfileSettings, largest: usize) -> Result<Self, ProfileError> {
        let cross_rows = if info.cross_attention { u32::try_from(largest).unwrap_or(u32::MAX) } else { 0 };
        let candidates = candidates(settings.extent, cross_rows);
        let blocks = |case: &StepCase| {
            let own = blocks_of(case.prefill + case.before) + case.decodes as usize * blocks_of(case.context);
            let own = own * info.kv_groups.n_groups();
            let sequences = case.decodes as usize + usize::from(case.prefill > 0);
            (own, sequences * blocks_of(cross_rows))
        };
        let bytes = |(own, cross): (usize, usize)| {
            own.saturating_mul(info.self_block_bytes)
                .saturating_add(cross.saturating_mul(info.cross_block_bytes))
        };
        let fits = |case: &StepCase| {
            let longest = (case.prefill + case.before).max(case.context) as usize;
            longest <= info.max_context && bytes(blocks(case)) <= settings.kv_bytes
        };
        let cases: Vec<StepCase> = candidates.iter().copied().filter(fits).collect();
        let largest = |pick: fn((usize, usize)) -> usize| cases.iter().map(|p| pick(blocks(p))).max();
        match (largest(|b| b.0), largest(|b| b.1)) {
            (Some(self_blocks), Some(cross_blocks)) => {
                Ok(Self { cases, self_blocks, cross_blocks, cross_rows })
            }
            _ => {
                let needed = candidates.iter().map(|p| bytes(blocks(p))).min().unwrap_or(0);
                Err(ProfileError::Memory { needed, given: settings.kv_bytes })
            }
        }
    }
}

fn candidates(extent: Extent, cross_rows: u32) -> Vec<StepCase> {
    let (decodes, contexts, prefills, befores): (&[u32], &[u32], &[u32], &[u32]) = match extent {
        Extent::Quick => (&[1, 8], &[32, 128], &[16, 64], &[0, 64]),
        Extent::Full => {
            (&[1, 2, 4, 8, 16, 32, 64], &[64, 512, 2048], &[16, 64, 128, 256, 512], &[0, 512, 1536])
        }
    };
    let none = StepCase { prefill: 0, before: 0, decodes: 0, context: 0, projected: 0 };
    let mut cases = Vec::new();
    for &decodes in decodes {
        cases.extend(contexts.iter().map(|&context| StepCase { decodes, context, ..none }));
    }
    for &prefill in prefills {
        cases.extend(befores.iter().map(|&before| StepCase { prefill, before, ..none }));
    }
    // Both in one step, as the scheduler mixes them.
    for &decodes in decodes.iter().filter(|n| **n >= 8) {
        let middle = contexts[contexts.len() / 2];
        cases.extend(prefills.iter().skip(1).map(|&p| StepCase {
            prefill: p,
            decodes,
            context: middle,
            ..none
        }));
    }
    if cross_rows > 0 {
        let shares = [4, 2, 1].map(|part| cross_rows.div_ceil(part));
        cases.extend(shares.map(|projected| StepCase { prefill: prefills[0], projected, ..none }));
    }
    cases
}

fn blocks_of(n_tokens: u32) -> usize {
    (n_tokens as usize).div_ceil(KV_BLOCK_TOKENS)
}

/// The arrays of a step.
#[derive(Debug, Default)]
pub struct Arrays {
    token_ids: Vec<u32>,
    positions: Vec<[u32; 3]>,
    logit_rows: Vec<u32>,
    choose: ChooseBatch,
    /// Slots and tables of each KV cache group, in blocks of its own.
    own: Vec<(Vec<u32>, Tables)>,
    cross: Tables,
    state_slots: Vec<u32>,
    /// Slots that rows are projected to.
    pub projected_slots: Vec<u32>,
}

#[derive(Debug)]
struct Tables {
    query_start_loc: Vec<u32>,
    table_start_loc: Vec<u32>,
    blocks: Vec<u32>,
    seq_lens: Vec<u32>,
}

impl Default for Tables {
    fn default() -> Self {
        let query_start_loc = vec![0];
        let table_start_loc = vec![0];
        Self { query_start_loc, table_start_loc, blocks: Vec::new(), seq_lens: Vec::new() }
    }
}

impl Tables {
    /// A sequence with blocks that no other one has, which follow each other; the first of them.
    fn push(&mut self, n_queries: u32, n_keys: u32) -> u32 {
        self.push_nth(n_queries, n_keys, (0, 1))
    }

    /// The same in table number `group` of `n_groups` that share a pool.
    fn push_nth(&mut self, n_queries: u32, n_keys: u32, (group, n_groups): (u32, u32)) -> u32 {
        let first = self.blocks.len() as u32 * n_groups + group * blocks_of(n_keys) as u32;
        self.query_start_loc.push(self.query_start_loc.last().copied().unwrap_or(0) + n_queries);
        self.blocks.extend((0..blocks_of(n_keys) as u32).map(|block| first + block));
        self.table_start_loc.push(self.blocks.len() as u32);
        self.seq_lens.push(n_keys);
        first
    }

    fn view(&self) -> PagedBatch<'_> {
        PagedBatch {
            query_start_loc: &self.query_start_loc,
            table_start_loc: &self.table_start_loc,
            block_tables: &self.blocks,
            seq_lens: &self.seq_lens,
        }
    }
}

impl Arrays {
    /// Arrays of a case: decodes first, then the prompt, as the scheduler orders them.
    pub fn new(info: &DecoderInfo, case: &StepCase, cross_rows: u32) -> Self {
        let mut arrays = Self::default();
        arrays.own.resize_with(info.kv_groups.n_groups(), Default::default);
        for _ in 0..case.decodes {
            arrays.push(1, case.context, cross_rows);
        }
        if case.prefill > 0 {
            arrays.push(case.prefill, case.before + case.prefill, cross_rows);
        }
        arrays.projected_slots = (0..case.projected).collect();
        arrays
    }

    fn push(&mut self, n_queries: u32, n_keys: u32, cross_rows: u32) {
        let block = KV_BLOCK_TOKENS as u32;
        let n_groups = self.own.len() as u32;
        for (group, (slots, tables)) in (0..n_groups).zip(&mut self.own) {
            let first = tables.push_nth(n_queries, n_keys, (group, n_groups)) * block;
            slots.extend((n_keys - n_queries..n_keys).map(|token| first + token));
        }
        for token in n_keys - n_queries..n_keys {
            // Small ids exist in every vocabulary; the first few are special.
            self.token_ids.push(10 + token % 80);
            self.positions.push([token; 3]);
        }
        self.cross.push(n_queries, cross_rows);
        self.state_slots.push(self.state_slots.len() as u32);
        self.choose.choices.push(ChooseRow::greedy(self.logit_rows.len() as u32));
        self.logit_rows.push(self.token_ids.len() as u32 - 1);
    }

    /// KV of each group.
    pub fn groups(&self) -> Vec<GroupKv<'_>> {
        let groups = self.own.iter();
        groups.map(|(slot_mapping, tables)| GroupKv { slot_mapping, tables: tables.view() }).collect()
    }

    /// Input of the decoder, with its groups.
    pub fn input<'a>(&'a self, info: &DecoderInfo, groups: &'a [GroupKv<'a>]) -> StepInput<'a> {
        StepInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            embeds: &[],
            self_kv: groups,
            cross_kv: info.cross_attention.then(|| self.cross.view()),
            cross_rows: None,
            state_slots: info.state_slot_bytes.map(|_| &self.state_slots[..]),
            adapters: &[],
            logit_rows: &self.logit_rows,
            choose: &self.choose,
        }
    }
}
