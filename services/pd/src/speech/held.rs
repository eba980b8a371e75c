//! Windows held back until they are settled: decoded again when they went wrong, aligned for their words, joined to
//! their neighbours, and only then told, in order.
//!
//! It decides and starts nothing itself: what is to be done comes out as [`Act`]s.

use super::window::{Part, Teller, Written, span};
use crate::assemble::Place;
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
use triptych_models::speech::sequential::{DecodedWindow, SequentialWindow, remember, resume};
use triptych_models::speech::stitch::seam;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// What is asked, and of which model.
#[derive(Clone, Debug)]
pub struct How {
    /// The task.
    pub task: SpeechTask,
    /// The model.
    pub facts: SpeechInfo,
    /// For text.
    pub tokenizer: Arc<Tokenizer>,
    /// Temperature of the first try.
    pub temperature: f32,
    /// Length of the sound in milliseconds.
    pub duration_ms: u32,
}

/// What is to be done.
#[derive(Debug)]
pub enum Act {
    /// Decode a window again.
    Retry {
        /// Which.
        place: Place,
        /// At which temperature.
        temperature: f32,
    },
    /// Read known tokens over a window.
    Align {
        /// Which.
        place: Place,
        /// The tokens, prompt included.
        tokens: Vec<u32>,
    },
    /// A window is settled and in turn.
    Tell(Told),
}

/// A settled window.
#[derive(Debug)]
pub struct Told {
    /// Which.
    pub place: Place,
    /// What was written.
    pub delta: Delta,
    /// How it ended.
    pub finished: Finished,
    /// Its segments.
    pub segments: Vec<v1::Segment>,
}

#[derive(Debug)]
enum Slot {
    Decoding { attempt: usize, said: Delta },
    Aligning { written: Box<Written>, n_aligned: usize },
    Settled(Box<Written>),
    Told,
}

#[derive(Debug)]
struct Choice {
    slots: Vec<Slot>,
    /// The window in turn.
    next: usize,
    /// Its leading free tokens that the window before has told.
    told_before: usize,
}

/// The windows of one request.
pub struct Held {
    how: How,
    windows: Vec<PreparedSequence>,
    choices: Vec<Choice>,
    places: HashMap<SequenceId, Place>,
    next: Option<SpeechResume>,
}

impl How {
    /// Whether windows must be held back.
    ///
    /// # Errors
    /// If the task cannot be done with this model, item or number of answers.
    pub fn holds(&self, windows: &[PreparedSequence], n: u32) -> Result<bool, Failure> {
        let refuse = |text: String, field: &str| Err(Failure::invalid(text).with_param(field));
        if self.task.word_timestamps && self.facts.alignment_heads.is_empty() {
            let text = "this model names no alignment_heads, so words have no times; leave word times out";
            return refuse(text.into(), "word_timestamps");
        }
        let sequential = self.task.long_form == LongForm::Sequential;
        if sequential && n != 1 {
            return refuse(format!("n is {n}, a sound read in sequence has one answer"), "n");
        }
        if sequential && windows.len() != 1 {
            let text = format!("a sound read in sequence comes window by window, not as {}", windows.len());
            return refuse(text, "items[0].options.start_ms");
        }
        let hidden_prefix = self.task.prefix.is_some() && windows.iter().any(|w| !w.rules.steps.is_empty());
        let uneven = (1..windows.len()).any(|w| overlap(windows, w)) || windows.iter().any(is_empty);
        Ok(sequential || self.task.word_timestamps || self.task.fallback.is_some() || hidden_prefix || uneven)
    }
}

impl Held {
    /// Expects `n` answers over all windows.
    pub fn new(how: How, windows: Vec<PreparedSequence>, n: u32) -> Self {
        let slot = |_: &PreparedSequence| Slot::Decoding { attempt: 0, said: Delta::default() };
        let choice = |_| Choice { slots: windows.iter().map(slot).collect(), next: 0, told_before: 0 };
        let choices = (0..n).map(choice).collect();
        Self { how, windows, choices, places: HashMap::new(), next: None }
    }

    /// Says whose news a name brings.
    pub fn place(&mut self, id: SequenceId, place: Place) {
        self.places.insert(id, place);
    }

    /// Whether a window has sound.
    pub fn is_heard(&self, window: usize) -> bool {
        self.windows.get(window).is_some_and(|w| !is_empty(w))
    }

    /// Where the next window of a sound read in sequence starts, once this one is told.
    pub fn next(&self) -> Option<&SpeechResume> {
        self.next.as_ref()
    }

    /// Settles windows without sound, which nobody decodes.
    pub fn begin(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        for index in 0..self.choices.len() {
            for window in (0..self.windows.len()).filter(|w| is_empty(&self.windows[*w])) {
                let mut written = Written::new(Delta::default(), unspoken(), 0, self.how.temperature);
                written.silent = true;
                self.choices[index].slots[window] = Slot::Settled(Box::new(written));
            }
            acts.extend(self.release(index));
        }
        acts
    }

