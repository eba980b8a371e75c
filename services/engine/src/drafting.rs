//! Guesses ahead of greedy sequences, by whatever the settings name.
//!
//! A guess may be wrong or missing without harm: the scheduler checks it in the sequence's own next step, and
//! what is written is what the model itself would have chosen.

mod model;

use crate::config::{KvBudget, Speculation};
use crate::draft::PromptLookup;
use crate::error::EngineError;
use crate::scheduler::Drafts;
use crate::sequence::Sequence;
use model::DraftModel;
use std::collections::HashSet;
use triptych_models::decoder::{Decoder, DecoderInfo};

/// Makes guesses.
pub struct Drafter {
    speculation: Speculation,
    vocab: usize,
    model: Option<DraftModel>,
}

impl Drafter {
    /// One that guesses as it is told, for a model with so many tokens.
    pub fn new(speculation: Speculation, vocab: usize) -> Self {
        Self { speculation, vocab, model: None }
    }

    /// Takes a draft model into its service.
    ///
    /// # Errors
    /// [`EngineError`] for one that does not fit the model, or memory that cannot be had.
    pub fn hire(
        &mut self,
        decoder: Box<dyn Decoder>,
        kv: KvBudget,
        target: &DecoderInfo,
    ) -> Result<(), EngineError> {
        self.model = Some(DraftModel::new(decoder, kv, target)?);
        Ok(())
    }

    /// Tokens that may follow those of each sequence; none for some.
    pub fn propose<'a>(&mut self, sequences: impl Iterator<Item = &'a Sequence>) -> Drafts {
        let sequences = sequences.filter(|s| s.is_greedy());
        let mut drafts: Drafts = match (self.speculation, &mut self.model) {
            (Speculation::PromptLookup(lookup), _) => {
                sequences.map(|s| (s.id(), look_up(lookup, s))).collect()
            }
            (Speculation::DraftModel { n_tokens }, Some(model)) => {
                model.propose(&sequences.collect::<Vec<_>>(), n_tokens)
            }
            _ => Drafts::new(),
        };
        for guess in drafts.values_mut() {
            // What was looked up may be placeholders of an item, which may lie outside the vocabulary.
            let n_known = guess.iter().take_while(|token| (**token as usize) < self.vocab).count();
            guess.truncate(n_known);
        }
        drafts
    }
}

fn look_up(lookup: PromptLookup, sequence: &Sequence) -> Vec<u32> {
    // A guessed end token does no harm: the answer ends with it, or it is wrong.
    let ends: HashSet<u32> = HashSet::new();
    lookup.propose(sequence.tokens(0), sequence.limit(), &ends).to_vec()
}
