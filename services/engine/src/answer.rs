//! One answer in the writing: choice, text, and the question whether it ends here.
//!
//! It sees logits and the tokens so far; blocks and batches are not its matter.

use crate::output::{ChosenToken, Delta};
use crate::request::{Arrival, Resumed};
use crate::sampler::{Sampler, logprobs};
use crate::shaping::Shaping;
use crate::writer::{Writer, Written};
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::sampling::{FinishReason, SamplingParams, TokenLogprob};
use triptych_models::tokenization::Tokenizer;

/// The state of an answer.
#[derive(Debug)]
pub struct Answer {
    tokenizer: Arc<Tokenizer>,
    shaping: Shaping,
    sampler: Sampler,
    writer: Writer,
    /// Alternatives to report; `None`: no log-probabilities.
    n_top: Option<usize>,
    /// Tokens that end it and are no part of it.
    ends: Vec<u32>,
    min_tokens: usize,
    max_tokens: usize,
    /// The prompt, until it went out before the first token.
    echo: Option<Vec<u32>>,
    end_logprob: Option<f32>,
    /// Bytes of its next text that the reader has already.
    n_said: usize,
}

/// Where an answer that was begun elsewhere stands.
#[derive(Debug)]
pub struct Standing {
    /// What its reader does not have yet of what is written.
    pub delta: Delta,
    /// Set when what is written ends it.
    pub end: Option<FinishReason>,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
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
    /// An empty answer, the one at place `choice` of the arrival's. `room`: tokens that the context leaves after
    /// the prompt.
    pub fn new(arrival: &Arrival, choice: u32, room: usize, tokenizer: Arc<Tokenizer>) -> Self {
        let params = &arrival.sampling;
        let ends = ends_of(arrival);
        let max_tokens = most_tokens(params).min(room);
        Self {
            shaping: Shaping::new(arrival, &ends, max_tokens, &tokenizer),
            sampler: Sampler::new(params, choice),
            writer: Writer::new(Arc::clone(&tokenizer), params.stop.clone()),
            n_top: params.logprobs.map(|n| n as usize),
            ends,
            min_tokens: params.min_tokens as usize,
            max_tokens,
            echo: params.echo.then(|| arrival.prepared.tokens.clone()),
            end_logprob: None,
            n_said: 0,
            tokenizer,
        }
    }

    /// Takes over what was written elsewhere: afterwards the answer is as if it had written that itself, and what its
    /// reader has of the text is not said again.
    ///
    /// # Errors
    /// For tokens that do not fit the request's grammar, or a text that is not theirs.
    pub fn take_over(&mut self, resumed: &Resumed) -> Result<Standing, Failure> {
        let mut text = String::new();
        if resumed.is_echoed {
            text.push_str(&self.echoed().text);
        }
        let mut end = None;
        for (i, token) in resumed.tokens.iter().enumerate() {
            let (more, ends) = self.take(&resumed.tokens[..i], *token)?;
            text.push_str(&more);
            end = ends;
            if end.is_some() {
                break;
            }
        }
        let mut n_generated = resumed.tokens.len();
        if resumed.is_ended {
            // Its reader has all of it; what ended otherwise was ended by a token that is not among its own.
            n_generated += usize::from(end.is_none());
            return Ok(Standing {
                delta: Delta::default(),
                end: end.or(Some(FinishReason::Stop)),
                n_generated,
            });
        }
        self.n_said = resumed.text_len;
        let text = self.unsaid(text)?;
        Ok(Standing { delta: Delta { text, ..Delta::default() }, end, n_generated })
    }

    /// What the reader does not have of a text.
    fn unsaid(&mut self, mut text: String) -> Result<String, Failure> {
        let n = self.n_said.min(text.len());
        if !text.is_char_boundary(n) {
            let message = "the text of a resumed answer ends within a character";
            return Err(Failure::invalid(message).with_param("resume"));
        }
        self.n_said -= n;
        Ok(text.split_off(n))
    }

