//! Buffer of speech windows until they are settled: decoded again when they fail a quality check, aligned for
//! word times, joined to their neighbours, and only then emitted, in order.
//!
//! It starts nothing itself: the work to do is returned as [`SpeechAction`]s.

use super::window_output::{SegmentContext, SegmentSpan, WindowOutput, span};
use crate::request::ChoiceWindow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use triptych_core::prompt::{LongForm, SpeechResume, SpeechTask};
use triptych_core::sampling::FinishReason;
use triptych_core::{EncodedItem, Extent, Failure};
use triptych_engine::{Delta, Finished, Output, SequenceId, SequenceTimes};
use triptych_models::prompt::PreparedSequence;
use triptych_models::speech::SpeechInfo;
use triptych_models::speech::align::{AttentionWeights, first_rows};
use triptych_models::speech::quality::{WindowVerdict, judge};
use triptych_models::speech::sequential::{
    DecodedWindow, PreviousLimits, SequentialWindow, previous_tokens, resume,
};
use triptych_models::speech::stitch::seam;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// Task and model properties of a speech request.
#[derive(Clone, Debug)]
pub struct SpeechSetup {
    /// Transcription task.
    pub task: SpeechTask,
    /// Properties of the speech model.
    pub facts: SpeechInfo,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Temperature of the first attempt.
    pub temperature: f32,
    /// Length of the audio in milliseconds.
    pub duration_ms: u32,
}

/// Work for the owner of the buffer.
#[derive(Debug)]
pub enum SpeechAction {
    /// Decode a window again.
    Retry {
        /// Position of the window.
        position: ChoiceWindow,
        /// Temperature of the next attempt.
        temperature: f32,
    },
    /// Align known tokens to a window's audio.
    Align {
        /// Position of the window.
        position: ChoiceWindow,
        /// Tokens, prompt included.
        tokens: Vec<u32>,
    },
    /// Emit a window that is settled and next in order.
    Emit(Box<SettledWindow>),
}

/// A settled window.
#[derive(Debug)]
pub struct SettledWindow {
    /// Position of the window.
    pub position: ChoiceWindow,
    /// Tokens and text to emit.
    pub delta: Delta,
    /// End of its sequence.
    pub finished: Finished,
    /// Segments of the window.
    pub segments: Vec<v1::Segment>,
}

#[derive(Debug)]
enum WindowState {
    Decoding { attempt: usize, delta: Delta },
    Aligning { output: Box<WindowOutput>, n_aligned: usize },
    Settled(Box<WindowOutput>),
    Emitted,
}

#[derive(Debug)]
struct BufferedChoice {
    slots: Vec<WindowState>,
    /// Next window to emit.
    next: usize,
    /// Leading free tokens of that window that the one before has emitted.
    emitted_before: usize,
}

/// Buffered windows of one request.
pub struct WindowBuffer {
    options: SpeechSetup,
    windows: Vec<PreparedSequence>,
    choices: Vec<BufferedChoice>,
    positions: HashMap<SequenceId, ChoiceWindow>,
    next: Option<SpeechResume>,
}

impl SpeechSetup {
    /// True if windows must be buffered.
    ///
    /// # Errors
    /// A task that this model, item or number of completions does not support.
    pub fn needs_buffer(&self, windows: &[PreparedSequence], n: u32) -> Result<bool, Failure> {
        let refuse = |text: String, field: &str| Err(Failure::invalid(text).with_param(field));
        if self.task.word_timestamps && self.facts.alignment_heads.is_empty() {
            let text = "this model names no alignment_heads, so words have no times; leave word times out";
            return refuse(text.into(), "word_timestamps");
        }
        let sequential = self.task.long_form == LongForm::Sequential;
        if sequential && n != 1 {
            return refuse(format!("n is {n}, audio read in sequence has one choice"), "n");
        }
        if sequential && windows.len() != 1 {
            let text = format!("audio read in sequence comes window by window, not as {}", windows.len());
            return refuse(text, "items[0].options.start_ms");
        }
        let hidden_prefix = self.task.prefix.is_some() && windows.iter().any(|w| !w.rules.steps.is_empty());
        let uneven = (1..windows.len()).any(|w| overlap(windows, w)) || windows.iter().any(is_empty);
        Ok(sequential || self.task.word_timestamps || self.task.fallback.is_some() || hidden_prefix || uneven)
    }
}

