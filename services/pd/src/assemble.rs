//! News of several sequences, put back in the order of the answer.
//!
//! The windows of a long sound run at the same time; the answer is what they say one after the other. News of
//! a later window wait until the earlier ones have ended.

use crate::speech::{Told, WindowSegments};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::sampling::FinishReason;
use triptych_core::{Failure, lifetime::StageTimes};
use triptych_engine::{ChosenToken, Delta, Finished, Output, SequenceId};
use triptych_models::prompt::PreparedSequence;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// Where a sequence stands in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which answer.
    pub choice: u32,
    /// Which window of it.
    pub window: usize,
}

/// Whether the client asked for log-probabilities; speech computes them in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logprobs {
    /// Report them.
    Report,
    /// Keep them.
    Hide,
}

/// Puts news in order.
pub struct Assembler {
    places: HashMap<SequenceId, Place>,
    choices: Vec<Choice>,
    tokenizer: Arc<Tokenizer>,
    logprobs: Logprobs,
    totals: Totals,
    /// Answers that another worker ended: their tokens count, their times do not.
    had_ended: HashSet<u32>,
}

struct Choice {
    /// The window whose news are passed on.
    current: usize,
    windows: Vec<Window>,
    hit_length: bool,
}

struct Window {
    segments: WindowSegments,
    /// What takes their place, when it was found elsewhere.
    given: Option<Vec<v1::Segment>>,
    held: VecDeque<Output>,
    /// Leading generated tokens that are task tokens, if the first names the language; else 0.
    n_steps: usize,
    first_token: Option<u32>,
}

#[derive(Default)]
struct Totals {
    prompt_tokens: usize,
    cached_tokens: usize,
    drafted_tokens: usize,
    accepted_tokens: usize,
    completion_tokens: usize,
    queue: Duration,
    prefill: Duration,
    first_token: Option<Instant>,
    per_token: Duration,
    ended: usize,
}

impl Assembler {
    /// Expects news of `n` answers, each over all of `windows`.
    pub fn new(windows: &[PreparedSequence], n: u32, tokenizer: Arc<Tokenizer>, logprobs: Logprobs) -> Self {
        let window = |w: &PreparedSequence| Window {
            segments: WindowSegments::new(w),
            given: None,
            held: VecDeque::new(),
            n_steps: w
                .rules
                .steps
                .first()
                .map_or(0, |first| if first.len() > 1 { w.rules.steps.len() } else { 0 }),
            first_token: None,
        };
        let choice =
            |_| Choice { current: 0, windows: windows.iter().map(window).collect(), hit_length: false };
        Self {
            places: HashMap::new(),
            choices: (0..n).map(choice).collect(),
            tokenizer,
            logprobs,
            totals: Totals::default(),
            had_ended: HashSet::new(),
        }
    }

    /// Says that an answer had ended elsewhere.
    pub fn had_ended(&mut self, choice: u32) {
        self.had_ended.insert(choice);
    }

    /// Says at which temperature windows are decoded.
    pub fn at(mut self, temperature: f32) -> Self {
        for window in self.choices.iter_mut().flat_map(|c| &mut c.windows) {
            window.segments.set_temperature(temperature);
        }
        self
    }

    /// Says where a sequence stands.
    pub fn place(&mut self, id: SequenceId, place: Place) {
        self.places.insert(id, place);
    }

    /// Takes in a whole window that was put together elsewhere, and gives out what is in turn.
    ///
    /// # Errors
    /// None of its own.
    pub fn tell(&mut self, told: Told) -> Result<Vec<v1::Delta>, Failure> {
        let id = self.places.iter().find(|(_, place)| **place == told.place).map(|(id, _)| *id);
        let choice = self.choices.get_mut(told.place.choice as usize);
        let window = choice.and_then(|c| c.windows.get_mut(told.place.window));
        let (Some(id), Some(window)) = (id, window) else { return Ok(Vec::new()) };
        window.given = Some(told.segments);
        let mut deltas = self.push(Output::Delta(id, told.delta))?;
        deltas.extend(self.push(Output::Finished(id, told.finished))?);
        Ok(deltas)
    }

    /// Whether every sequence has ended.
    pub fn is_complete(&self) -> bool {
        self.totals.ended == self.places.len()
    }

    /// Takes news in and gives out what is in turn.
    ///
    /// # Errors
    /// The failure of a sequence: the answer cannot be completed.
    pub fn push(&mut self, output: Output) -> Result<Vec<v1::Delta>, Failure> {
        let Some(place) = self.places.get(&output.id()).copied() else { return Ok(Vec::new()) };
        match output {
            Output::Failed(_, failure) => return Err(failure),
            Output::Finished(_, ref finished) => {
                self.totals.add(finished, place);
                if !self.had_ended.contains(&place.choice) {
                    self.totals.time(finished);
                }
            }
            Output::Delta(..) | Output::Aligned(..) => {}
        }
        let Some(choice) = self.choices.get_mut(place.choice as usize) else { return Ok(Vec::new()) };
        if let Some(window) = choice.windows.get_mut(place.window) {
            window.held.push_back(output);
        }
        Ok(self.release(place.choice))
    }

