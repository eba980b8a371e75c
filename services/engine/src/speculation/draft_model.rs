//! A draft model: a smaller decoder of the same family, with KV caches of its own, that decodes a few tokens
//! ahead.
//!
//! It keeps KV for each sequence that decodes and drops it when the sequence no longer does. KV of rejected
//! drafts is overwritten. Short of blocks, or after a failed step, it proposes nothing.

use crate::blocks::{BlockPool, BlockTable, KvTables};
use crate::config::KvBudget;
use crate::cross::{CrossCache, CrossShare};
use crate::error::EngineError;
use crate::plan::{ProjectionChunk, SequenceRows, StepPlan};
use crate::request::SequenceId;
use crate::runner::Runner;
use crate::scheduler::DraftTokens;
use crate::sequence::Sequence;
use std::collections::HashMap;
use triptych_models::decoder::{Decoder, DecoderInfo};
use triptych_models::sampling::ChooseBatch;

/// Most rows of a step, and most encoder rows to project in one; what is longer is prefilled over several.
const MAX_ROWS: usize = 2048;

/// A draft decoder and its state for each sequence.
pub(super) struct DraftModel {
    runner: Runner,
    pool: BlockPool,
    cross: CrossCache,
    followed: HashMap<SequenceId, DraftState>,
}

/// Draft KV of a sequence.
struct DraftState {
    tables: KvTables,
    /// Cross-attention blocks of each source.
    cross: Vec<BlockTable>,
    /// Tokens whose keys and values are in the blocks, drafts included.
    computed: Vec<u32>,
}

/// A sequence with the draft tokens of this call.
struct DraftingSequence<'a> {
    sequence: &'a Sequence,
    followed: DraftState,
    draft: Vec<u32>,
    /// True if all its tokens are computed, or are in this step, so that its next token can be drafted.
    caught_up: bool,
}

impl DraftModel {
    /// Allocates the draft model's caches.
    pub fn new(
        mut decoder: Box<dyn Decoder>,
        kv: KvBudget,
        target: &DecoderInfo,
    ) -> Result<Self, EngineError> {
        let info = decoder.info();
        let kinds = |i: &DecoderInfo| [i.vocab, i.encoder_hidden, i.cross_attention.into()];
        let names = ["vocabulary", "width of encoder rows", "number of cross-attention caches"];
        for ((what, actual), expected) in names.into_iter().zip(kinds(&info)).zip(kinds(target)) {
            if actual != expected {
                return Err(EngineError::Draft { what, actual, expected });
            }
        }
        if info.state_slot_bytes.or(target.state_slot_bytes).is_some() {
            let model = "recurrent states, which cannot be rolled back";
            return Err(EngineError::Unsupported { setting: "a draft model", model, needed: "none" });
        }
        let pools = kv.check(&info)?;
        decoder.allocate_kv(pools.own, pools.cross).map_err(EngineError::Kv)?;
        Ok(Self {
            runner: Runner::new(decoder),
            // Of drafts that are rejected, earlier blocks may be needed again.
            pool: BlockPool::new(pools.own).with_groups(info.kv_groups.without_windows()),
            cross: CrossCache::new(pools.cross),
            followed: HashMap::new(),
        })
    }

    /// Up to `n_tokens` draft tokens for each of the sequences.
    pub fn propose(&mut self, sequences: &[&Sequence], n_tokens: usize) -> DraftTokens {
        let mut plan = StepPlan::default();
        let mut old = std::mem::take(&mut self.followed);
        // Blocks that the plan projects into are not taken by the next sequence.
        let mut filling = Vec::new();
        let mut drafting: Vec<DraftingSequence<'_>> = Vec::new();
        // Blocks of sequences that no longer decode are given back before others take some.
        old.retain(|id, _| sequences.iter().any(|s| s.id() == *id));
        for sequence in sequences {
            let followed = old.remove(&sequence.id());
            drafting.extend(self.follow(sequence, followed, n_tokens, (&mut plan, &mut filling)));
        }
        for _ in 0..n_tokens {
            if self.write(&mut drafting, plan).is_none() {
                return DraftTokens::new();
            }
            plan = StepPlan::default();
        }
        let mut drafts = DraftTokens::new();
        for DraftingSequence { sequence, followed, draft, .. } in drafting {
            drafts.insert(sequence.id(), draft);
            self.followed.insert(sequence.id(), followed);
        }
        drafts
    }

