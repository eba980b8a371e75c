//! One answer in the writing: rules, choice, text, and the question whether it ends here.
//!
//! It sees logits and the tokens so far; blocks and batches are not its matter.

use crate::output::{ChosenToken, Delta};
use crate::request::Arrival;
use crate::sampler::{SampleError, Sampler, logprobs};
use crate::writer::{Writer, Written};
use std::sync::Arc;
use triptych_core::sampling::{FinishReason, TokenLogprob};
use triptych_models::rules::LogitRules;
use triptych_models::tokenization::Tokenizer;

/// The state of an answer.
#[derive(Debug)]
pub struct Answer {
    tokenizer: Arc<Tokenizer>,
    rules: LogitRules,
    sampler: Sampler,
    writer: Writer,
    /// Alternatives to report; `None`: no log-probabilities.
    n_top: Option<usize>,
    /// Empty when the model's end is to be ignored.
    end_tokens: Vec<u32>,
    max_tokens: usize,
    no_speech_prob: Option<f32>,
    end_logprob: Option<f32>,
}

/// What one more token brought.
#[derive(Debug)]
pub struct Progress {
    /// The token.
    pub token: u32,
    /// What to send of it.
    pub delta: Delta,
    /// Set when the answer ends with it.
    pub end: Option<FinishReason>,
}

impl Answer {
    /// An empty answer, the one at place `choice` of the arrival's.
    pub fn new(arrival: &Arrival, choice: u32, tokenizer: Arc<Tokenizer>) -> Self {
        let params = &arrival.sampling;
        let end_tokens = match params.ignore_eos {
            true => Vec::new(),
            false => arrival.prepared.end_tokens.clone(),
        };
        Self {
            rules: arrival.prepared.rules.clone(),
            sampler: Sampler::new(params, choice),
            writer: Writer::new(Arc::clone(&tokenizer), params.stop.clone()),
            n_top: params.logprobs.map(|n| n as usize),
            end_tokens,
            max_tokens: params.max_tokens.map_or(usize::MAX, |n| n as usize),
            no_speech_prob: None,
            end_logprob: None,
            tokenizer,
        }
    }

    /// Probability of "no speech" at the first free position, once that was reached.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.no_speech_prob
    }

    /// Log-probability of the end token, if it came and log-probabilities were asked for.
    pub fn end_logprob(&self) -> Option<f32> {
        self.end_logprob
    }

    /// Chooses the token after `generated` from `logits [vocab]`, which the rules change in place.
    ///
    /// # Errors
    /// [`SampleError`] if nothing can be chosen.
    pub fn advance(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<Progress, SampleError> {
        // Before the rules: they usually suppress this token.
        if let Some(rule) = self.rules.no_speech.filter(|rule| generated.len() == rule.step) {
            self.no_speech_prob = Some(logprobs(logits, rule.token, 0).chosen.exp());
        }
        self.rules.apply(generated, logits);
        let token = self.sampler.choose(logits, generated.len())?;
        if self.end_tokens.contains(&token) {
            self.end_logprob = self.n_top.map(|_| logprobs(logits, token, 0).chosen);
            let (text, _) = self.flush();
            let delta = Delta { text, ..Delta::default() };
            return Ok(Progress { token, delta, end: Some(FinishReason::Stop) });
        }
        let logprobs = self.n_top.map(|n_top| self.describe(logits, token, n_top));
        let (text, end) = match self.writer.push(token) {
            Written::Stopped(text) => (text, Some(FinishReason::Stop)),
            Written::More(text) if generated.len() + 1 >= self.max_tokens => {
                let (rest, reason) = self.flush();
                (text + &rest, Some(reason))
            }
            Written::More(text) => (text, None),
        };
        let delta = Delta { text, token_ids: vec![token], logprobs: logprobs.into_iter().collect() };
        Ok(Progress { token, delta, end })
    }

    /// Ends the text where it is; the reason is `Length` unless its last bytes complete a stop string.
    pub fn flush(&mut self) -> (String, FinishReason) {
        match self.writer.finish() {
            Written::More(text) => (text, FinishReason::Length),
            Written::Stopped(text) => (text, FinishReason::Stop),
        }
    }

    fn describe(&self, logits: &[f32], token: u32, n_top: usize) -> ChosenToken {
        let named = |token_id: u32, logprob: f32| {
            let text = self.tokenizer.token_text(token_id);
            TokenLogprob { token_id, text, logprob }
        };
        let found = logprobs(logits, token, n_top);
        let top = found.top.into_iter().map(|(token, logprob)| named(token, logprob)).collect();
        ChosenToken { chosen: named(token, found.chosen), top }
    }
}