impl WindowBuffer {
    /// A buffer for `n` completions over all windows.
    pub fn new(options: SpeechSetup, windows: Vec<PreparedSequence>, n: u32) -> Self {
        let slot = |_: &PreparedSequence| WindowState::Decoding { attempt: 0, delta: Delta::default() };
        let choice =
            |_| BufferedChoice { slots: windows.iter().map(slot).collect(), next: 0, emitted_before: 0 };
        let choices = (0..n).map(choice).collect();
        Self { options, windows, choices, positions: HashMap::new(), next: None }
    }

    /// Registers the position of a sequence.
    pub fn position(&mut self, id: SequenceId, position: ChoiceWindow) {
        self.positions.insert(id, position);
    }

    /// True if a window has audio.
    pub fn has_audio(&self, window: usize) -> bool {
        self.windows.get(window).is_some_and(|w| !is_empty(w))
    }

    /// Start of the next window of audio read in sequence, once this one is emitted.
    pub fn next(&self) -> Option<&SpeechResume> {
        self.next.as_ref()
    }

    /// Settles windows without audio, which are not decoded.
    pub fn begin(&mut self) -> Vec<SpeechAction> {
        let mut actions = Vec::new();
        for index in 0..self.choices.len() {
            for window in (0..self.windows.len()).filter(|w| is_empty(&self.windows[*w])) {
                let mut output =
                    WindowOutput::new(Delta::default(), silent_end(), 0, self.options.temperature);
                output.silent = true;
                self.choices[index].slots[window] = WindowState::Settled(Box::new(output));
            }
            actions.extend(self.release(index));
        }
        actions
    }

    /// Takes in an output.
    ///
    /// # Errors
    /// The failure of a sequence.
    pub fn push(&mut self, output: Output) -> Result<Vec<SpeechAction>, Failure> {
        let Some(position) = self.positions.get(&output.id()).copied() else { return Ok(Vec::new()) };
        let index = position.choice as usize;
        let slot = self.choices.get_mut(index).and_then(|c| c.slots.get_mut(position.window));
        let Some(slot) = slot else { return Ok(Vec::new()) };
        match (output, std::mem::replace(slot, WindowState::Emitted)) {
            (Output::Failed(_, failure), _) => return Err(failure),
            (Output::Delta(_, more), WindowState::Decoding { attempt, mut delta }) => {
                delta.token_ids.extend(more.token_ids);
                delta.logprobs.extend(more.logprobs);
                *slot = WindowState::Decoding { attempt, delta };
            }
            (Output::Finished(_, finished), WindowState::Decoding { attempt, delta }) => {
                return Ok(self.decoded(position, attempt, delta, finished));
            }
            (Output::Aligned(_, weights), WindowState::Aligning { mut output, n_aligned }) => {
                output.rows = self.rows(position.window, &weights, n_aligned);
                self.choices[index].slots[position.window] = WindowState::Settled(output);
                return Ok(self.release(index));
            }
            (_, before) => *slot = before,
        }
        Ok(Vec::new())
    }

    fn decoded(
        &mut self,
        position: ChoiceWindow,
        attempt: usize,
        delta: Delta,
        finished: Finished,
    ) -> Vec<SpeechAction> {
        let window = &self.windows[position.window];
        let options = &self.options;
        let temperatures = options.task.fallback.as_ref().map_or(&[][..], |f| &f.temperatures);
        let temperature = temperatures.get(attempt).copied().unwrap_or(options.temperature);
        let mut output = WindowOutput::new(delta, finished, window.rules.steps.len(), temperature);
        let end = window.end_tokens.first().copied();
        let verdict = options.task.fallback.as_ref().map_or(WindowVerdict::Keep, |fallback| {
            judge(fallback, output.quality(end, options.facts.vocab))
        });
        let slot = &mut self.choices[position.choice as usize].slots[position.window];
        if let (WindowVerdict::Again, Some(next)) = (verdict, temperatures.get(attempt + 1)) {
            *slot = WindowState::Decoding { attempt: attempt + 1, delta: Delta::default() };
            return vec![SpeechAction::Retry { position, temperature: *next }];
        }
        output.silent = verdict == WindowVerdict::Silent;
        if options.task.word_timestamps && !output.silent && !output.free().is_empty() {
            let (tokens, n_aligned) = output.to_align(&window.tokens);
            if n_aligned > 0 {
                *slot = WindowState::Aligning { output: Box::new(output), n_aligned };
                return vec![SpeechAction::Align { position, tokens }];
            }
        }
        *slot = WindowState::Settled(Box::new(output));
        self.release(position.choice as usize)
    }

