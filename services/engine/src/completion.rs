//! State of one sampled completion: token choice, text, and its end.
//!
//! It says what the back end shall choose by, or sees the row of logits where that cannot be said, and is handed the
//! tokens so far; it does not know blocks and batches.

use crate::detokenize::{DecodedText, StopDetokenizer, Stops};
use crate::logits_pipeline::{LogitsChanges, LogitsPipeline};
use crate::output::{ChosenToken, Delta};
use crate::request::{Resumed, SequenceRequest};
use crate::sampler::Sampler;
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::sampling::{FinishReason, PromptToken, RankedToken, SamplingParams, TokenLogprob};
use triptych_models::sampling::{Choice, ChooseRow, SampleError, TokenLogprobs, choose, logprobs};
use triptych_models::tokenization::Tokenizer;

/// State of a sampled completion.
#[derive(Clone, Debug)]
pub struct Completion {
    tokenizer: Arc<Tokenizer>,
    pipeline: LogitsPipeline,
    sampler: Sampler,
    detokenizer: StopDetokenizer,
    /// Number of alternatives to report; `None`: no log-probabilities.
    n_top: Option<usize>,
    /// Number of alternatives to report beside each token of the prompt.
    n_prompt_top: usize,
    /// Tokens that end the completion.
    ends: Vec<u32>,
    /// Those of them that are part of its text.
    shown_ends: Vec<u32>,
    min_tokens: usize,
    max_tokens: usize,
    /// Prompt to echo, until it was sent before the first token.
    echo: Option<Vec<u32>>,
    end_logprob: Option<f32>,
    /// Bytes of the next text that the client has already.
    n_sent: usize,
}

/// State of a completion that another worker began.
#[derive(Debug)]
pub struct ResumedState {
    /// Generated text that the client does not have yet.
    pub delta: Delta,
    /// Set when the generated tokens end the completion.
    pub end: Option<FinishReason>,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
}

/// Result of one chosen token.
#[derive(Debug)]
pub struct NextToken {
    /// Chosen token.
    pub token: u32,
    /// Output to send.
    pub delta: Delta,
    /// Set when the completion ends with it.
    pub end: Option<FinishReason>,
}

impl Completion {
    /// An empty completion, number `choice` of the request. `room`: tokens that the context leaves after the
    /// prompt.
    pub fn new(request: &SequenceRequest, choice: u32, room: usize, tokenizer: Arc<Tokenizer>) -> Self {
        let params = &request.sampling;
        let ends = ends_of(request);
        let max_tokens = most_tokens(params).min(room);
        Self {
            pipeline: LogitsPipeline::new(request, &ends, max_tokens, &tokenizer),
            sampler: Sampler::new(params, choice),
            detokenizer: StopDetokenizer::new(Arc::clone(&tokenizer), Stops::of(params)),
            n_top: params.logprobs.map(|n| n as usize),
            n_prompt_top: params.prompt_logprobs.unwrap_or(0) as usize,
            ends,
            shown_ends: if params.include_stop { params.stop_token_ids.clone() } else { Vec::new() },
            min_tokens: params.min_tokens as usize,
            max_tokens,
            echo: params.echo.then(|| request.prepared.tokens.clone()),
            end_logprob: None,
            n_sent: 0,
            tokenizer,
        }
    }

    /// An empty completion of the same request as this one, number `choice` of it. They share what they only read.
    pub fn for_choice(&self, params: &SamplingParams, choice: u32) -> Self {
        Self { sampler: Sampler::new(params, choice), ..self.clone() }
    }

