//! Speech output: tokens become segments with text and confidence.
//!
//! [`SegmentCollector`] does it as tokens come. [`WindowBuffer`] holds windows back, for requests where the
//! output of a window depends on its end, on its neighbours, or on the alignment of its words.

mod window_buffer;
mod window_output;

pub use window_buffer::{SettledWindow, SpeechAction, WindowBuffer};

use crate::request::{AdmittedRequest, RequestContext};
use triptych_core::Failure;
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_engine::ChosenToken;
use triptych_models::prompt::PreparedSequence;
use triptych_models::speech::{Segment, Segmenter};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;
use window_buffer::SpeechSetup;

/// Buffer for the windows of a request, if they must be held back. Sets `sampling` to the first attempt's.
///
/// # Errors
/// A task that this model, item or number of completions does not support.
pub fn window_buffer(
    prepared: &AdmittedRequest,
    context: &RequestContext,
    sampling: &mut SamplingParams,
) -> Result<Option<WindowBuffer>, Failure> {
    let Some(facts) = context.speech.clone() else { return Ok(None) };
    let task = match &prepared.prompt {
        Prompt::Speech(task) => task.clone(),
        _ => Default::default(),
    };
    if let Some(first) = task.fallback.as_ref().and_then(|f| f.temperatures.first()) {
        sampling.temperature = *first;
    }
    let options = SpeechSetup {
        task,
        facts,
        tokenizer: context.tokenizer.clone(),
        temperature: sampling.temperature,
        duration_ms: window_buffer::duration_ms(&prepared.items),
    };
    let needs_buffer = options.needs_buffer(&prepared.windows, sampling.n)?;
    Ok(needs_buffer.then(|| WindowBuffer::new(options, prepared.windows.clone(), sampling.n)))
}

/// Collects the segments of a window.
#[derive(Default)]
pub struct SegmentCollector {
    segmenter: Option<Segmenter>,
    segments: Vec<(Segment, f32)>,
    logprob_sum: f32,
    n_tokens: u32,
    window_start_ms: u32,
    temperature: f32,
}

impl SegmentCollector {
    /// A collector for a window; collects nothing if the sequence is not speech.
    pub fn new(sequence: &PreparedSequence) -> Self {
        Self {
            segmenter: Segmenter::for_sequence(sequence),
            segments: Vec::new(),
            logprob_sum: 0.0,
            n_tokens: 0,
            window_start_ms: (window_output::span(sequence).0 * 1000.0).round() as u32,
            temperature: 0.0,
        }
    }

    /// Sets the temperature at which the window is decoded.
    pub fn set_temperature(&mut self, temperature: f32) {
        self.temperature = temperature;
    }

    /// True if the sequence is speech.
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

    /// Segments of the window, which has ended.
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