    /// Encoder row at which each free token begins, from weights `[n_heads, n_tokens, n_rows]` over prompt and
    /// tokens.
    fn rows(&self, window: usize, weights: &[f32], n_aligned: usize) -> Vec<usize> {
        let facts = &self.options.facts;
        let sequence = &self.windows[window];
        let n_rows = sequence.cross.first().map_or(0, |c| c.n_rows as usize);
        let n_heads = facts.alignment_heads.len();
        let n_tokens = weights.len().checked_div(n_heads * n_rows).unwrap_or(0);
        let skipped = n_tokens.saturating_sub(n_aligned) * n_rows;
        let heads = weights.chunks_exact((n_tokens * n_rows).max(1));
        let free: Vec<f32> = heads.flat_map(|head| &head[skipped..]).copied().collect();
        let (start_s, end_s) = span(sequence);
        let n_audio_rows = ((end_s - start_s) * 1000.0 / f64::from(facts.row_ms.max(1))).floor() as usize;
        let weights = AttentionWeights { values: &free, n_heads, n_tokens: n_aligned, n_rows };
        first_rows(weights, n_audio_rows, facts.median)
    }

    /// Actions for the settled windows of a choice that are next in order.
    fn release(&mut self, index: usize) -> Vec<SpeechAction> {
        let mut actions = Vec::new();
        while let Some(settled) = self.emit_next(index) {
            actions.push(SpeechAction::Emit(Box::new(settled)));
        }
        actions
    }

    /// Emits the next window; one that overlaps its successor waits for it.
    fn emit_next(&mut self, index: usize) -> Option<SettledWindow> {
        let choice = self.choices.get(index)?;
        let window = choice.next;
        let WindowState::Settled(output) = choice.slots.get(window)? else { return None };
        let free = output.free();
        let first = choice.emitted_before.min(free.len());
        let mut kept = first..free.len();
        let mut emitted_before = 0;
        if window + 1 < choice.slots.len() && overlap(&self.windows, window + 1) {
            let WindowState::Settled(next) = &choice.slots[window + 1] else { return None };
            (kept.end, emitted_before) = self.join(output, first, next);
        }
        let settled = self.settle(ChoiceWindow { choice: index as u32, window }, output, &kept);
        let next = self.options.task.long_form == LongForm::Sequential;
        let next = next.then(|| self.next_window(window, output)).flatten();
        let choice = &mut self.choices[index];
        choice.slots[window] = WindowState::Emitted;
        (choice.next, choice.emitted_before) = (window + 1, emitted_before);
        self.next = next;
        Some(settled)
    }

    /// End of the text of `left`, from free token `first` on, and the number of free tokens of `right` that it
    /// covers.
    fn join(&self, left: &WindowOutput, first: usize, right: &WindowOutput) -> (usize, usize) {
        let texts = |w: &WindowOutput, first: usize| -> Vec<usize> {
            let is_text = |i: &usize| self.options.facts.first_time.is_none_or(|t| w.free()[*i] < t);
            (first..w.free().len()).filter(is_text).collect()
        };
        if left.silent || right.silent {
            return (left.free().len(), 0);
        }
        let l = texts(left, first);
        let r = texts(right, 0);
        let ids = |w: &WindowOutput, at: &[usize]| at.iter().map(|i| w.free()[*i]).collect::<Vec<u32>>();
        let (keep, skip) = seam(&ids(left, &l), &ids(right, &r));
        let end = l.get(keep).copied().unwrap_or(left.free().len());
        (end, r.get(skip).copied().unwrap_or(right.free().len()))
    }

