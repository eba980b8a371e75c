//! Tokens guessed ahead, and how many of a guess hold.
//!
//! A guess costs one step with more rows instead of several steps, and changes no answer: what is kept is what
//! the model would have chosen token by token. Prompt lookup guesses that what followed the last few tokens
//! earlier follows them again, as transformers' `PromptLookupCandidateGenerator` does
//! (<https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/candidate_generator.py>).
//! It knows neither models nor caches; a draft model's guesses go through [`accept`] all the same.

use std::collections::HashSet;
use std::hash::BuildHasher;

/// How to look a continuation up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// Tokens to guess at most.
    pub n_tokens: usize,
    /// Longest run of last tokens to look for; shorter ones are tried after it.
    pub max_ngram: usize,
}

impl PromptLookup {
    /// What followed the first earlier place of the longest run that `tokens` end with: at most as many tokens
    /// as are left before `max_length` tokens in all, less the one that the model adds by itself, and none from
    /// an end token on. Empty when nothing was found. O(tokens · max_ngram).
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
            // A place that ends with the tokens themselves has nothing after it.
            let found = tokens[..before.len() + n - 1].windows(n).position(|w| w == run);
            if let Some(start) = found.map(|at| at + n) {
                let guess = &tokens[start..tokens.len().min(start + room)];
                let end = guess.iter().position(|t| ends.contains(t)).unwrap_or(guess.len());
                return &guess[..end];
            }
        }
        &[]
    }
}

/// How many tokens of a guess hold: `chosen[i]` is the token chosen after the first `i` of them. The next
/// token of the answer is then `chosen` at that place, which is always there: `chosen` has one more than `draft`.
pub fn accept(draft: &[u32], chosen: &[u32]) -> usize {
    draft.iter().zip(chosen).take_while(|(guess, token)| guess == token).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[u32], (n_tokens, max_ngram): (usize, usize), max_length: usize, expect: &[u32]) {
        let ends = HashSet::from([99]);
        assert_eq!(
            PromptLookup { n_tokens, max_ngram }.propose(tokens, max_length, &ends),
            expect,
            "{tokens:?}"
        );
    }

    #[test]
    fn the_longest_run_and_its_first_place_decide() {
        check(&[1, 2, 3, 9, 2, 4, 1, 2], (2, 2), 100, &[3, 9]);
        check(&[1, 2, 3, 9, 2, 4, 5, 2], (2, 2), 100, &[3, 9]);
        check(&[5, 2, 3, 1, 2, 4, 1, 2], (2, 1), 100, &[3, 1]);
        check(&[7, 7, 7], (5, 2), 100, &[7]);
        check(&[1, 2, 3], (5, 2), 100, &[]);
    }

    #[test]
    fn a_guess_stops_at_an_end_token_and_at_the_room_there_is() {
        check(&[1, 5, 99, 6, 1], (4, 2), 100, &[5]);
        check(&[1, 99, 6, 1], (4, 2), 100, &[]);
        check(&[1, 5, 6, 7, 1], (4, 2), 8, &[5, 6]);
        check(&[1, 5, 6, 7, 1], (4, 2), 6, &[]);
        check(&[], (4, 2), 6, &[]);
    }

    #[test]
    fn what_holds_ends_with_the_first_difference() {
        assert_eq!(accept(&[1, 2, 3], &[1, 2, 9, 4]), 2);
        assert_eq!(accept(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(accept(&[5], &[1, 2]), 0);
        assert_eq!(accept(&[], &[1]), 0);
    }
}
