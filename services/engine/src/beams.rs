//! The answers of one beam search in the writing: rules and processors of each beam, the search, and at the end
//! the texts.
//!
//! The counterpart of `answer` for beams. It sees logits; the caches of the beams are the engine's matter, which
//! follows what [`Beams::advance`] says. Nothing is sent before the end, since any beam may still win.

use crate::answer::{describe, ends_of, most_tokens};
use crate::beam::{BeamSearch, Branch, Hypothesis, Turn};
use crate::output::{ChosenToken, Delta};
use crate::request::Arrival;
use crate::sampler::log_softmax;
use crate::shaping::Shaping;
use crate::writer::{Writer, Written};
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::sampling::{BeamParams, FinishReason};
use triptych_models::tokenization::Tokenizer;

/// The state of a search.
#[derive(Debug)]
pub struct Beams {
    tokenizer: Arc<Tokenizer>,
    search: BeamSearch,
    /// One for each live beam; never empty.
    shapings: Vec<Shaping>,
    stops: Vec<String>,
    ends: Vec<u32>,
    min_tokens: usize,
    n_answers: usize,
    /// Alternatives to report; `None`: no log-probabilities.
    n_top: Option<usize>,
    /// By branch, in the order they were taken; empty without log-probabilities.
    chosen: Vec<ChosenToken>,
    echo: Vec<u32>,
}

/// One of the answers.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamAnswer {
    /// All of it.
    pub delta: Delta,
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
    /// Its log-probability over its length to the power of the penalty.
    pub score: f32,
    /// As in [`crate::Finished`].
    pub no_speech_prob: Option<f32>,
    /// As in [`crate::Finished`].
    pub end_logprob: Option<f32>,
}

impl Beams {
    /// A search with one live beam. `room`: tokens that the context leaves after the prompt.
    pub fn new(arrival: &Arrival, params: &BeamParams, room: usize, tokenizer: Arc<Tokenizer>) -> Self {
        let sampling = &arrival.sampling;
        let ends = ends_of(arrival);
        let max_tokens = most_tokens(sampling).min(room);
        Self {
            search: BeamSearch::new(params, &ends, max_tokens),
            shapings: vec![Shaping::new(arrival, &ends, max_tokens, &tokenizer)],
            stops: sampling.stop.clone(),
            ends,
            min_tokens: sampling.min_tokens as usize,
            n_answers: sampling.n as usize,
            n_top: sampling.logprobs.map(|n| n as usize),
            chosen: Vec::new(),
            echo: if sampling.echo { arrival.prepared.tokens.clone() } else { Vec::new() },
            tokenizer,
        }
    }

    /// Live beams, and so rows of logits that a step takes.
    pub fn n_live(&self) -> usize {
        self.search.n_live()
    }

    /// The tokens of live beam `beam` after the prompt.
    pub fn tokens(&self, beam: usize) -> &[u32] {
        self.search.tokens(beam)
    }

    /// Takes a step with the logits of all live beams, `[n_live, vocab]`, which are changed in place. The caller
    /// then holds for each branch the cache of its parent with the branch's token to compute.
    ///
    /// # Errors
    /// If nothing can be chosen: by the settings' doing, which is the client's, or because of broken logits.
    pub fn advance(&mut self, logits: &mut [f32]) -> Result<Turn, Failure> {
        let vocab = logits.len() / self.n_live().max(1);
        for (beam, row) in logits.chunks_exact_mut(vocab.max(1)).enumerate() {
            log_softmax(row);
            if let Some(shaping) = self.shapings.get_mut(beam) {
                shaping.apply(self.search.tokens(beam), row)?;
            }
        }
        let (tokenizer, stops, min_tokens) = (&self.tokenizer, &self.stops, self.min_tokens);
        let turn = self.search.advance(logits, |before, token| {
            before.len() + 1 >= min_tokens && ends_with_stop(tokenizer, stops, before, token)
        });
        let turn = turn.map_err(|e| self.shapings[0].blame(e))?;
        if let Some(n_top) = self.n_top {
            let row = |parent: usize| &logits[parent * vocab..][..vocab];
            let taken = self.search.taken().iter();
            self.chosen.extend(taken.map(|b| describe(&self.tokenizer, row(b.parent), b.token, n_top)));
        }
        if let Turn::Continue(branches) = &turn {
            // A search that goes on has a branch.
            let copy = |branch: &Branch| self.shapings[branch.parent].clone();
            self.shapings = branches.iter().map(copy).collect();
        }
        Ok(turn)
    }

    /// As many answers as were asked for, best first. A search that never had as many beams repeats its last.
    pub fn into_answers(self) -> Vec<BeamAnswer> {
        let hypotheses = self.search.clone().into_answers(self.n_answers);
        let mut answers: Vec<BeamAnswer> = hypotheses.iter().map(|h| self.write(h)).collect();
        if let Some(last) = answers.last().cloned() {
            answers.resize(self.n_answers, last);
        }
        answers
    }

    fn write(&self, hypothesis: &Hypothesis) -> BeamAnswer {
        let (own, end) = match hypothesis.tokens.split_last() {
            Some((last, rest)) if self.ends.contains(last) => (rest, FinishReason::Stop),
            _ => (&hypothesis.tokens[..], FinishReason::Length),
        };
        let (text, stopped) = self.spell(own);
        let mut chosen: Vec<_> = hypothesis.path.iter().filter_map(|node| self.chosen.get(*node)).collect();
        let ended_by = if chosen.len() > own.len() { chosen.pop() } else { None };
        BeamAnswer {
            delta: Delta {
                text: self.tokenizer.decode(&self.echo) + &text,
                token_ids: [self.echo.as_slice(), own].concat(),
                logprobs: chosen.into_iter().cloned().collect(),
            },
            reason: if stopped { FinishReason::Stop } else { end },
            n_generated: hypothesis.tokens.len(),
            score: hypothesis.score,
            no_speech_prob: self.shapings.first().and_then(Shaping::no_speech_prob),
            end_logprob: ended_by.map(|c| c.chosen.logprob),
        }
    }

    /// The text of an answer's tokens, and whether a stop string ended it.
    fn spell(&self, tokens: &[u32]) -> (String, bool) {
        let mut writer = Writer::new(Arc::clone(&self.tokenizer), self.stops.clone());
        let mut text = String::new();
        for (i, token) in tokens.iter().enumerate() {
            match i + 1 < self.min_tokens {
                true => text.push_str(&writer.pass(*token)),
                false => match writer.push(*token) {
                    Written::More(more) => text.push_str(&more),
                    Written::Stopped(more) => return (text + &more, true),
                },
            }
        }
        match writer.finish() {
            Written::More(more) => (text + &more, false),
            Written::Stopped(more) => (text + &more, true),
        }
    }
}

/// Whether the text of `token` after `before` completes a stop string.
fn ends_with_stop(tokenizer: &Tokenizer, stops: &[String], before: &[u32], token: u32) -> bool {
    if stops.is_empty() {
        return false;
    }
    let text = tokenizer.decode(&[before, &[token]].concat());
    stops.iter().any(|stop| text.contains(stop.as_str()))
}
