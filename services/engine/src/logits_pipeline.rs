//! Changes to logits before a choice: the request's processors, then the grammar, then the family's rules.
//!
//! One for each branch of tokens; a fork takes a copy along. It is a function of the tokens so far, so
//! preemption loses nothing. Where all changes can be said before the logits are there, the back end makes them and
//! chooses; otherwise the row of logits is changed here. A token that the family forces overrides every setting: at its step only the
//! family's rules apply.

use crate::constraint::GrammarMatcher;
use crate::logits_processors::{GivenTokens, LogitsProcessors};
use crate::request::SequenceRequest;
use std::sync::Arc;
use triptych_core::sampling::SamplingParams;
use triptych_core::{Failure, FailureClass};
use triptych_models::rules::LogitRules;
use triptych_models::sampling::{Edit, SampleError, logprobs, mask_of};
use triptych_models::tokenization::Tokenizer;

/// Logits processors, grammar and family rules of one branch. A clone shares what only the request decides.
#[derive(Clone, Debug)]
pub struct LogitsPipeline {
    processors: LogitsProcessors,
    grammar: Option<GrammarMatcher>,
    rules: LogitRules,
    ends: Vec<u32>,
    /// Most tokens of the completion.
    max_tokens: usize,
    /// The only tokens that the request allows; empty: all.
    allowed: Arc<[u32]>,
    /// The same as a mask, once it was needed.
    allowed_mask: Option<Arc<[u32]>>,
    /// True if the request's settings rule tokens out.
    restricted: bool,
    no_speech_prob: Option<f32>,
}

/// Changes of a row of logits that are known before it is computed.
#[derive(Clone, Debug, Default)]
pub struct LogitsChanges {
    /// Changes of single tokens, in their order.
    pub edits: Vec<Edit>,
    /// A bit for each token that stays; `None`: all.
    pub mask: Option<Arc<[u32]>>,
}

impl LogitsPipeline {
    /// For a sequence without generated tokens, with room for `max_tokens`. `ends`: tokens that end it.
    pub fn new(request: &SequenceRequest, ends: &[u32], max_tokens: usize, tokenizer: &Tokenizer) -> Self {
        let bad_words = request.sampling.bad_words.iter().flat_map(|word| spellings(word, tokenizer));
        let prompt = request.prepared.tokens.as_slice();
        let given = GivenTokens { prompt, encoder: &request.encoder_tokens };
        Self {
            processors: LogitsProcessors::new(&request.sampling, bad_words.collect(), ends.to_vec(), given),
            grammar: request.constraint.clone().map(GrammarMatcher::new),
            rules: request.prepared.rules.clone(),
            ends: ends.to_vec(),
            max_tokens,
            allowed: request.sampling.allowed_token_ids.as_slice().into(),
            allowed_mask: None,
            restricted: rules_out(&request.sampling),
            no_speech_prob: None,
        }
    }

    /// Changes of the logits `[vocab]` of the token after `written`; `None` if they depend on the logits, or on a grammar:
    /// then [`Self::apply`] makes them.
    pub fn changes(&mut self, written: &[u32], vocab: usize) -> Option<LogitsChanges> {
        let rules = &self.rules;
        let is_read = rules.no_speech.is_some_and(|rule| rule.step == written.len());
        let is_last = written.len() + 1 >= self.max_tokens && !rules.last.is_empty();
        if is_read || is_last {
            return None;
        }
        match rules.steps.get(written.len()) {
            // A forced token is certain, whatever its logit.
            Some(allowed) if allowed.len() == 1 => return None,
            Some(allowed) => {
                let mask = Some(mask_of(allowed, vocab));
                return Some(LogitsChanges { mask, ..LogitsChanges::default() });
            }
            None if self.grammar.is_some() || rules.timestamps.is_some() => return None,
            None => {}
        }
        let mut edits = Vec::new();
        self.processors.edits(written, vocab, &mut edits);
        edits.extend(self.rules.forbidden(written).map(Edit::forbid));
        let allowed = &self.allowed;
        let mask = || Arc::clone(self.allowed_mask.get_or_insert_with(|| mask_of(allowed, vocab)));
        Some(LogitsChanges { edits, mask: (!allowed.is_empty()).then(mask) })
    }

    /// True if [`Self::changes`] depend on the number of tokens alone, not on the tokens.
    pub fn is_by_count(&self) -> bool {
        let depends =
            self.grammar.is_some() || self.rules.timestamps.is_some() || !self.rules.bad_words.is_empty();
        !depends && self.processors.is_by_count()
    }

    /// Changes `logits [vocab]` of the token after `written`.
    ///
    /// # Errors
    /// A grammar that exceeds a limit on work.
    pub fn apply(&mut self, written: &[u32], logits: &mut [f32]) -> Result<(), Failure> {
        // First of all: the rules usually suppress this token.
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
        self.processors.apply(written, logits);
        keep_allowed(&self.allowed, logits);
        if let (Some(grammar), Some(free)) = (&mut self.grammar, written.get(self.rules.steps.len()..)) {
            grammar.mask(free)?.apply(&self.ends, logits);
        }
        self.rules.apply(written, logits);
        Ok(())
    }

    /// True if the grammar allows nothing after `written` and `token`: the completion is at its end.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn completes(&mut self, written: &[u32], token: u32) -> Result<bool, Failure> {
        let (Some(grammar), Some(free)) = (&mut self.grammar, written.get(self.rules.steps.len()..)) else {
            return Ok(false);
        };
        grammar.is_complete(&[free, &[token]].concat())
    }

    /// Failure for a choice that could not be made: invalid if the request's settings left no token, and
    /// unprocessable if the model computed no numbers for it.
    pub fn blame(&self, error: SampleError) -> Failure {
        match error {
            SampleError::NothingAllowed { .. } if self.restricted => Failure::invalid(
                "the constraint and the other settings together allow no further token, nor an end",
            ),
            SampleError::NotFinite { .. } => {
                let message = "the model computes logits that are not finite for this request";
                Failure::new(FailureClass::Unprocessable, message).with_detail(error)
            }
            SampleError::NothingAllowed { .. } => Failure::internal(error),
        }
    }

    /// Probability of "no speech", after the step that it is read at.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.no_speech_prob
    }
}

/// A forced token has probability 1, so it costs a beam nothing.
fn keep_certain(allowed: &[u32], logits: &mut [f32]) {
    if let [forced] = allowed
        && let Some(logit) = logits.get_mut(*forced as usize)
    {
        *logit = 0.0;
    }
}

/// Rules out all tokens but those of a list; an empty list rules none out.
fn keep_allowed(allowed: &[u32], logits: &mut [f32]) {
    if allowed.is_empty() {
        return;
    }
    let kept: Vec<_> =
        allowed.iter().filter_map(|id| Some((*id as usize, *logits.get(*id as usize)?))).collect();
    logits.fill(f32::NEG_INFINITY);
    for (id, logit) in kept {
        logits[id] = logit;
    }
}

fn rules_out(params: &SamplingParams) -> bool {
    params.constraint.is_some()
        || params.no_repeat_ngram_size > 0
        || params.encoder_no_repeat_ngram_size > 0
        || !params.bad_words.is_empty()
        || params.min_tokens > 0
        || !params.allowed_token_ids.is_empty()
}

/// Tokens of a word at the start of a text and within one. A word without tokens is never generated anyway.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let texts = [word.to_owned(), format!(" {}", word.trim_start())];
    let mut found: Vec<_> = texts.iter().filter_map(|text| tokenizer.encode_plain(text).ok()).collect();
    found.dedup();
    found
}
