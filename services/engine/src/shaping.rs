//! What may be chosen next: the settings' processors, then the grammar, then the family's rules.
//!
//! One for each sequence of tokens that is being written; a fork takes a copy along. Like its parts it is a
//! function of the tokens so far and loses nothing by preemption. A token that the family forces is beyond every
//! setting: at its place only the family's rules count.

use crate::processors::Processors;
use crate::request::Arrival;
use crate::sampler::logprobs;
use std::sync::Arc;
use triptych_models::rules::LogitRules;
use triptych_models::tokenization::Tokenizer;

/// How the logits of one sequence are changed before a choice.
#[derive(Clone, Debug)]
pub struct Shaping {
    prompt: Arc<[u32]>,
    processors: Processors,
    rules: LogitRules,
    no_speech_prob: Option<f32>,
}

impl Shaping {
    /// Of a sequence that has written nothing. `ends` are the tokens that end it.
    pub fn new(arrival: &Arrival, ends: &[u32], tokenizer: &Tokenizer) -> Self {
        let bad_words = arrival.sampling.bad_words.iter().flat_map(|word| spellings(word, tokenizer));
        Self {
            prompt: arrival.prepared.tokens.as_slice().into(),
            processors: Processors::new(&arrival.sampling, bad_words.collect(), ends.to_vec()),
            rules: arrival.prepared.rules.clone(),
            no_speech_prob: None,
        }
    }

    /// Changes `logits [vocab]` of the token after `written`.
    pub fn apply(&mut self, written: &[u32], logits: &mut [f32]) {
        // Before everything else: the rules usually suppress this token.
        if let Some(rule) = self.rules.no_speech.filter(|rule| written.len() == rule.step) {
            self.no_speech_prob = Some(logprobs(logits, rule.token, 0).chosen.exp());
        }
        if written.len() >= self.rules.steps.len() {
            self.processors.apply(&self.prompt, written, logits);
        }
        self.rules.apply(written, logits);
    }

    /// Probability of "no speech", once the place where it is read was reached.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.no_speech_prob
    }
}

/// The tokens of a word at the start of a text and within one. A text without tokens is never written anyway.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let texts = [word.to_owned(), format!(" {}", word.trim_start())];
    let mut found: Vec<_> = texts.iter().filter_map(|text| tokenizer.encode_plain(text).ok()).collect();
    found.dedup();
    found
}
