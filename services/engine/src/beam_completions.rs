//! Completions of one beam search: rules and processors of each beam, the search, and the texts at its end.
//!
//! The counterpart of `completion` for beams. It sees logits; the engine keeps the caches of the beams in step
//! with [`BeamCompletions::advance`]. Nothing is sent before the end, since any beam may still win.

use crate::beam_search::{BeamBranch, BeamSearch, BeamStep, Hypothesis};
use crate::completion::{describe, ends_of, most_tokens};
use crate::detokenize::{DecodedText, StopDetokenizer, Stops};
use crate::logits_pipeline::LogitsPipeline;
use crate::output::{ChosenToken, Delta};
use crate::request::SequenceRequest;
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::sampling::{BeamParams, FinishReason};
use triptych_models::sampling::{log_softmax, logprobs};
use triptych_models::tokenization::Tokenizer;

/// State of a beam search and its completions.
#[derive(Debug)]
pub struct BeamCompletions {
    tokenizer: Arc<Tokenizer>,
    search: BeamSearch,
    /// One for each live beam; never empty.
    pipelines: Vec<LogitsPipeline>,
    stops: Stops,
    ends: Vec<u32>,
    min_tokens: usize,
    n_completions: usize,
    /// True if processed log-probabilities are normalised again.
    renormalizes: bool,
    /// Number of alternatives to report; `None`: no log-probabilities.
    n_top: Option<usize>,
    /// Chosen tokens in the order of their branches; empty without log-probabilities.
    chosen: Vec<ChosenToken>,
    echo: Vec<u32>,
}

/// A finished completion of a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamCompletion {
    /// Its whole output.
    pub delta: Delta,
    /// Reason of its end.
    pub reason: FinishReason,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
    /// Log-probability over length to the power of the penalty.
    pub score: f32,
    /// As in [`crate::Finished`].
    pub no_speech_prob: Option<f32>,
    /// As in [`crate::Finished`].
    pub end_logprob: Option<f32>,
}

impl BeamCompletions {
    /// A search with one live beam. `room`: tokens that the context leaves after the prompt.
    pub fn new(
        request: &SequenceRequest,
        params: &BeamParams,
        room: usize,
        tokenizer: Arc<Tokenizer>,
    ) -> Self {
        let sampling = &request.sampling;
        let ends = ends_of(request);
        let max_tokens = most_tokens(sampling).min(room);
        Self {
            search: BeamSearch::new(params, &ends, max_tokens),
            pipelines: vec![LogitsPipeline::new(request, &ends, max_tokens, &tokenizer)],
            stops: Stops::of(sampling),
            ends,
            min_tokens: sampling.min_tokens as usize,
            n_completions: sampling.n as usize,
            renormalizes: sampling.renormalize_logits,
            n_top: sampling.logprobs.map(|n| n as usize),
            chosen: Vec::new(),
            echo: if sampling.echo { request.prepared.tokens.clone() } else { Vec::new() },
            tokenizer,
        }
    }

    /// Number of live beams, and so rows of logits of a step.
    pub fn n_live(&self) -> usize {
        self.search.n_live()
    }

    /// Tokens of live beam `beam` after the prompt.
    pub fn tokens(&self, beam: usize) -> &[u32] {
        self.search.tokens(beam)
    }

    /// Takes a step with the logits of all live beams, `[n_live, vocab]`, which are changed in place. For each
    /// branch, the caller then continues the KV of its parent with the branch's token.
    ///
    /// # Errors
    /// Nothing can be chosen: as [`LogitsPipeline::blame`] has it.
    pub fn advance(&mut self, logits: &mut [f32]) -> Result<BeamStep, Failure> {
        let vocab = logits.len() / self.n_live().max(1);
        for (beam, row) in logits.chunks_exact_mut(vocab.max(1)).enumerate() {
            log_softmax(row);
            if let Some(pipeline) = self.pipelines.get_mut(beam) {
                pipeline.apply(self.search.tokens(beam), row)?;
            }
            if self.renormalizes {
                log_softmax(row);
            }
        }
        let tokenizer = &self.tokenizer;
        let stops = &self.stops.texts;
        let min_tokens = self.min_tokens;
        let turn = self.search.advance(logits, |before, token| {
            before.len() + 1 >= min_tokens && ends_with_stop(tokenizer, stops, before, token)
        });
        let turn = turn.map_err(|e| self.pipelines[0].blame(e))?;
        if let Some(n_top) = self.n_top {
            let row = |parent: usize| &logits[parent * vocab..][..vocab];
            let found = |b: &BeamBranch| logprobs(row(b.parent), b.token, n_top);
            let taken = self.search.taken().iter();
            self.chosen.extend(taken.map(|b| describe(&self.tokenizer, b.token, &found(b))));
        }
        if let BeamStep::Continue(branches) = &turn {
            // A search that continues has a branch.
            let copy = |branch: &BeamBranch| self.pipelines[branch.parent].clone();
            self.pipelines = branches.iter().map(copy).collect();
        }
        Ok(turn)
    }