    /// Everything of a choice that is in turn.
    fn release(&mut self, index: u32) -> Vec<v1::Delta> {
        let mut deltas = Vec::new();
        let (tokenizer, logprobs) = (&self.tokenizer, self.logprobs);
        let Some(choice) = self.choices.get_mut(index as usize) else { return deltas };
        while let Some(output) = choice.windows.get_mut(choice.current).and_then(|w| w.held.pop_front()) {
            let mut delta = match output {
                Output::Delta(_, delta) => choice.pass(delta, logprobs),
                Output::Finished(_, finished) => choice.end_window(&finished, tokenizer),
                Output::Failed(..) | Output::Aligned(..) => continue,
            };
            delta.choice = index;
            deltas.push(delta);
        }
        deltas
    }

    /// The language of the speech, if the model named one.
    pub fn language(&self) -> Option<String> {
        let window = self.choices.first()?.windows.first()?;
        let token = self.tokenizer.token(window.first_token.filter(|_| window.n_steps > 0)?)?;
        Some(token.strip_prefix("<|")?.strip_suffix("|>")?.to_owned())
    }

    /// Token counts and times of the PD worker's stages. `arrived`: when the request did.
    pub fn totals(&self, arrived: Instant) -> (v1::Usage, StageTimes) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let usage = v1::Usage {
            prompt_tokens: count(self.totals.prompt_tokens),
            completion_tokens: count(self.totals.completion_tokens),
            cached_tokens: count(self.totals.cached_tokens),
            drafted_tokens: count(self.totals.drafted_tokens),
            accepted_tokens: count(self.totals.accepted_tokens),
        };
        let first_token =
            self.totals.first_token.map(|t| t.saturating_duration_since(arrived)).unwrap_or_default();
        let times = StageTimes {
            queue: self.totals.queue,
            prefill: self.totals.prefill,
            first_token,
            per_token: self.totals.per_token,
            ..StageTimes::default()
        };
        (usage, times)
    }
}

impl Choice {
    fn pass(&mut self, delta: Delta, logprobs: Logprobs) -> v1::Delta {
        if let Some(window) = self.windows.get_mut(self.current) {
            window.segments.push(&delta.token_ids, &delta.logprobs);
            window.first_token = window.first_token.or(delta.token_ids.first().copied());
        }
        let reported = if logprobs == Logprobs::Report { delta.logprobs } else { Vec::new() };
        v1::Delta {
            text: delta.text,
            token_ids: delta.token_ids,
            logprobs: reported.into_iter().map(chosen_token).collect(),
            ..v1::Delta::default()
        }
    }

    fn end_window(&mut self, finished: &Finished, tokenizer: &Tokenizer) -> v1::Delta {
        self.hit_length |= finished.reason == FinishReason::Length;
        let mut delta = v1::Delta::default();
        if let Some(window) = self.windows.get_mut(self.current).filter(|w| w.segments.is_speech()) {
            let segments = std::mem::take(&mut window.segments);
            delta.segments = match window.given.take() {
                Some(given) => given,
                None => segments.finish(tokenizer, finished.no_speech_prob.unwrap_or(0.0)),
            };
        }
        self.current += 1;
        if self.current == self.windows.len() {
            let reason = if self.hit_length { FinishReason::Length } else { FinishReason::Stop };
            delta.finish_reason = v1::FinishReason::from(reason).into();
        }
        delta
    }
}

impl Totals {
    fn add(&mut self, finished: &Finished, place: Place) {
        self.ended += 1;
        self.completion_tokens += finished.n_generated;
        self.drafted_tokens += finished.n_drafted;
        self.accepted_tokens += finished.n_accepted;
        if place.choice == 0 {
            self.prompt_tokens += finished.n_prompt;
            self.cached_tokens += finished.n_cached;
        }
    }

    fn time(&mut self, finished: &Finished) {
        let times = finished.times;
        if self.first_token.is_none_or(|t| times.first_token < t) {
            self.first_token = Some(times.first_token);
            (self.queue, self.prefill) = (times.queue, times.prefill);
            let gaps = u32::try_from(finished.n_generated.saturating_sub(1)).unwrap_or(u32::MAX);
            let decoding = times.last_token.saturating_duration_since(times.first_token);
            self.per_token = decoding.checked_div(gaps).unwrap_or_default();
        }
    }
}

fn chosen_token(token: ChosenToken) -> v1::ChosenToken {
    v1::ChosenToken {
        chosen: Some(token.chosen.into()),
        top: token.top.into_iter().map(Into::into).collect(),
    }
}