    /// Takes news in.
    ///
    /// # Errors
    /// The failure of a sequence.
    pub fn push(&mut self, output: Output) -> Result<Vec<Act>, Failure> {
        let Some(place) = self.places.get(&output.id()).copied() else { return Ok(Vec::new()) };
        let index = place.choice as usize;
        let slot = self.choices.get_mut(index).and_then(|c| c.slots.get_mut(place.window));
        let Some(slot) = slot else { return Ok(Vec::new()) };
        match (output, std::mem::replace(slot, Slot::Told)) {
            (Output::Failed(_, failure), _) => return Err(failure),
            (Output::Delta(_, delta), Slot::Decoding { attempt, mut said }) => {
                said.token_ids.extend(delta.token_ids);
                said.logprobs.extend(delta.logprobs);
                *slot = Slot::Decoding { attempt, said };
            }
            (Output::Finished(_, finished), Slot::Decoding { attempt, said }) => {
                return Ok(self.decoded(place, attempt, said, finished));
            }
            (Output::Aligned(_, weights), Slot::Aligning { mut written, n_aligned }) => {
                written.rows = self.rows(place.window, &weights, n_aligned);
                self.choices[index].slots[place.window] = Slot::Settled(written);
                return Ok(self.release(index));
            }
            (_, before) => *slot = before,
        }
        Ok(Vec::new())
    }

    fn decoded(&mut self, place: Place, attempt: usize, said: Delta, finished: Finished) -> Vec<Act> {
        let (window, how) = (&self.windows[place.window], &self.how);
        let temperatures = how.task.fallback.as_ref().map_or(&[][..], |f| &f.temperatures);
        let temperature = temperatures.get(attempt).copied().unwrap_or(how.temperature);
        let mut written = Written::new(said, finished, window.rules.steps.len(), temperature);
        let end = window.end_tokens.first().copied();
        let verdict = how
            .task
            .fallback
            .as_ref()
            .map_or(WindowVerdict::Keep, |fallback| judge(fallback, written.quality(end, how.facts.vocab)));
        let slot = &mut self.choices[place.choice as usize].slots[place.window];
        if let (WindowVerdict::Again, Some(next)) = (verdict, temperatures.get(attempt + 1)) {
            *slot = Slot::Decoding { attempt: attempt + 1, said: Delta::default() };
            return vec![Act::Retry { place, temperature: *next }];
        }
        written.silent = verdict == WindowVerdict::Silent;
        if how.task.word_timestamps && !written.silent && !written.free().is_empty() {
            let (tokens, n_aligned) = written.to_align(&window.tokens);
            if n_aligned > 0 {
                *slot = Slot::Aligning { written: Box::new(written), n_aligned };
                return vec![Act::Align { place, tokens }];
            }
        }
        *slot = Slot::Settled(Box::new(written));
        self.release(place.choice as usize)
    }

    /// Rows at which the free tokens begin, of weights over prompt and tokens.
    fn rows(&self, window: usize, weights: &[f32], n_aligned: usize) -> Vec<usize> {
        let facts = &self.how.facts;
        let sequence = &self.windows[window];
        let n_rows = sequence.cross.map_or(0, |c| c.n_rows as usize);
        let n_heads = facts.alignment_heads.len();
        let n_tokens = weights.len().checked_div(n_heads * n_rows).unwrap_or(0);
        let skipped = n_tokens.saturating_sub(n_aligned) * n_rows;
        let heads = weights.chunks_exact((n_tokens * n_rows).max(1));
        let free: Vec<f32> = heads.flat_map(|head| &head[skipped..]).copied().collect();
        let (start_s, end_s) = span(sequence);
        let heard = ((end_s - start_s) * 1000.0 / f64::from(facts.row_ms.max(1))).floor() as usize;
        let weights = AttentionWeights { values: &free, n_heads, n_tokens: n_aligned, n_rows };
        first_rows(weights, heard, facts.median)
    }

    /// Everything of a choice that is settled and in turn.
    fn release(&mut self, index: usize) -> Vec<Act> {
        let mut acts = Vec::new();
        while let Some(told) = self.tell_next(index) {
            acts.push(Act::Tell(told));
        }
        acts
    }

    /// A window that the next one overlaps waits for it.
    fn tell_next(&mut self, index: usize) -> Option<Told> {
        let choice = self.choices.get(index)?;
        let window = choice.next;
        let Slot::Settled(written) = choice.slots.get(window)? else { return None };
        let free = written.free();
        let first = choice.told_before.min(free.len());
        let (mut kept, mut told_before) = (first..free.len(), 0);
        if window + 1 < choice.slots.len() && overlap(&self.windows, window + 1) {
            let Slot::Settled(next) = &choice.slots[window + 1] else { return None };
            (kept.end, told_before) = self.join(written, first, next);
        }
        let told = self.told(Place { choice: index as u32, window }, written, &kept);
        let next = self.how.task.long_form == LongForm::Sequential;
        let next = next.then(|| self.go_on(window, written)).flatten();
        let choice = &mut self.choices[index];
        choice.slots[window] = Slot::Told;
        (choice.next, choice.told_before) = (window + 1, told_before);
        self.next = next;
        Some(told)
    }

