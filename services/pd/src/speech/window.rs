//! One window, decoded to its end: how good it is, and its segments with words and times.

use std::ops::Range;
use triptych_core::sampling::FinishReason;
use triptych_engine::{ChosenToken, Delta, Finished};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::speech::quality::{Quality, compression_ratio};
use triptych_models::speech::sequential::DecodedWindow;
use triptych_models::speech::words::words;
use triptych_models::speech::{Segmenter, SpeechInfo};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// Seconds between two encoder rows, as times in the vocabulary.
const ROW_S: f64 = 0.02;

/// What was written of a window. "Free" tokens are those after task tokens and prefix.
#[derive(Clone, Debug)]
pub struct Written {
    /// Generated tokens, without the end token.
    pub tokens: Vec<u32>,
    /// One for each.
    pub logprobs: Vec<ChosenToken>,
    /// Leading tokens that are not free.
    pub n_steps: usize,
    /// The temperature it was decoded at.
    pub temperature: f32,
    /// How it ended.
    pub finished: Finished,
    /// Nobody speaks: nothing of it is told.
    pub silent: bool,
    /// Encoder row at which each free token begins; empty: not known.
    pub rows: Vec<usize>,
}

/// A segment of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Start in seconds of the whole sound.
    pub start_s: f64,
    /// End in seconds.
    pub end_s: f64,
    /// Places of its text tokens among the free tokens.
    pub tokens: Vec<usize>,
}

/// How segments are put on the wire.
#[derive(Clone, Copy)]
pub struct Teller<'a> {
    /// For text.
    pub tokenizer: &'a Tokenizer,
    /// Start of the window, in seconds.
    pub offset_s: f64,
    /// The language, as a code.
    pub language: Option<&'a str>,
}

impl Written {
    /// Collects what the engine said.
    pub fn new(said: Delta, finished: Finished, n_steps: usize, temperature: f32) -> Self {
        let Delta { token_ids: tokens, logprobs, .. } = said;
        let n_steps = n_steps.min(tokens.len());
        Self { tokens, logprobs, n_steps, temperature, finished, silent: false, rows: Vec::new() }
    }

    /// The free tokens.
    pub fn free(&self) -> &[u32] {
        self.tokens.get(self.n_steps..).unwrap_or_default()
    }

    /// Three numbers to judge it by. The end token counts as a token.
    pub fn quality(&self, end: Option<u32>, vocab: usize) -> Quality {
        let ended = end.filter(|_| self.finished.end_logprob.is_some());
        let tokens: Vec<u32> = self.free().iter().copied().chain(ended).collect();
        let sum: f32 = self.logprob_sum(0..self.free().len()) + self.finished.end_logprob.unwrap_or(0.0);
        Quality {
            compression_ratio: compression_ratio(&tokens, vocab),
            logprob: sum / tokens.len().max(1) as f32,
            no_speech: self.finished.no_speech_prob.unwrap_or(0.0),
        }
    }

    fn logprob_sum(&self, free: Range<usize>) -> f32 {
        let logprob = |i: usize| self.logprobs.get(self.n_steps + i).map_or(0.0, |l| l.chosen.logprob);
        free.map(logprob).sum()
    }

    /// The tokens to align, and how many of the last are free: all, but the last one of an answer that was cut off,
    /// whose place the decoder was never asked for.
    pub fn to_align(&self, prompt: &[u32]) -> (Vec<u32>, usize) {
        let cut_off = usize::from(self.finished.reason == FinishReason::Length);
        let n = self.tokens.len().saturating_sub(cut_off);
        let tokens: Vec<u32> = prompt.iter().chain(&self.tokens[..n]).copied().collect();
        (tokens, n.saturating_sub(self.n_steps))
    }

