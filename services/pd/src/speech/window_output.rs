//! Output of one decoded window: its quality, and its segments with words and times.

use std::ops::Range;
use triptych_core::sampling::FinishReason;
use triptych_engine::{ChosenToken, Delta, Finished};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::speech::quality::{WindowQuality, compression_ratio};
use triptych_models::speech::sequential::DecodedWindow;
use triptych_models::speech::words::words;
use triptych_models::speech::{Segmenter, SpeechInfo};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// Seconds for each encoder row, as in the vocabulary's timestamps.
const ROW_S: f64 = 0.02;

/// Output of one window. "Free" tokens are those after task tokens and prefix.
#[derive(Clone, Debug)]
pub struct WindowOutput {
    /// Generated tokens, without the end token.
    pub tokens: Vec<u32>,
    /// Log-probabilities, one for each token.
    pub logprobs: Vec<ChosenToken>,
    /// Number of leading tokens that are not free.
    pub n_steps: usize,
    /// Temperature of the decoding.
    pub temperature: f32,
    /// End of the sequence.
    pub finished: Finished,
    /// True if there is no speech: nothing of it is emitted.
    pub silent: bool,
    /// Encoder row at which each free token begins; empty without alignment.
    pub rows: Vec<usize>,
}

/// A segment of a window, as free tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentSpan {
    /// Start in seconds of the whole audio.
    pub start_s: f64,
    /// End in seconds.
    pub end_s: f64,
    /// Indices of its text tokens among the free tokens.
    pub tokens: Vec<usize>,
}

/// Data for segments on the wire.
#[derive(Clone, Copy)]
pub struct SegmentContext<'a> {
    /// Tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Start of the window, in seconds.
    pub offset_s: f64,
    /// Language code, if known.
    pub language: Option<&'a str>,
}

impl WindowOutput {
    /// Output of a sequence that has ended.
    pub fn new(delta: Delta, finished: Finished, n_steps: usize, temperature: f32) -> Self {
        let Delta { token_ids: tokens, logprobs, .. } = delta;
        let n_steps = n_steps.min(tokens.len());
        Self { tokens, logprobs, n_steps, temperature, finished, silent: false, rows: Vec::new() }
    }

    /// Free tokens.
    pub fn free(&self) -> &[u32] {
        self.tokens.get(self.n_steps..).unwrap_or_default()
    }

    /// Quality measures. The end token counts as a token.
    pub fn quality(&self, end: Option<u32>, vocab: usize) -> WindowQuality {
        let ended = end.filter(|_| self.finished.end_logprob.is_some());
        let tokens: Vec<u32> = self.free().iter().copied().chain(ended).collect();
        let sum: f32 = self.logprob_sum(0..self.free().len()) + self.finished.end_logprob.unwrap_or(0.0);
        WindowQuality {
            compression_ratio: compression_ratio(&tokens, vocab),
            logprob: sum / tokens.len().max(1) as f32,
            no_speech: self.finished.no_speech_prob.unwrap_or(0.0),
        }
    }

    fn logprob_sum(&self, free: Range<usize>) -> f32 {
        let logprob = |i: usize| self.logprobs.get(self.n_steps + i).map_or(0.0, |l| l.chosen.logprob);
        free.map(logprob).sum()
    }

    /// Tokens to align, and the number of trailing free tokens among them. The last token of a completion that
    /// was cut off has no attention weights, and is left out.
    pub fn to_align(&self, prompt: &[u32]) -> (Vec<u32>, usize) {
        let cut_off = usize::from(self.finished.reason == FinishReason::Length);
        let n = self.tokens.len().saturating_sub(cut_off);
        let tokens: Vec<u32> = prompt.iter().chain(&self.tokens[..n]).copied().collect();
        (tokens, n.saturating_sub(self.n_steps))
    }

    /// Tokens and log-probabilities of the kept range of free tokens.
    pub fn delta(&self, kept: &Range<usize>, text: String) -> Delta {
        let first = if kept.start == 0 { 0 } else { self.n_steps + kept.start };
        let range = first..(self.n_steps + kept.end).min(self.tokens.len()).max(first);
        Delta {
            text,
            token_ids: self.tokens.get(range.clone()).unwrap_or_default().to_vec(),
            logprobs: self.logprobs.get(range).unwrap_or_default().to_vec(),
            prompt_logprobs: Vec::new(),
        }
    }

    /// Segments by the timestamps among the tokens, restricted to the kept range.
    pub fn parts(&self, sequence: &PreparedSequence, kept: &Range<usize>) -> Vec<SegmentSpan> {
        let Some(mut segmenter) = Segmenter::for_sequence(sequence) else { return Vec::new() };
        let mut segments: Vec<_> = self.tokens.iter().filter_map(|t| segmenter.push(*t)).collect();
        segments.extend(segmenter.finish());
        let part = |s: triptych_models::speech::Segment| SegmentSpan {
            start_s: s.start_s,
            end_s: s.end_s,
            tokens: (s.first_token..s.first_token + s.tokens.len()).filter(|i| kept.contains(i)).collect(),
        };
        segments.into_iter().map(part).filter(|p| !p.tokens.is_empty()).collect()
    }

    /// Segments of the settled part of a window read in sequence.
    pub fn settled_parts(&self, settled: &DecodedWindow, facts: &SpeechInfo) -> Vec<SegmentSpan> {
        let free = self.free();
        let is_text = |i: &usize| facts.first_time.is_none_or(|first| free[*i] < first);
        let part = |s: &triptych_models::speech::sequential::WindowSegment| SegmentSpan {
            start_s: s.start_s,
            end_s: s.end_s,
            tokens: s.tokens.clone().filter(is_text).collect(),
        };
        settled.segments.iter().map(part).filter(|p| !p.tokens.is_empty()).collect()
    }

    /// A segment in the wire type.
    pub fn segment(&self, part: &SegmentSpan, context: SegmentContext<'_>) -> v1::Segment {
        let free = self.free();
        let token_ids: Vec<u32> = part.tokens.iter().map(|i| free[*i]).collect();
        let sum: f32 = part.tokens.iter().map(|i| self.logprob_sum(*i..i + 1)).sum();
        v1::Segment {
            start_s: part.start_s,
            end_s: part.end_s,
            text: context.tokenizer.decode(&token_ids),
            avg_logprob: sum / token_ids.len().max(1) as f32,
            no_speech_prob: self.finished.no_speech_prob.unwrap_or(0.0),
            words: self.words(part, &token_ids, context),
            temperature: self.temperature,
            window_start_ms: (context.offset_s * 1000.0).round() as u32,
            token_ids,
        }
    }

    /// Words of a segment. A word begins where the token before its first one does, as in transformers.
    fn words(&self, part: &SegmentSpan, token_ids: &[u32], context: SegmentContext<'_>) -> Vec<v1::Word> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let at = |i: Option<usize>| {
            let row = i.and_then(|i| self.rows.get(i).or(self.rows.last())).copied().unwrap_or(0);
            ((context.offset_s + row as f64 * ROW_S) * 100.0).round() / 100.0
        };
        let words = words(context.tokenizer, token_ids, context.language);
        let word = |w: triptych_models::speech::words::WordTokens| {
            let first = part.tokens[w.tokens.start];
            let last = part.tokens[w.tokens.end - 1];
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

/// Start and end of a window's audio in seconds; zero for text.
pub fn span(sequence: &PreparedSequence) -> (f64, f64) {
    match sequence.output {
        OutputKind::Speech { offset_s, end_s, .. } => (offset_s, end_s),
        OutputKind::Text => (0.0, 0.0),
    }
}
