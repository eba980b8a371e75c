//! Outputs of several sequences, put back in the order of the response.
//!
//! The windows of a long audio clip run at the same time; the completion is their output in order. Outputs of a
//! later window wait until the earlier ones have ended.

use crate::request::ChoiceWindow;
use crate::speech::{SegmentCollector, SettledWindow};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::sampling::FinishReason;
use triptych_core::{EncodedItem, Failure, Modality, lifetime::StageTimes};
use triptych_engine::{ChosenToken, Delta, Finished, Output, SequenceId};
use triptych_models::prompt::PreparedSequence;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

/// Sending of log-probabilities; speech computes them in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobReporting {
    /// Send them.
    Report,
    /// Drop them.
    Hide,
}

/// Puts the outputs of sequences in order.
pub struct Assembler {
    positions: HashMap<SequenceId, ChoiceWindow>,
    choices: Vec<AssembledChoice>,
    tokenizer: Arc<Tokenizer>,
    logprobs: LogprobReporting,
    totals: UsageTotals,
    /// Choices that another worker ended: their tokens count, their times do not.
    ended_elsewhere: HashSet<u32>,
}

struct AssembledChoice {
    /// Window whose outputs are released.
    current: usize,
    windows: Vec<AssembledWindow>,
    hit_length: bool,
    /// Tokens of the prompt with log-probabilities so far; the first of a prompt has none.
    n_scored: usize,
}

struct AssembledWindow {
    segments: SegmentCollector,
    /// Segments that a window buffer settled; they replace the collected ones.
    settled_segments: Option<Vec<v1::Segment>>,
    buffer: VecDeque<Output>,
    /// Leading generated tokens that are task tokens, if the first names the language; else 0.
    n_steps: usize,
    first_token: Option<u32>,
}

#[derive(Default)]
struct UsageTotals {
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
    /// Expects outputs of `n` choices, each over all of `windows`.
    pub fn new(
        windows: &[PreparedSequence],
        n: u32,
        tokenizer: Arc<Tokenizer>,
        logprobs: LogprobReporting,
    ) -> Self {
        let window = |w: &PreparedSequence| AssembledWindow {
            segments: SegmentCollector::new(w),
            settled_segments: None,
            buffer: VecDeque::new(),
            n_steps: w
                .rules
                .steps
                .first()
                .map_or(0, |first| if first.len() > 1 { w.rules.steps.len() } else { 0 }),
            first_token: None,
        };
        let choice = |_| AssembledChoice {
            current: 0,
            windows: windows.iter().map(window).collect(),
            hit_length: false,
            n_scored: 1,
        };
        Self {
            positions: HashMap::new(),
            choices: (0..n).map(choice).collect(),
            tokenizer,
            logprobs,
            totals: UsageTotals::default(),
            ended_elsewhere: HashSet::new(),
        }
    }

    /// Counts the tokens of encoder texts as the prompt's, as vLLM does.
    pub fn with_encoder_texts(mut self, items: &[EncodedItem]) -> Self {
        let texts = items.iter().filter(|item| item.modality == Modality::Text);
        self.totals.prompt_tokens += texts.map(|item| item.n_tokens as usize).sum::<usize>();
        self
    }

    /// Marks a choice as ended on another worker.
    pub fn ended_elsewhere(&mut self, choice: u32) {
        self.ended_elsewhere.insert(choice);
    }

    /// Sets the temperature at which windows are decoded.
    pub fn at(mut self, temperature: f32) -> Self {
        for window in self.choices.iter_mut().flat_map(|c| &mut c.windows) {
            window.segments.set_temperature(temperature);
        }
        self
    }

    /// Registers the position of a sequence.
    pub fn position(&mut self, id: SequenceId, position: ChoiceWindow) {
        self.positions.insert(id, position);
    }

    /// Takes in a settled window, and releases what is in order.
    ///
    /// # Errors
    /// None of its own.
    pub fn push_window(&mut self, settled: SettledWindow) -> Result<Vec<v1::Delta>, Failure> {
        let id =
            self.positions.iter().find(|(_, position)| **position == settled.position).map(|(id, _)| *id);
        let choice = self.choices.get_mut(settled.position.choice as usize);
        let window = choice.and_then(|c| c.windows.get_mut(settled.position.window));
        let (Some(id), Some(window)) = (id, window) else { return Ok(Vec::new()) };
        window.settled_segments = Some(settled.segments);
        let mut deltas = self.push(Output::Delta(id, settled.delta))?;
        deltas.extend(self.push(Output::Finished(id, settled.finished))?);
        Ok(deltas)
    }

    /// True if every sequence has ended.
    pub fn is_complete(&self) -> bool {
        self.totals.ended == self.positions.len()
    }