    /// Replays the tokens that another worker generated. Afterwards the state is as if it had chosen them
    /// itself; text that the client has is not sent again.
    ///
    /// # Errors
    /// Tokens that do not fit the request's grammar, or a text length that does not fit the tokens.
    pub fn resume(&mut self, resumed: &Resumed) -> Result<ResumedState, Failure> {
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
            // The client has all of it. Without an end in the tokens, an end token ended it, which is not among
            // them.
            n_generated += usize::from(end.is_none());
            return Ok(ResumedState {
                delta: Delta::default(),
                end: end.or(Some(FinishReason::Stop)),
                n_generated,
            });
        }
        self.n_sent = resumed.text_len;
        let text = self.unsent(text)?;
        Ok(ResumedState { delta: Delta { text, ..Delta::default() }, end, n_generated })
    }

    /// Drops the part of a text that the client has.
    fn unsent(&mut self, mut text: String) -> Result<String, Failure> {
        let n = self.n_sent.min(text.len());
        if !text.is_char_boundary(n) {
            let message = "the text of a resumed completion ends within a character";
            return Err(Failure::invalid(message).with_param("resume"));
        }
        self.n_sent -= n;
        Ok(text.split_off(n))
    }

    /// Probability of "no speech", after the step that it is read at.
    pub fn no_speech_prob(&self) -> Option<f32> {
        self.pipeline.no_speech_prob()
    }

    /// Log-probability of the end token, if it was chosen and log-probabilities were asked for.
    pub fn end_logprob(&self) -> Option<f32> {
        self.end_logprob
    }

    /// The choice of the token after `generated`, from row `row` of logits `[vocab]`. `None` if it needs the whole row.
    pub fn request(&mut self, generated: &[u32], row: u32, vocab: usize) -> Option<ChooseRow> {
        let LogitsChanges { edits, mask } = self.pipeline.changes(generated, vocab)?;
        let sampling = self.sampler.settings(generated.len());
        let n_top = self.n_top.map(|n_top| u32::try_from(n_top).unwrap_or(u32::MAX));
        Some(ChooseRow { row, sampling, edits, mask, n_top })
    }

    /// True if it ends with the token after `n_generated`, whatever that is.
    pub fn ends_after(&self, n_generated: usize) -> bool {
        n_generated + 1 >= self.max_tokens
    }

    /// True if [`Self::request`] depends on the number of tokens alone, not on the tokens.
    pub fn is_by_count(&self) -> bool {
        self.pipeline.is_by_count()
    }

    /// Chooses the token after `generated` from its whole row, `logits [vocab]`, which are changed in place.
    ///
    /// # Errors
    /// As [`Self::accept`], and a grammar that exceeds a limit on work.
    pub fn advance(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<NextToken, Failure> {
        self.pipeline.apply(generated, logits)?;
        let chosen = choose(logits, &self.sampler.settings(generated.len()));
        let described =
            |token| Choice { token, logprobs: self.n_top.map(|n_top| logprobs(logits, token, n_top)) };
        self.accept(generated, &chosen.map(described))
    }

    /// Appends the token after `generated` that was chosen as [`Self::request`] asked.
    ///
    /// # Errors
    /// Nothing can be chosen: as [`LogitsPipeline::blame`] has it.
    pub fn accept(
        &mut self,
        generated: &[u32],
        chosen: &Result<Choice, SampleError>,
    ) -> Result<NextToken, Failure> {
        let Choice { token, logprobs } = chosen.as_ref().map_err(|error| self.pipeline.blame(*error))?;
        let token = *token;
        let mut delta = self.echoed();
        let mut end = Some(FinishReason::Stop);
        if self.ends.contains(&token) {
            self.end_logprob = logprobs.as_ref().map(|found| found.chosen);
            if self.shown_ends.contains(&token) {
                delta.text.push_str(&self.detokenizer.pass(token));
            }
            delta.text.push_str(&self.rest().0);
        } else {
            delta.logprobs.extend(logprobs.as_ref().map(|found| describe(&self.tokenizer, token, found)));
            delta.token_ids.push(token);
            let (text, ends) = self.take(generated, token)?;
            delta.text.push_str(&text);
            end = ends;
        }
        delta.text = self.unsent(delta.text)?;
        Ok(NextToken { token, delta, end })
    }

    /// Appends a token that is not an end token; returns its text, and the reason if the completion ends with
    /// it.
    fn take(&mut self, generated: &[u32], token: u32) -> Result<(String, Option<FinishReason>), Failure> {
        let n_written = generated.len() + 1;
        let written = match n_written < self.min_tokens {
            true => DecodedText::More(self.detokenizer.pass(token)),
            false => self.detokenizer.push(token),
        };
        Ok(match written {
            DecodedText::Stopped(text) => (text, Some(FinishReason::Stop)),
            DecodedText::More(text) if self.pipeline.completes(generated, token)? => {
                (text + &self.rest().0, Some(FinishReason::Stop))
            }
            DecodedText::More(text) if n_written >= self.max_tokens => {
                let (rest, reason) = self.rest();
                (text + &rest, Some(reason))
            }
            DecodedText::More(text) => (text, None),
        })
    }

    /// Ends the text where it is; the reason is `Length` unless its last bytes complete a stop string.
    ///
    /// # Errors
    /// For a resumed completion, a text length of the client that ends within a character.
    pub fn flush(&mut self) -> Result<(String, FinishReason), Failure> {
        let (text, reason) = self.rest();
        Ok((self.unsent(text)?, reason))
    }

    fn rest(&mut self) -> (String, FinishReason) {
        match self.detokenizer.finish() {
            DecodedText::More(text) => (text, FinishReason::Length),
            DecodedText::Stopped(text) => (text, FinishReason::Stop),
        }
    }

    /// Log-probabilities of a token of the prompt by `logits [vocab]` of the one before it.
    pub fn score(&self, token: u32, logits: &[f32]) -> PromptToken {
        score(&self.tokenizer, token, logits, self.n_prompt_top)
    }

    /// The prompt to echo, once.
    fn echoed(&mut self) -> Delta {
        let prompt = self.echo.take().unwrap_or_default();
        Delta { text: self.tokenizer.decode(&prompt), token_ids: prompt, ..Delta::default() }
    }
}