    /// What the engine said, as far as it is kept of the free tokens.
    pub fn delta(&self, kept: &Range<usize>, text: String) -> Delta {
        let first = if kept.start == 0 { 0 } else { self.n_steps + kept.start };
        let range = first..(self.n_steps + kept.end).min(self.tokens.len()).max(first);
        Delta {
            text,
            token_ids: self.tokens.get(range.clone()).unwrap_or_default().to_vec(),
            logprobs: self.logprobs.get(range).unwrap_or_default().to_vec(),
        }
    }

    /// Segments by the times among the tokens, as far as they are kept.
    pub fn parts(&self, sequence: &PreparedSequence, kept: &Range<usize>) -> Vec<Part> {
        let Some(mut segmenter) = Segmenter::for_sequence(sequence) else { return Vec::new() };
        let mut segments: Vec<_> = self.tokens.iter().filter_map(|t| segmenter.push(*t)).collect();
        segments.extend(segmenter.finish());
        let part = |s: triptych_models::speech::Segment| Part {
            start_s: s.start_s,
            end_s: s.end_s,
            tokens: (s.first_token..s.first_token + s.tokens.len()).filter(|i| kept.contains(i)).collect(),
        };
        segments.into_iter().map(part).filter(|p| !p.tokens.is_empty()).collect()
    }

    /// Segments that a window read in sequence settles.
    pub fn settled_parts(&self, settled: &DecodedWindow, facts: &SpeechInfo) -> Vec<Part> {
        let free = self.free();
        let is_text = |i: &usize| facts.first_time.is_none_or(|first| free[*i] < first);
        let part = |s: &triptych_models::speech::sequential::WindowSegment| Part {
            start_s: s.start_s,
            end_s: s.end_s,
            tokens: s.tokens.clone().filter(is_text).collect(),
        };
        settled.segments.iter().map(part).filter(|p| !p.tokens.is_empty()).collect()
    }

    /// A segment on the wire.
    pub fn tell(&self, part: &Part, teller: Teller<'_>) -> v1::Segment {
        let free = self.free();
        let token_ids: Vec<u32> = part.tokens.iter().map(|i| free[*i]).collect();
        let sum: f32 = part.tokens.iter().map(|i| self.logprob_sum(*i..i + 1)).sum();
        v1::Segment {
            start_s: part.start_s,
            end_s: part.end_s,
            text: teller.tokenizer.decode(&token_ids),
            avg_logprob: sum / token_ids.len().max(1) as f32,
            no_speech_prob: self.finished.no_speech_prob.unwrap_or(0.0),
            words: self.words(part, &token_ids, teller),
            temperature: self.temperature,
            window_start_ms: (teller.offset_s * 1000.0).round() as u32,
            token_ids,
        }
    }

    /// A word begins where the token before its first one does, as transformers tells it.
    fn words(&self, part: &Part, token_ids: &[u32], teller: Teller<'_>) -> Vec<v1::Word> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let at = |i: Option<usize>| {
            let row = i.and_then(|i| self.rows.get(i).or(self.rows.last())).copied().unwrap_or(0);
            ((teller.offset_s + row as f64 * ROW_S) * 100.0).round() / 100.0
        };
        let words = words(teller.tokenizer, token_ids, teller.language);
        let word = |w: triptych_models::speech::words::WordTokens| {
            let (first, last) = (part.tokens[w.tokens.start], part.tokens[w.tokens.end - 1]);
            let sum: f32 =
                w.tokens.clone().map(|i| self.logprob_sum(part.tokens[i]..part.tokens[i] + 1)).sum();
            v1::Word {
                start_s: at(first.checked_sub(1)),
                end_s: at(Some(last)),
                text: w.text,
                probability: (sum / w.tokens.len() as f32).exp(),
            }
        };
        words.into_iter().map(word).collect()
    }
}

/// Start and end of a window's sound in seconds; nothing for what is not speech.
pub fn span(sequence: &PreparedSequence) -> (f64, f64) {
    match sequence.output {
        OutputKind::Speech { offset_s, end_s, .. } => (offset_s, end_s),
        OutputKind::Text => (0.0, 0.0),
    }
}
