//! Logits processors of a request's settings: biases, penalties, and tokens ruled out.
//!
//! The order is that of transformers' `generate`
//! (<https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py>,
//! `_get_logits_processor`): bias, repetition penalty, presence and frequency penalties (OpenAI's definition;
//! transformers has none), repeated runs, bad words, least length. A family's own rules come after these
//! (`triptych_models::rules`). `tests/choosing` holds each against the reference.
//!
//! The effect is a function of the settings and the tokens so far, so preemption loses nothing. Counts are kept
//! from step to step and follow the tokens: a step costs its changes, not the vocabulary. It knows no sampler
//! and no text.

use std::collections::HashMap;
use triptych_core::sampling::SamplingParams;

/// Logits processors of one request.
#[derive(Clone, Debug)]
pub struct LogitsProcessors {
    logit_bias: Vec<(u32, f32)>,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    no_repeat_ngram_size: usize,
    /// Token runs that are never generated; none is empty.
    bad_words: Vec<Vec<u32>>,
    min_tokens: usize,
    /// Tokens that end a completion, ruled out before `min_tokens`.
    ends: Vec<u32>,
    history: History,
}

/// Counts over the tokens so far.
#[derive(Clone, Debug, Default)]
struct History {
    tokens: Vec<u32>,
    n_prompt: usize,
    /// Occurrences of each token, in all and among generated ones.
    counts: HashMap<u32, Count>,
    /// Successors of each run of `no_repeat_ngram_size - 1` tokens.
    successors: HashMap<Box<[u32]>, Vec<u32>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    all: u32,
    written: u32,
}

impl LogitsProcessors {
    /// `bad_words`: token runs that are ruled out. `ends`: tokens that end the completion.
    pub fn new(params: &SamplingParams, bad_words: Vec<Vec<u32>>, ends: Vec<u32>) -> Self {
        let is_end = |word: &Vec<u32>| matches!(word[..], [token] if ends.contains(&token));
        Self {
            logit_bias: params.logit_bias.clone(),
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            no_repeat_ngram_size: params.no_repeat_ngram_size as usize,
            bad_words: bad_words.into_iter().filter(|w| !w.is_empty() && !is_end(w)).collect(),
            min_tokens: params.min_tokens as usize,
            ends,
            history: History::default(),
        }
    }

    /// Changes `logits [vocab]` of the token after `prompt` and `written`. Tokens past the vocabulary, such as
    /// placeholders of items, are ignored.
    pub fn apply(&mut self, prompt: &[u32], written: &[u32], logits: &mut [f32]) {
        if self.counts_tokens() {
            self.history.follow(prompt, written, self.no_repeat_ngram_size);
        }
        for (token, bias) in &self.logit_bias {
            change(logits, *token, |logit| logit + bias);
        }
        self.penalise(logits);
        self.forbid_repeats(prompt, written, logits);
        for word in &self.bad_words {
            if let Some((last, before)) = word.split_last()
                && ends_with(prompt, written, before)
            {
                forbid(logits, *last);
            }
        }
        if written.len() < self.min_tokens {
            self.ends.iter().for_each(|end| forbid(logits, *end));
        }
    }

    fn counts_tokens(&self) -> bool {
        let penalties = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        penalties || self.repetition_penalty != 1.0 || self.no_repeat_ngram_size > 0
    }

    fn penalise(&self, logits: &mut [f32]) {
        let repetition = self.repetition_penalty;
        let presence = self.presence_penalty;
        if repetition == 1.0 && presence == 0.0 && self.frequency_penalty == 0.0 {
            return;
        }
        for (token, count) in &self.history.counts {
            let off = match count.written {
                0 => 0.0,
                n => presence + self.frequency_penalty * n as f32,
            };
            let repeated = |logit: f32| if logit < 0.0 { logit * repetition } else { logit / repetition };
            change(logits, *token, |logit| repeated(logit) - off);
        }
    }

    fn forbid_repeats(&self, prompt: &[u32], written: &[u32], logits: &mut [f32]) {
        let Some(n_before) = self.no_repeat_ngram_size.checked_sub(1) else { return };
        if prompt.len() + written.len() < n_before {
            return;
        }
        let tokens = &self.history.tokens;
        let banned = self.history.successors.get(&tokens[tokens.len() - n_before..]);
        banned.into_iter().flatten().for_each(|token| forbid(logits, *token));
    }
}

