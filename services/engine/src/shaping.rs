//! What may be chosen next: the settings' processors, then the grammar, then the family's rules.
//!
//! One for each sequence of tokens that is being written; a fork takes a copy along. Like its parts it is a
//! function of the tokens so far and loses nothing by preemption. A token that the family forces is beyond every
//! setting: at its place only the family's rules count.

use crate::constraint::Follower;
use crate::processors::Processors;
use crate::request::Arrival;
use crate::sampler::{SampleError, logprobs};
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::sampling::SamplingParams;
use triptych_models::rules::LogitRules;
use triptych_models::tokenization::Tokenizer;

/// How the logits of one sequence are changed before a choice.
#[derive(Clone, Debug)]
pub struct Shaping {
    prompt: Arc<[u32]>,
    processors: Processors,
    grammar: Option<Follower>,
    rules: LogitRules,
    ends: Vec<u32>,
    /// Tokens that it may have at most.
    max_tokens: usize,
    /// Whether the request's settings rule tokens out.
    restricted: bool,
    no_speech_prob: Option<f32>,
}

impl Shaping {
    /// Of a sequence that has written nothing, with room for `max_tokens`. `ends` are the tokens that end it.
    pub fn new(arrival: &Arrival, ends: &[u32], max_tokens: usize, tokenizer: &Tokenizer) -> Self {
        let bad_words = arrival.sampling.bad_words.iter().flat_map(|word| spellings(word, tokenizer));
        Self {
            prompt: arrival.prepared.tokens.as_slice().into(),
            processors: Processors::new(&arrival.sampling, bad_words.collect(), ends.to_vec()),
            grammar: arrival.constraint.clone().map(Follower::new),
            rules: arrival.prepared.rules.clone(),
            ends: ends.to_vec(),
            max_tokens,
            restricted: rules_out(&arrival.sampling),
            no_speech_prob: None,
        }
    }

    /// Changes `logits [vocab]` of the token after `written`.
    ///
    /// # Errors
    /// For the client, when its grammar exceeds a limit on work.
    pub fn apply(&mut self, written: &[u32], logits: &mut [f32]) -> Result<(), Failure> {
        // Before everything else: the rules usually suppress this token.
        if let Some(rule) = self.rules.no_speech.filter(|rule| written.len() == rule.step) {
            self.no_speech_prob = Some(logprobs(logits, rule.token, 0).chosen.exp());
        }
        if written.len() + 1 >= self.max_tokens && self.rules.apply_last(logits) {
            return Ok(());
        }
        if let Some(forced) = self.rules.steps.get(written.len()) {
            self.rules.apply(written, logits);
            keep_certain(forced, logits);
            return Ok(());
        }
        self.processors.apply(&self.prompt, written, logits);
        if let (Some(grammar), Some(free)) = (&mut self.grammar, written.get(self.rules.steps.len()..)) {
            grammar.mask(free)?.apply(&self.ends, logits);
        }
        self.rules.apply(written, logits);
        Ok(())
    }

    /// Whether the grammar allows nothing after `written` and `token`: the answer is complete.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn completes(&mut self, written: &[u32], token: u32) -> Result<bool, Failure> {
        let (Some(grammar), Some(free)) = (&mut self.grammar, written.get(self.rules.steps.len()..)) else {
            return Ok(false);
        };
        grammar.is_complete(&[free, &[token]].concat())
    }

    /// A choice that could not be made: the client's doing, if its settings left nothing to choose from.
    pub fn blame(&self, error: SampleError) -> Failure {
        match error {
            SampleError::NothingAllowed { .. } if self.restricted => Failure::invalid(
                "the constraint and the other settings together allow no further token, nor an end",
            ),
            other => Failure::internal(other),
        }
    }

    /// Probability of "no speech", once the place where it is read was reached.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.no_speech_prob
    }
}

/// A token that is forced is certain, and so costs a beam nothing.
fn keep_certain(allowed: &[u32], logits: &mut [f32]) {
    if let [forced] = allowed
        && let Some(logit) = logits.get_mut(*forced as usize)
    {
        *logit = 0.0;
    }
}

fn rules_out(params: &SamplingParams) -> bool {
    params.constraint.is_some()
        || params.no_repeat_ngram_size > 0
        || !params.bad_words.is_empty()
        || params.min_tokens > 0
}

/// The tokens of a word at the start of a text and within one. A text without tokens is never written anyway.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let texts = [word.to_owned(), format!(" {}", word.trim_start())];
    let mut found: Vec<_> = texts.iter().filter_map(|text| tokenizer.encode_plain(text).ok()).collect();
    found.dedup();
    found
}