    /// As many completions as the request asked for, best first. The last is repeated if the search never had as
    /// many beams.
    pub fn into_completions(self) -> Vec<BeamCompletion> {
        let hypotheses = self.search.clone().into_hypotheses(self.n_completions);
        let mut completions: Vec<BeamCompletion> = hypotheses.iter().map(|h| self.write(h)).collect();
        if let Some(last) = completions.last().cloned() {
            completions.resize(self.n_completions, last);
        }
        completions
    }

    fn write(&self, hypothesis: &Hypothesis) -> BeamCompletion {
        let (own, end) = match hypothesis.tokens.split_last() {
            Some((last, rest)) if self.ends.contains(last) => (rest, FinishReason::Stop),
            _ => (&hypothesis.tokens[..], FinishReason::Length),
        };
        let (text, stopped) = self.spell(own);
        let mut chosen: Vec<_> = hypothesis.path.iter().filter_map(|node| self.chosen.get(*node)).collect();
        let ended_by = if chosen.len() > own.len() { chosen.pop() } else { None };
        BeamCompletion {
            delta: Delta {
                text: self.tokenizer.decode(&self.echo) + &text,
                token_ids: [self.echo.as_slice(), own].concat(),
                logprobs: chosen.into_iter().cloned().collect(),
                prompt_logprobs: Vec::new(),
            },
            reason: if stopped { FinishReason::Stop } else { end },
            n_generated: hypothesis.tokens.len(),
            score: hypothesis.score,
            no_speech_prob: self.pipelines.first().and_then(LogitsPipeline::no_speech_prob),
            end_logprob: ended_by.map(|c| c.chosen.logprob),
        }
    }

    /// Text of a hypothesis, and true if a stop string ended it.
    fn spell(&self, tokens: &[u32]) -> (String, bool) {
        let mut detokenizer = StopDetokenizer::new(Arc::clone(&self.tokenizer), self.stops.clone());
        let mut text = String::new();
        for (i, token) in tokens.iter().enumerate() {
            match i + 1 < self.min_tokens {
                true => text.push_str(&detokenizer.pass(*token)),
                false => match detokenizer.push(*token) {
                    DecodedText::More(more) => text.push_str(&more),
                    DecodedText::Stopped(more) => return (text + &more, true),
                },
            }
        }
        match detokenizer.finish() {
            DecodedText::More(more) => (text + &more, false),
            DecodedText::Stopped(more) => (text + &more, true),
        }
    }
}

/// Bytes at the start of a text that may differ when the tokens before it are left out: a space, or the rest of a
/// character.
const UNSURE_BYTES: usize = 8;

/// True if the text of `token` after `before` completes a stop string. It reads as many of the last tokens as the
/// longest stop string may take, not the whole text: it is asked for every candidate of every step.
fn ends_with_stop(tokenizer: &Tokenizer, stops: &[String], before: &[u32], token: u32) -> bool {
    let Some(longest) = stops.iter().map(String::len).max() else { return false };
    let enough = longest + UNSURE_BYTES;
    let mut n_read = enough;
    loop {
        let start = before.len().saturating_sub(n_read);
        let text = tokenizer.decode(&[&before[start..], &[token]].concat());
        // Some tokens have no text.
        if start == 0 || text.len() >= enough + tokenizer.token_text(token).len() {
            return stops.iter().any(|stop| text.contains(stop.as_str()));
        }
        n_read *= 2;
    }
}
