//! Logits processors of a request's settings: biases, penalties, and tokens ruled out.
//!
//! The order is that of transformers' `generate`
//! (<https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py>,
//! `_get_logits_processor`): bias, repetition penalty, presence and frequency penalties (OpenAI's definition;
//! transformers has none), repeated n-grams, those of the encoder's text, bad words, least length. A family's own rules come after these
//! (`triptych_models::rules`). `tests/choosing` holds each against the reference.
//!
//! The effect is a function of the settings and the tokens so far, so preemption loses nothing. Counts are kept
//! from step to step and follow the tokens: a step costs its changes, not the vocabulary. It knows no sampler
//! and no text.

use crate::ngrams::{Ngrams, PromptNgrams};
use std::collections::HashMap;
use std::sync::Arc;
use triptych_core::sampling::SamplingParams;
use triptych_models::sampling::Edit;

/// Logits processors of one completion. A clone shares what only the request decides.
#[derive(Clone, Debug)]
pub struct LogitsProcessors {
    request: Arc<RequestProcessors>,
    written: Vec<u32>,
    /// Occurrences of each token of the completion; kept only where a penalty needs them.
    counts: HashMap<u32, u32>,
    /// Kept only where repeated n-grams are ruled out.
    ngrams: Option<Ngrams>,
}

/// Settings and prompt, the same for all completions of a request.
#[derive(Debug)]
struct RequestProcessors {
    logit_bias: Vec<(u32, f32)>,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    /// Token runs that are never generated; none is empty.
    bad_words: Vec<Vec<u32>>,
    min_tokens: usize,
    /// Tokens that end a completion, ruled out before `min_tokens`.
    ends: Vec<u32>,
    prompt: Arc<[u32]>,
    /// Each token of the prompt once, ascending; empty without a repetition penalty.
    prompt_tokens: Vec<u32>,
}

/// Tokens that the processors of a request read.
#[derive(Clone, Copy, Debug, Default)]
pub struct GivenTokens<'a> {
    /// The decoder's prompt.
    pub prompt: &'a [u32],
    /// The encoder's text, or the prompt of a model without an encoder; empty: none.
    pub encoder: &'a [u32],
}

impl LogitsProcessors {
    /// Processors of an empty completion. `bad_words`: token runs that are ruled out. `ends`: tokens that end
    /// the completion.
    pub fn new(
        params: &SamplingParams,
        bad_words: Vec<Vec<u32>>,
        ends: Vec<u32>,
        given: GivenTokens<'_>,
    ) -> Self {
        let is_end = |word: &Vec<u32>| matches!(word[..], [token] if ends.contains(&token));
        let mut prompt_tokens = Vec::new();
        if params.repetition_penalty != 1.0 {
            prompt_tokens.extend_from_slice(given.prompt);
            prompt_tokens.sort_unstable();
            prompt_tokens.dedup();
        }
        let sizes = [params.no_repeat_ngram_size, params.encoder_no_repeat_ngram_size];
        let ngrams = || Ngrams::new(Arc::new(PromptNgrams::new(given.prompt, given.encoder, sizes)));
        Self {
            ngrams: (sizes != [0, 0]).then(ngrams),
            written: Vec::new(),
            counts: HashMap::new(),
            request: Arc::new(RequestProcessors {
                logit_bias: params.logit_bias.clone(),
                repetition_penalty: params.repetition_penalty,
                presence_penalty: params.presence_penalty,
                frequency_penalty: params.frequency_penalty,
                bad_words: bad_words.into_iter().filter(|w| !w.is_empty() && !is_end(w)).collect(),
                min_tokens: params.min_tokens as usize,
                ends,
                prompt: given.prompt.into(),
                prompt_tokens,
            }),
        }
    }

    /// True if the changes depend on the number of tokens alone, not on the tokens.
    pub fn is_by_count(&self) -> bool {
        let request = &self.request;
        !request.has_penalties()
            && self.ngrams.is_none()
            && request.bad_words.iter().all(|word| word.len() == 1)
    }

    /// Changes `logits [vocab]` of the token after the prompt and `written`, as [`Self::edits`] has them.
    pub fn apply(&mut self, written: &[u32], logits: &mut [f32]) {
        let mut edits = Vec::new();
        self.edits(written, logits.len(), &mut edits);
        edits.iter().for_each(|edit| edit.apply(logits));
    }

    /// Appends the changes of the logits `[vocab]` of the token after the prompt and `written`, in their order. Tokens past
    /// the vocabulary, such as placeholders of items, are ignored where they are applied.
    pub fn edits(&mut self, written: &[u32], vocab: usize, edits: &mut Vec<Edit>) {
        let request = Arc::clone(&self.request);
        if request.has_penalties() || self.ngrams.is_some() {
            self.follow(written);
        }
        edits.extend(request.logit_bias.iter().map(|(token, bias)| Edit::bias(*token, *bias)));
        request.penalise(&self.counts, edits);
        if let Some(ngrams) = &self.ngrams {
            ngrams.forbidden(vocab, |token| edits.push(Edit::forbid(token)));
        }
        for word in &request.bad_words {
            if let Some((last, before)) = word.split_last()
                && ends_with(&request.prompt, written, before)
            {
                edits.push(Edit::forbid(*last));
            }
        }
        if written.len() < request.min_tokens {
            edits.extend(request.ends.iter().map(|end| Edit::forbid(*end)));
        }
    }

