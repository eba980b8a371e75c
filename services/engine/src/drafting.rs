//! Guesses ahead of greedy sequences, by whatever the settings name.

use crate::config::Speculation;
use crate::scheduler::Drafts;
use crate::sequence::Sequence;
use std::collections::HashSet;

/// Makes guesses.
#[derive(Debug)]
pub struct Drafter {
    speculation: Speculation,
    vocab: usize,
}

impl Drafter {
    /// One that guesses as it is told.
    pub fn new(speculation: Speculation, vocab: usize) -> Self {
        Self { speculation, vocab }
    }

    /// Tokens that may follow those of each sequence; none for most.
    pub fn propose<'a>(&mut self, sequences: impl Iterator<Item = &'a Sequence>) -> Drafts {
        let Speculation::PromptLookup(lookup) = self.speculation else { return Drafts::new() };
        // A guessed end token does no harm: the answer ends with it, or it is wrong.
        let ends: HashSet<u32> = HashSet::new();
        let guess = |s: &Sequence| {
            let guess = lookup.propose(s.tokens(0), s.limit(), &ends);
            // What was found may be the placeholders of an item, which may lie outside the vocabulary.
            let known = guess.iter().take_while(|token| (**token as usize) < self.vocab);
            (s.id(), known.copied().collect::<Vec<u32>>())
        };
        sequences.filter(|s| s.is_greedy()).map(guess).filter(|(_, guess)| !guess.is_empty()).collect()
    }
}