impl History {
    /// Follows the change from the last call's tokens to `prompt` and `written`.
    fn follow(&mut self, prompt: &[u32], written: &[u32], ngram_size: usize) {
        if self.n_prompt != prompt.len() || !self.tokens.starts_with(prompt) {
            *self = Self { n_prompt: prompt.len(), ..Self::default() };
        }
        let old = self.tokens.get(self.n_prompt..).unwrap_or_default();
        let n_same = old.iter().zip(written).take_while(|(a, b)| a == b).count();
        let n_known = self.tokens.len().min(self.n_prompt + n_same);
        while self.tokens.len() > n_known {
            self.pop(ngram_size);
        }
        for i in n_known..prompt.len() + written.len() {
            self.push(prompt.get(i).copied().unwrap_or_else(|| written[i - prompt.len()]), ngram_size);
        }
    }

    fn push(&mut self, token: u32, ngram_size: usize) {
        let is_written = u32::from(self.tokens.len() >= self.n_prompt);
        let count = self.counts.entry(token).or_default();
        *count = Count { all: count.all + 1, written: count.written + is_written };
        if let Some(before) = self.run_before(ngram_size) {
            self.successors.entry(before).or_default().push(token);
        }
        self.tokens.push(token);
    }

    fn pop(&mut self, ngram_size: usize) {
        let Some(token) = self.tokens.pop() else { return };
        let is_written = u32::from(self.tokens.len() >= self.n_prompt);
        if let Some(count) = self.counts.get_mut(&token) {
            *count = Count { all: count.all - 1, written: count.written - is_written };
            if count.all == 0 {
                self.counts.remove(&token);
            }
        }
        if let Some(after) = self.run_before(ngram_size).and_then(|run| self.successors.get_mut(&run)) {
            after.pop();
        }
    }

    /// The run before a token that would be appended.
    fn run_before(&self, ngram_size: usize) -> Option<Box<[u32]>> {
        let start = self.tokens.len().checked_sub(ngram_size.checked_sub(1)?)?;
        Some(self.tokens[start..].into())
    }
}

/// True if `prompt` and `written`, one after the other, end with `run`.
fn ends_with(prompt: &[u32], written: &[u32], run: &[u32]) -> bool {
    match run.len().checked_sub(written.len()) {
        None | Some(0) => written.ends_with(run),
        Some(n_before) => run.ends_with(written) && prompt.ends_with(&run[..n_before]),
    }
}

fn change(logits: &mut [f32], token: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = to(*logit);
    }
}

fn forbid(logits: &mut [f32], token: u32) {
    change(logits, token, |_| f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn processors(params: SamplingParams) -> LogitsProcessors {
        LogitsProcessors::new(&params, vec![vec![1, 2]], vec![5])
    }

    #[test]
    fn tokens_past_the_vocabulary_are_ignored() {
        let params = SamplingParams {
            logit_bias: vec![(900, 5.0)],
            repetition_penalty: 2.0,
            frequency_penalty: 1.0,
            no_repeat_ngram_size: 1,
            min_tokens: 3,
            ..SamplingParams::default()
        };
        let mut logits = [1.0; 3];
        processors(params).apply(&[1, 151_655, u32::MAX], &[u32::MAX], &mut logits);
        assert_eq!(logits, [1.0, f32::NEG_INFINITY, 1.0]);
    }

    #[test]
    fn bad_words_match_over_the_end_of_the_prompt() {
        let check = |prompt: &[u32], written: &[u32], expect: bool| {
            let mut logits = [0.0; 4];
            processors(SamplingParams::default()).apply(prompt, written, &mut logits);
            assert_eq!(logits[2] == f32::NEG_INFINITY, expect, "{prompt:?} {written:?}");
        };
        check(&[0, 1], &[], true);
        check(&[0], &[1], true);
        check(&[1], &[0], false);
        check(&[], &[], false);
    }

    proptest! {
        /// Beams, rejected drafts and preemption lead from any tokens to any others.
        #[test]
        fn what_was_seen_before_does_not_matter(
            prompt in prop::collection::vec(0u32..4, 0..5),
            completions in prop::collection::vec(prop::collection::vec(0u32..4, 0..12), 1..6),
            size in 0u32..4,
        ) {
            let params = SamplingParams {
                repetition_penalty: 1.5,
                presence_penalty: 0.5,
                frequency_penalty: 0.25,
                no_repeat_ngram_size: size,
                ..SamplingParams::default()
            };
            let mut kept = processors(params.clone());
            for written in &completions {
                let (mut actual, mut expected) = ([1.0, -1.0, 2.0, -2.0], [1.0, -1.0, 2.0, -2.0]);
                kept.apply(&prompt, written, &mut actual);
                processors(params.clone()).apply(&prompt, written, &mut expected);
                prop_assert_eq!(actual, expected);
            }
        }
    }
}
