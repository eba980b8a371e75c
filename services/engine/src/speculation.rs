//! Speculative decoding for greedy sequences: draft tokens by the method of the settings.
//!
//! A draft may be wrong or missing without harm: the scheduler verifies it in the sequence's next step, and the
//! output is what the model itself would have chosen.

mod draft_model;
pub mod prompt_lookup;

use crate::config::{KvBudget, Speculation};
use crate::error::EngineError;
use crate::scheduler::DraftTokens;
use crate::sequence::Sequence;
use draft_model::DraftModel;
use prompt_lookup::PromptLookup;
use std::collections::HashSet;
use triptych_models::decoder::{Decoder, DecoderInfo};

/// Proposes draft tokens.
pub struct DraftProposer {
    speculation: Speculation,
    vocab: usize,
    model: Option<DraftModel>,
}

impl DraftProposer {
    /// A proposer for a model with a vocabulary of `vocab` tokens.
    pub fn new(speculation: Speculation, vocab: usize) -> Self {
        Self { speculation, vocab, model: None }
    }

    /// Attaches a draft model.
    ///
    /// # Errors
    /// [`EngineError`] for one that does not fit the model, or memory that cannot be had.
    pub fn attach_model(
        &mut self,
        decoder: Box<dyn Decoder>,
        kv: KvBudget,
        target: &DecoderInfo,
    ) -> Result<(), EngineError> {
        self.model = Some(DraftModel::new(decoder, kv, target)?);
        Ok(())
    }

    /// Draft tokens of each sequence; some have none.
    pub fn propose<'a>(&mut self, sequences: impl Iterator<Item = &'a Sequence>) -> DraftTokens {
        let sequences = sequences.filter(|s| s.is_greedy());
        let mut drafts: DraftTokens = match (self.speculation, &mut self.model) {
            (Speculation::PromptLookup(lookup), _) => {
                sequences.map(|s| (s.id(), look_up(lookup, s))).collect()
            }
            (Speculation::DraftModel { n_tokens }, Some(model)) => {
                model.propose(&sequences.collect::<Vec<_>>(), n_tokens)
            }
            _ => DraftTokens::new(),
        };
        for draft in drafts.values_mut() {
            // Looked-up tokens may be placeholders of an item, which may lie outside the vocabulary.
            let n_known = draft.iter().take_while(|token| (**token as usize) < self.vocab).count();
            draft.truncate(n_known);
        }
        drafts
    }
}

fn look_up(lookup: PromptLookup, sequence: &Sequence) -> Vec<u32> {
    // An end token in a draft does no harm: the completion ends with it, or it is rejected.
    let ends: HashSet<u32> = HashSet::new();
    lookup.propose(sequence.tokens(0), sequence.limit(), &ends).to_vec()
}