    /// Takes in an output, and releases what is in order.
    ///
    /// # Errors
    /// The failure of a sequence: the response cannot be completed.
    pub fn push(&mut self, output: Output) -> Result<Vec<v1::Delta>, Failure> {
        let Some(position) = self.positions.get(&output.id()).copied() else { return Ok(Vec::new()) };
        match output {
            Output::Failed(_, failure) => return Err(failure),
            Output::Finished(_, ref finished) => {
                self.totals.add(finished, position);
                if !self.ended_elsewhere.contains(&position.choice) {
                    self.totals.time(finished);
                }
            }
            Output::Delta(..) | Output::Aligned(..) | Output::Rows(..) => {}
        }
        let Some(choice) = self.choices.get_mut(position.choice as usize) else { return Ok(Vec::new()) };
        if let Some(window) = choice.windows.get_mut(position.window) {
            window.buffer.push_back(output);
        }
        Ok(self.release(position.choice))
    }

    /// Releases the outputs of a choice that are in order.
    fn release(&mut self, index: u32) -> Vec<v1::Delta> {
        let mut deltas = Vec::new();
        let tokenizer = &self.tokenizer;
        let logprobs = self.logprobs;
        let Some(choice) = self.choices.get_mut(index as usize) else { return deltas };
        while let Some(output) = choice.windows.get_mut(choice.current).and_then(|w| w.buffer.pop_front()) {
            let mut delta = match output {
                Output::Delta(_, delta) => choice.pass(delta, logprobs),
                Output::Finished(_, finished) => choice.end_window(&finished, tokenizer),
                Output::Failed(..) | Output::Aligned(..) | Output::Rows(..) => continue,
            };
            delta.choice = index;
            deltas.push(delta);
        }
        deltas
    }

    /// Language of the speech, if the model named one.
    pub fn language(&self) -> Option<String> {
        let window = self.choices.first()?.windows.first()?;
        let token = self.tokenizer.token(window.first_token.filter(|_| window.n_steps > 0)?)?;
        Some(token.strip_prefix("<|")?.strip_suffix("|>")?.to_owned())
    }

    /// Token counts and stage times of the PD worker. `arrived`: time at which the request arrived.
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

impl AssembledChoice {
    fn pass(&mut self, delta: Delta, logprobs: LogprobReporting) -> v1::Delta {
        if let Some(window) = self.windows.get_mut(self.current) {
            window.segments.push(&delta.token_ids, &delta.logprobs);
            window.first_token = window.first_token.or(delta.token_ids.first().copied());
        }
        let prompt_offset = u32::try_from(self.n_scored).unwrap_or(u32::MAX);
        self.n_scored += delta.prompt_logprobs.len();
        let reported = if logprobs == LogprobReporting::Report { delta.logprobs } else { Vec::new() };
        v1::Delta {
            text: delta.text,
            token_ids: delta.token_ids,
            logprobs: reported.into_iter().map(chosen_token).collect(),
            prompt_offset: if delta.prompt_logprobs.is_empty() { 0 } else { prompt_offset },
            prompt_logprobs: delta.prompt_logprobs.into_iter().map(Into::into).collect(),
            ..v1::Delta::default()
        }
    }

    fn end_window(&mut self, finished: &Finished, tokenizer: &Tokenizer) -> v1::Delta {
        self.hit_length |= finished.reason == FinishReason::Length;
        let mut delta = v1::Delta::default();
        if let Some(window) = self.windows.get_mut(self.current).filter(|w| w.segments.is_speech()) {
            let segments = std::mem::take(&mut window.segments);
            delta.segments = match window.settled_segments.take() {
                Some(settled_segments) => settled_segments,
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

impl UsageTotals {
    fn add(&mut self, finished: &Finished, position: ChoiceWindow) {
        self.ended += 1;
        self.completion_tokens += finished.n_generated;
        self.drafted_tokens += finished.n_drafted;
        self.accepted_tokens += finished.n_accepted;
        if position.choice == 0 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::{ContentKey, DType, Extent, Fingerprint};

    #[test]
    fn tokens_of_encoder_texts_are_tokens_of_the_prompt() {
        let item = |modality, n_tokens| EncodedItem {
            key: ContentKey::from_bytes([1; 32]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            modality,
            n_tokens,
            hidden: 8,
            dtype: DType::F32,
            extent: Extent::Tokens,
            checksum: [3; 32],
        };
        let json = r#"{"version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0}}}"#;
        let tokenizer = Arc::new(Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer"));
        let items = [item(Modality::Text, 7), item(Modality::Image, 100)];
        let assembler = Assembler::new(&[], 1, tokenizer, LogprobReporting::Hide).with_encoder_texts(&items);
        assert_eq!(assembler.totals(Instant::now()).0.prompt_tokens, 7, "an image is no part of the prompt");
    }
}