    /// Follows the change from the last call's tokens to `written`.
    fn follow(&mut self, written: &[u32]) {
        let n_same = self.written.iter().zip(written).take_while(|(a, b)| a == b).count();
        while self.written.len() > n_same {
            self.pop();
        }
        written[n_same..].iter().for_each(|token| self.push(*token));
    }

    fn push(&mut self, token: u32) {
        self.written.push(token);
        if self.request.has_penalties() {
            *self.counts.entry(token).or_default() += 1;
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.push(token);
        }
    }

    fn pop(&mut self) {
        let Some(token) = self.written.pop() else { return };
        if let Some(count) = self.counts.get_mut(&token) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&token);
            }
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.pop();
        }
    }
}

impl RequestProcessors {
    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Appends the changes of the prompt's tokens and of those in `counts`, the completion's.
    fn penalise(&self, counts: &HashMap<u32, u32>, edits: &mut Vec<Edit>) {
        let repetition = self.repetition_penalty;
        edits.extend(self.prompt_tokens.iter().map(|token| Edit::penalty(*token, repetition, 0.0)));
        edits.extend(counts.iter().map(|(token, count)| {
            let off = self.presence_penalty + self.frequency_penalty * *count as f32;
            let is_done = repetition == 1.0 || self.prompt_tokens.binary_search(token).is_ok();
            Edit::penalty(*token, if is_done { 1.0 } else { repetition }, off)
        }));
    }
}

/// True if `prompt` and `written`, one after the other, end with `run`.
fn ends_with(prompt: &[u32], written: &[u32], run: &[u32]) -> bool {
    match run.len().checked_sub(written.len()) {
        None | Some(0) => written.ends_with(run),
        Some(n_before) => run.ends_with(written) && prompt.ends_with(&run[..n_before]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn processors(params: &SamplingParams, prompt: &[u32]) -> LogitsProcessors {
        let given = GivenTokens { prompt, encoder: &[3, 0, 3, 1] };
        LogitsProcessors::new(params, vec![vec![1, 2]], vec![5], given)
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
        processors(&params, &[1, 151_655, u32::MAX]).apply(&[u32::MAX], &mut logits);
        assert_eq!(logits, [1.0, f32::NEG_INFINITY, 1.0]);
    }

    #[test]
    fn bad_words_match_over_the_end_of_the_prompt() {
        let check = |prompt: &[u32], written: &[u32], expect: bool| {
            let mut logits = [0.0; 4];
            processors(&SamplingParams::default(), prompt).apply(written, &mut logits);
            assert_eq!(logits[2] == f32::NEG_INFINITY, expect, "{prompt:?} {written:?}");
        };
        check(&[0, 1], &[], true);
        check(&[0], &[1], true);
        check(&[1], &[0], false);
        check(&[], &[], false);
    }

    /// As transformers' `EncoderNoRepeatNGramLogitsProcessor`: pairs of the encoder's text, after the last token
    /// of prompt and completion.
    #[test]
    fn no_ngram_of_the_encoders_text_is_written() {
        let check = |size: u32, prompt: &[u32], written: &[u32], expect: &[u32]| {
            let params = SamplingParams { encoder_no_repeat_ngram_size: size, ..SamplingParams::default() };
            let given = GivenTokens { prompt, encoder: &[0, 1, 2, 0, 1, 3, 3] };
            let mut logits = [0.0; 5];
            LogitsProcessors::new(&params, vec![], vec![], given).apply(written, &mut logits);
            let gone: Vec<u32> = (0..5).filter(|t| logits[*t as usize] == f32::NEG_INFINITY).collect();
            assert_eq!(gone, expect, "{size} {prompt:?} {written:?}");
        };
        check(0, &[0], &[1], &[]);
        check(1, &[4], &[], &[0, 1, 2, 3]);
        check(2, &[0], &[], &[1]);
        check(2, &[0], &[1], &[2, 3]);
        check(2, &[0], &[3], &[3]);
        check(2, &[0], &[4], &[]);
        check(3, &[0], &[1], &[2, 3]);
        check(3, &[1], &[], &[]);
        check(3, &[4], &[2, 0], &[1]);
        check(7, &[0, 1, 2], &[0, 1, 3], &[3]);
        check(8, &[0, 1, 2, 0], &[1, 3, 3], &[]);
    }

    proptest! {
        /// Beams, rejected drafts and preemption lead from any tokens to any others.
        #[test]
        fn what_was_seen_before_does_not_matter(
            prompt in prop::collection::vec(0u32..4, 0..5),
            completions in prop::collection::vec(prop::collection::vec(0u32..4, 0..12), 1..6),
            sizes in [0u32..4, 0u32..4],
        ) {
            let params = SamplingParams {
                repetition_penalty: 1.5,
                presence_penalty: 0.5,
                frequency_penalty: 0.25,
                no_repeat_ngram_size: sizes[0],
                encoder_no_repeat_ngram_size: sizes[1],
                ..SamplingParams::default()
            };
            let mut kept = processors(&params, &prompt);
            for written in &completions {
                let (mut actual, mut expected) = ([1.0, -1.0, 2.0, -2.0], [1.0, -1.0, 2.0, -2.0]);
                kept.apply(written, &mut actual);
                processors(&params, &prompt).apply(written, &mut expected);
                prop_assert_eq!(actual, expected);
            }
        }
    }
}