    /// Probability of "no speech", once the place where it is read was reached.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.shaping.no_speech_prob()
    }

    /// Log-probability of the end token, if it came and log-probabilities were asked for.
    pub fn end_logprob(&self) -> Option<f32> {
        self.end_logprob
    }

    /// Chooses the token after `generated` from `logits [vocab]`, which are changed in place.
    ///
    /// # Errors
    /// If nothing can be chosen: by the settings' doing, which is the client's, or because of broken logits.
    pub fn advance(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<Progress, Failure> {
        self.shaping.apply(generated, logits)?;
        let chosen = self.sampler.choose(logits, generated.len());
        let token = chosen.map_err(|e| self.shaping.blame(e))?;
        let mut delta = self.echoed();
        let mut end = Some(FinishReason::Stop);
        if self.ends.contains(&token) {
            self.end_logprob = self.n_top.map(|_| logprobs(logits, token, 0).chosen);
            delta.text.push_str(&self.rest().0);
        } else {
            delta.logprobs.extend(self.n_top.map(|n_top| describe(&self.tokenizer, logits, token, n_top)));
            delta.token_ids.push(token);
            let (text, ends) = self.take(generated, token)?;
            delta.text.push_str(&text);
            end = ends;
        }
        delta.text = self.unsaid(delta.text)?;
        Ok(Progress { token, delta, end })
    }

    /// Writes a token, which is no end token: its text, and whether the answer ends with it.
    fn take(&mut self, generated: &[u32], token: u32) -> Result<(String, Option<FinishReason>), Failure> {
        let n_written = generated.len() + 1;
        let written = match n_written < self.min_tokens {
            true => Written::More(self.writer.pass(token)),
            false => self.writer.push(token),
        };
        Ok(match written {
            Written::Stopped(text) => (text, Some(FinishReason::Stop)),
            Written::More(text) if self.shaping.completes(generated, token)? => {
                (text + &self.rest().0, Some(FinishReason::Stop))
            }
            Written::More(text) if n_written >= self.max_tokens => {
                let (rest, reason) = self.rest();
                (text + &rest, Some(reason))
            }
            Written::More(text) => (text, None),
        })
    }

    /// Ends the text where it is; the reason is `Length` unless its last bytes complete a stop string.
    ///
    /// # Errors
    /// For a resumed answer, if the reader's text ends within a character.
    pub fn flush(&mut self) -> Result<(String, FinishReason), Failure> {
        let (text, reason) = self.rest();
        Ok((self.unsaid(text)?, reason))
    }

    fn rest(&mut self) -> (String, FinishReason) {
        match self.writer.finish() {
            Written::More(text) => (text, FinishReason::Length),
            Written::Stopped(text) => (text, FinishReason::Stop),
        }
    }

    /// The prompt, once.
    fn echoed(&mut self) -> Delta {
        let prompt = self.echo.take().unwrap_or_default();
        Delta { text: self.tokenizer.decode(&prompt), token_ids: prompt, logprobs: Vec::new() }
    }
}

/// Tokens that end an answer and are no part of it: the model's own, unless they are to be ignored, and the
/// request's.
pub(crate) fn ends_of(arrival: &Arrival) -> Vec<u32> {
    let own = match arrival.sampling.ignore_eos {
        true => &[],
        false => arrival.prepared.end_tokens.as_slice(),
    };
    let mut ends = [own, arrival.sampling.stop_token_ids.as_slice()].concat();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Tokens that an answer has at most.
pub(crate) fn most_tokens(params: &SamplingParams) -> usize {
    params.max_tokens.map_or(usize::MAX, |n| n as usize)
}

/// A chosen token and its best alternatives by `logits [vocab]`, after everything that changed them.
pub(crate) fn describe(tokenizer: &Tokenizer, logits: &[f32], token: u32, n_top: usize) -> ChosenToken {
    let named = |token_id: u32, logprob: f32| {
        let text = tokenizer.token_text(token_id);
        TokenLogprob { token_id, text, logprob }
    };
    let found = logprobs(logits, token, n_top);
    let top = found.top.into_iter().map(|(token, logprob)| named(token, logprob)).collect();
    ChosenToken { chosen: named(token, found.chosen), top }
}