    fn settle(&self, position: ChoiceWindow, output: &WindowOutput, kept: &Range<usize>) -> SettledWindow {
        let sequence = &self.windows[position.window];
        if output.silent {
            let delta = output.delta(&(0..0), String::new());
            let finished = output.finished.clone();
            return SettledWindow { position, delta, finished, segments: Vec::new() };
        }
        let settled = self.settled(position.window, output);
        let (parts, kept): (Vec<SegmentSpan>, Range<usize>) = match &settled {
            Some(settled) => {
                let end = settled.segments.last().map_or(0, |s| s.tokens.end);
                (output.settled_parts(settled, &self.options.facts), 0..end)
            }
            None => (output.parts(sequence, kept), kept.clone()),
        };
        let named = self.language(output);
        let context = SegmentContext {
            tokenizer: &self.options.tokenizer,
            offset_s: span(sequence).0,
            language: self.options.task.language.as_deref().or(named.as_deref()),
        };
        let segments = parts.iter().map(|part| output.segment(part, context)).collect();
        let text = self.options.tokenizer.decode(output.free().get(kept.clone()).unwrap_or_default());
        SettledWindow {
            position,
            delta: output.delta(&kept, text),
            finished: output.finished.clone(),
            segments,
        }
    }

    /// The settled part of a window read in sequence; `None` for other windows.
    fn settled(&self, window: usize, output: &WindowOutput) -> Option<DecodedWindow> {
        let sequential = self.options.task.long_form == LongForm::Sequential;
        Some(self.window(window).filter(|_| sequential)?.decoded(output.free()))
    }

    fn window(&self, window: usize) -> Option<SequentialWindow> {
        let (start_s, _) = span(&self.windows[window]);
        Some(SequentialWindow {
            start_ms: (start_s * 1000.0).round() as u32,
            duration_ms: self.options.duration_ms,
            window_ms: self.options.facts.window_ms,
            first_time: self.options.facts.first_time?,
        })
    }

    fn next_window(&self, window: usize, output: &WindowOutput) -> Option<SpeechResume> {
        let frame = self.window(window)?;
        let task = &self.options.task;
        let most = self.options.facts.max_previous;
        let before = task.resume.as_ref().map_or(&[][..], |r| &r.previous);
        if output.silent {
            return Some(resume(frame.skip()?, before.to_vec(), output.temperature));
        }
        let settled = frame.decoded(output.free());
        let previous = previous_tokens(
            before,
            output.free(),
            &settled,
            PreviousLimits { first_time: frame.first_time, max_tokens: most },
        );
        Some(resume(settled.next_ms?, previous, output.temperature))
    }

    /// Language that the first generated token names, if the request left it to the model.
    fn language(&self, output: &WindowOutput) -> Option<String> {
        let steps = &self.windows.first()?.rules.steps;
        steps.first().filter(|allowed| allowed.len() > 1)?;
        let token = self.options.tokenizer.token(*output.tokens.first()?)?;
        Some(token.strip_prefix("<|")?.strip_suffix("|>")?.to_owned())
    }
}

/// Length of the audio of a request, in milliseconds.
pub fn duration_ms(items: &[EncodedItem]) -> u32 {
    let ms = items.iter().find_map(|item| match &item.extent {
        Extent::Windows { duration_ms, .. } => Some(*duration_ms),
        _ => None,
    });
    u32::try_from(ms.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// True if `window` begins before the end of the one before it.
fn overlap(windows: &[PreparedSequence], window: usize) -> bool {
    span(&windows[window - 1]).1 > span(&windows[window]).0
}

/// True if a window has no audio. Audio of no length has one window all the same.
fn is_empty(window: &PreparedSequence) -> bool {
    let (start_s, end_s) = span(window);
    start_s > 0.0 && end_s <= start_s
}

fn silent_end() -> Finished {
    let now = Instant::now();
    let zero = std::time::Duration::ZERO;
    Finished {
        reason: FinishReason::Stop,
        n_prompt: 0,
        n_cached: 0,
        n_generated: 0,
        n_drafted: 0,
        n_accepted: 0,
        no_speech_prob: Some(1.0),
        end_logprob: None,
        times: SequenceTimes { queue: zero, prefill: zero, first_token: now, last_token: now },
    }
}
