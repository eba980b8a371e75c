//! Speech on its way out: tokens become segments with text and confidence.
//!
//! [`WindowSegments`] does it as tokens come. [`Held`] holds windows back, for requests where what is told of one
//! depends on its end, on its neighbours, or on where its words lie.

mod held;
mod window;

pub use held::{Act, Held, Told};

use crate::answer::{Parts, Prepared};
use held::How;
use triptych_core::Failure;
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;

use triptych_engine::ChosenToken;
use triptych_models::prompt::PreparedSequence;
use triptych_models::speech::{Segment, Segmenter};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// The windows of a request, if they must be held back. `sampling` is then that of the first try.
///
/// # Errors
/// If the task cannot be done with this model, item or number of answers.
pub fn hold(
    prepared: &Prepared,
    parts: &Parts,
    sampling: &mut SamplingParams,
) -> Result<Option<Held>, Failure> {
    let Some(facts) = parts.speech.clone() else { return Ok(None) };
    let task = match &prepared.prompt {
        Prompt::Speech(task) => task.clone(),
        _ => Default::default(),
    };
    if let Some(first) = task.fallback.as_ref().and_then(|f| f.temperatures.first()) {
        sampling.temperature = *first;
    }
    let how = How {
        task,
        facts,
        tokenizer: parts.tokenizer.clone(),
        temperature: sampling.temperature,
        duration_ms: held::duration_ms(&prepared.items),
    };
    let holds = how.holds(&prepared.windows, sampling.n)?;
    Ok(holds.then(|| Held::new(how, prepared.windows.clone(), sampling.n)))
}

/// Collects the segments of a window.
#[derive(Default)]
pub struct WindowSegments {
    segmenter: Option<Segmenter>,
    segments: Vec<(Segment, f32)>,
    logprob_sum: f32,
    n_tokens: u32,
    window_start_ms: u32,
    temperature: f32,
}

impl WindowSegments {
    /// Starts a window; collects nothing if the sequence is not speech.
    pub fn new(sequence: &PreparedSequence) -> Self {
        Self {
            segmenter: Segmenter::for_sequence(sequence),
            segments: Vec::new(),
            logprob_sum: 0.0,
            n_tokens: 0,
            window_start_ms: (window::span(sequence).0 * 1000.0).round() as u32,
            temperature: 0.0,
        }
    }

    /// Says at which temperature it is decoded.
    pub fn set_temperature(&mut self, temperature: f32) {
        self.temperature = temperature;
    }

    /// Whether the sequence is speech.
    pub fn is_speech(&self) -> bool {
        self.segmenter.is_some()
    }

    /// Adds generated tokens with their log-probabilities.
    pub fn push(&mut self, token_ids: &[u32], logprobs: &[ChosenToken]) {
        let Some(segmenter) = &mut self.segmenter else { return };
        for (i, token) in token_ids.iter().enumerate() {
            self.logprob_sum += logprobs.get(i).map_or(0.0, |l| l.chosen.logprob);
            self.n_tokens += 1;
            if let Some(segment) = segmenter.push(*token) {
                let mean = self.logprob_sum / self.n_tokens as f32;
                self.segments.push((segment, mean));
                (self.logprob_sum, self.n_tokens) = (0.0, 0);
            }
        }
    }

    /// Ends the window.
    pub fn finish(mut self, tokenizer: &Tokenizer, no_speech_prob: f32) -> Vec<v1::Segment> {
        if let Some(last) = self.segmenter.and_then(Segmenter::finish) {
            let mean = if self.n_tokens == 0 { 0.0 } else { self.logprob_sum / self.n_tokens as f32 };
            self.segments.push((last, mean));
        }
        let wire = |(segment, avg_logprob): (Segment, f32)| v1::Segment {
            start_s: segment.start_s,
            end_s: segment.end_s,
            text: tokenizer.decode(&segment.tokens),
            token_ids: segment.tokens,
            avg_logprob,
            no_speech_prob,
            temperature: self.temperature,
            window_start_ms: self.window_start_ms,
            ..v1::Segment::default()
        };
        self.segments.into_iter().map(wire).collect()
    }
}
