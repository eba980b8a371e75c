//! Prompt lookup: draft tokens from an earlier occurrence of the last few tokens.
//!
//! Drafts cost one step with more rows instead of several steps, and change no completion: accepted tokens are
//! those that the model would have chosen one by one. The rule is that of transformers'
//! `PromptLookupCandidateGenerator`
//! (<https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/candidate_generator.py>).
//! It knows neither models nor caches.

use std::collections::HashSet;
use std::hash::BuildHasher;

/// Settings of prompt lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// Most draft tokens.
    pub n_tokens: usize,
    /// Longest n-gram of last tokens to look for; shorter ones are tried after it.
    pub max_ngram: usize,
}

impl PromptLookup {
    /// Tokens after the first earlier occurrence of the longest n-gram that `tokens` end with. At most as many
    /// as are left before `max_length` tokens in all, less the one that the model adds itself, and none from an
    /// end token on. Empty without an occurrence. O(tokens · max_ngram).
    pub fn propose<'a, S: BuildHasher>(
        &self,
        tokens: &'a [u32],
        max_length: usize,
        ends: &HashSet<u32, S>,
    ) -> &'a [u32] {
        let room = max_length.saturating_sub(tokens.len() + 1).min(self.n_tokens);
        if room == 0 {
            return &[];
        }
        for n in (1..=self.max_ngram.min(tokens.len().saturating_sub(1))).rev() {
            let (before, run) = tokens.split_at(tokens.len() - n);
            // An occurrence at the very end has nothing after it.
            let found = tokens[..before.len() + n - 1].windows(n).position(|w| w == run);
            if let Some(start) = found.map(|at| at + n) {
                let draft = &tokens[start..tokens.len().min(start + room)];
                let end = draft.iter().position(|t| ends.contains(t)).unwrap_or(draft.len());
                return &draft[..end];
            }
        }
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[u32], lookup: PromptLookup, max_length: usize, expect: &[u32]) {
        let ends = HashSet::from([99]);
        assert_eq!(lookup.propose(tokens, max_length, &ends), expect, "{tokens:?}");
    }

    fn lookup(n_tokens: usize, max_ngram: usize) -> PromptLookup {
        PromptLookup { n_tokens, max_ngram }
    }

    #[test]
    fn the_longest_run_and_its_first_place_decide() {
        check(&[1, 2, 3, 9, 2, 4, 1, 2], lookup(2, 2), 100, &[3, 9]);
        check(&[1, 2, 3, 9, 2, 4, 5, 2], lookup(2, 2), 100, &[3, 9]);
        check(&[5, 2, 3, 1, 2, 4, 1, 2], lookup(2, 1), 100, &[3, 1]);
        check(&[7, 7, 7], lookup(5, 2), 100, &[7]);
        check(&[1, 2, 3], lookup(5, 2), 100, &[]);
    }

    #[test]
    fn a_draft_stops_at_an_end_token_and_at_the_room_there_is() {
        check(&[1, 5, 99, 6, 1], lookup(4, 2), 100, &[5]);
        check(&[1, 99, 6, 1], lookup(4, 2), 100, &[]);
        check(&[1, 5, 6, 7, 1], lookup(4, 2), 8, &[5, 6]);
        check(&[1, 5, 6, 7, 1], lookup(4, 2), 6, &[]);
        check(&[], lookup(4, 2), 6, &[]);
    }
}