    /// Blocks for a sequence and its draft tokens; `None` when there are none.
    fn follow<'a>(
        &mut self,
        sequence: &'a Sequence,
        followed: Option<DraftState>,
        n_tokens: usize,
        plan: (&mut StepPlan, &mut Vec<BlockTable>),
    ) -> Option<DraftingSequence<'a>> {
        let info = self.runner.info();
        let n_most = sequence.n_tokens() + n_tokens;
        if n_most > info.max_context {
            return None;
        }
        let mut followed = match followed {
            Some(followed) => followed,
            None => DraftState {
                tables: self.pool.tables(),
                cross: self.read_inputs(sequence, plan)?,
                computed: Vec::new(),
            },
        };
        followed.tables.grow(n_most).ok()?;
        let known = &sequence.tokens(0)[..sequence.n_tokens() - 1];
        let n_right = followed.computed.iter().zip(known).take_while(|(a, b)| a == b).count();
        followed.computed.truncate(n_right);
        Some(DraftingSequence { sequence, followed, draft: Vec::new(), caught_up: false })
    }

    /// Shares of the sequence's cross-attention KV, one for each source. `None` when they cannot be had, or are not filled
    /// by the plan, which projects what of them is missing and has room; `filling` holds the blocks.
    fn read_inputs(
        &mut self,
        sequence: &Sequence,
        (plan, filling): (&mut StepPlan, &mut Vec<BlockTable>),
    ) -> Option<Vec<BlockTable>> {
        let tables = sequence.cross_keys().enumerate().map(|(source, key)| {
            let table = match self.cross.acquire(key).ok()? {
                CrossShare::Filled(table) => return Some(table),
                CrossShare::Filling(table) => table,
            };
            filling.push(table.fork());
            let planned =
                plan.projections.iter().filter(|chunk| chunk.key == key).map(|chunk| chunk.rows.end);
            let mut start = planned.fold(self.cross.n_filled(&key), usize::max);
            let n_rows = key.n_rows as usize;
            while start < n_rows {
                let n = (n_rows - start).min(MAX_ROWS.saturating_sub(plan.n_projected()));
                let chunk = (n > 0).then(|| ProjectionChunk::new(sequence, (source, &table), start, n));
                let chunk = chunk.flatten()?;
                start = chunk.rows.end;
                plan.projections.push(chunk);
            }
            Some(table)
        });
        tables.collect()
    }

    /// One more draft token for each caught-up sequence. `None` if the step failed.
    fn write(&mut self, drafting: &mut [DraftingSequence<'_>], mut plan: StepPlan) -> Option<()> {
        for one in drafting.iter_mut() {
            one.plan(&mut plan);
        }
        let chosen = self.runner.run(&plan, &ChooseBatch::greedy(plan.logit_rows.len())).ok()?;
        for chunk in &plan.projections {
            self.cross.fill_to(&chunk.key, chunk.rows.end);
        }
        let mut choices = chosen.choices.into_iter();
        for one in drafting.iter_mut().filter(|one| one.caught_up) {
            // A draft of logits that allow no choice is rejected like any other.
            one.draft.push(choices.next()?.map_or(0, |choice| choice.token));
        }
        Some(())
    }
}

impl DraftingSequence<'_> {
    /// Adds the tokens that are not computed yet: of the sequence, and its last draft token.
    fn plan(&mut self, plan: &mut StepPlan) {
        let first = self.followed.computed.len();
        let known = self.sequence.tokens(0).iter().chain(&self.draft);
        let room = MAX_ROWS.saturating_sub(plan.n_rows());
        let tokens: Vec<u32> = known.skip(first).take(room).copied().collect();
        self.caught_up = first + tokens.len() == self.sequence.n_tokens() + self.draft.len();
        if tokens.is_empty() {
            return;
        }
        self.followed.computed.extend(&tokens);
        let tables = &self.followed.tables;
        let cross = self.followed.cross.iter().collect();
        plan.push_rows(self.sequence, SequenceRows { tokens, first, tables, cross });
        plan.ask_for(usize::from(self.caught_up));
    }
}