/// Tokens that end a completion and are not part of it: the model's, unless they are ignored, and the request's.
pub(crate) fn ends_of(request: &SequenceRequest) -> Vec<u32> {
    let own = match request.sampling.ignore_eos {
        true => &[],
        false => request.prepared.end_tokens.as_slice(),
    };
    let mut ends = [own, request.sampling.stop_token_ids.as_slice()].concat();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Most tokens of a completion.
pub(crate) fn most_tokens(params: &SamplingParams) -> usize {
    params.max_tokens.map_or(usize::MAX, |n| n as usize)
}

/// A token of the prompt and the most probable ones at its place, with their ranks.
fn score(tokenizer: &Tokenizer, token: u32, logits: &[f32], n_top: usize) -> PromptToken {
    let found = logprobs(logits, token, n_top);
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let n_better = logits.iter().filter(|logit| **logit > own).count();
    let ranked = |token, logprob, n_better: usize| RankedToken {
        logprob: named(tokenizer, token, logprob),
        rank: u32::try_from(n_better + 1).unwrap_or(u32::MAX),
    };
    let top = (0..).zip(&found.top).map(|(i, (token, logprob))| ranked(*token, *logprob, i));
    PromptToken(std::iter::once(ranked(token, found.chosen, n_better)).chain(top).collect())
}

/// A token's log-probability with its text.
fn named(tokenizer: &Tokenizer, token_id: u32, logprob: f32) -> TokenLogprob {
    let text = tokenizer.token_text(token_id);
    let bytes = tokenizer.token_bytes(token_id).unwrap_or_else(|| text.clone().into_bytes());
    TokenLogprob { token_id, text, bytes, logprob }
}

/// A chosen token and its best alternatives, with their texts.
pub(crate) fn describe(tokenizer: &Tokenizer, token: u32, found: &TokenLogprobs) -> ChosenToken {
    let named = |token_id: u32, logprob: f32| named(tokenizer, token_id, logprob);
    let top = found.top.iter().map(|(token, logprob)| named(*token, *logprob)).collect();
    ChosenToken { chosen: named(token, found.chosen), top }
}