    /// Where the text of `left`, from free token `first` on, ends, and how many free tokens of `right` it has told.
    fn join(&self, left: &Written, first: usize, right: &Written) -> (usize, usize) {
        let texts = |w: &Written, first: usize| -> Vec<usize> {
            let is_text = |i: &usize| self.how.facts.first_time.is_none_or(|t| w.free()[*i] < t);
            (first..w.free().len()).filter(is_text).collect()
        };
        if left.silent || right.silent {
            return (left.free().len(), 0);
        }
        let (l, r) = (texts(left, first), texts(right, 0));
        let ids = |w: &Written, at: &[usize]| at.iter().map(|i| w.free()[*i]).collect::<Vec<u32>>();
        let (keep, skip) = seam(&ids(left, &l), &ids(right, &r));
        let end = l.get(keep).copied().unwrap_or(left.free().len());
        (end, r.get(skip).copied().unwrap_or(right.free().len()))
    }

    fn told(&self, place: Place, written: &Written, kept: &Range<usize>) -> Told {
        let sequence = &self.windows[place.window];
        if written.silent {
            let (delta, finished) = (written.delta(&(0..0), String::new()), written.finished.clone());
            return Told { place, delta, finished, segments: Vec::new() };
        }
        let settled = self.settled(place.window, written);
        let (parts, kept): (Vec<Part>, Range<usize>) = match &settled {
            Some(settled) => {
                let end = settled.segments.last().map_or(0, |s| s.tokens.end);
                (written.settled_parts(settled, &self.how.facts), 0..end)
            }
            None => (written.parts(sequence, kept), kept.clone()),
        };
        let named = self.language(written);
        let teller = Teller {
            tokenizer: &self.how.tokenizer,
            offset_s: span(sequence).0,
            language: self.how.task.language.as_deref().or(named.as_deref()),
        };
        let segments = parts.iter().map(|part| written.tell(part, teller)).collect();
        let text = self.how.tokenizer.decode(written.free().get(kept.clone()).unwrap_or_default());
        Told { place, delta: written.delta(&kept, text), finished: written.finished.clone(), segments }
    }

    /// What a window read in sequence settles; `None`: it is not.
    fn settled(&self, window: usize, written: &Written) -> Option<DecodedWindow> {
        let sequential = self.how.task.long_form == LongForm::Sequential;
        Some(self.window(window).filter(|_| sequential)?.settle(written.free()))
    }

    fn window(&self, window: usize) -> Option<SequentialWindow> {
        let (start_s, _) = span(&self.windows[window]);
        Some(SequentialWindow {
            start_ms: (start_s * 1000.0).round() as u32,
            duration_ms: self.how.duration_ms,
            window_ms: self.how.facts.window_ms,
            first_time: self.how.facts.first_time?,
        })
    }

    fn go_on(&self, window: usize, written: &Written) -> Option<SpeechResume> {
        let frame = self.window(window)?;
        let (task, most) = (&self.how.task, self.how.facts.max_previous);
        let before = task.resume.as_ref().map_or(&[][..], |r| &r.previous);
        if written.silent {
            return Some(resume(frame.skip()?, before.to_vec(), written.temperature));
        }
        let settled = frame.settle(written.free());
        let previous = remember(before, written.free(), &settled, (frame.first_time, most));
        Some(resume(settled.next_ms?, previous, written.temperature))
    }

    /// The language that the first generated token names, if it was left to the model.
    fn language(&self, written: &Written) -> Option<String> {
        let steps = &self.windows.first()?.rules.steps;
        steps.first().filter(|allowed| allowed.len() > 1)?;
        let token = self.how.tokenizer.token(*written.tokens.first()?)?;
        Some(token.strip_prefix("<|")?.strip_suffix("|>")?.to_owned())
    }
}

/// Length of the sound of a request, in milliseconds.
pub fn duration_ms(items: &[EncodedItem]) -> u32 {
    let ms = items.iter().find_map(|item| match &item.extent {
        Extent::Windows { duration_ms, .. } => Some(*duration_ms),
        _ => None,
    });
    u32::try_from(ms.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// Whether the window before `window` heard its beginning too.
fn overlap(windows: &[PreparedSequence], window: usize) -> bool {
    span(&windows[window - 1]).1 > span(&windows[window]).0
}

/// Whether a window has no sound. A sound of no length has one window all the same.
fn is_empty(window: &PreparedSequence) -> bool {
    let (start_s, end_s) = span(window);
    start_s > 0.0 && end_s <= start_s
}

fn unspoken() -> Finished {
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
