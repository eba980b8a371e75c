//! Pieces of one or several answers become OpenAI's completion: whole, or in pieces as they come.
//!
//! Choice `i` of prompt `p` has index `p · n + i`.

use super::super::sse;
use super::super::usage::Usage;
use super::shape::{Choice, Completion, Logprobs, Prompts};
use crate::orchestrate::{Answer, Piece};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_core::Failure;
use triptych_core::sampling::FinishReason;
use triptych_proto::convert::finish_reason;
use triptych_proto::v1;

/// What every object of one response carries.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    id: String,
    created: u64,
    model: String,
}

impl Stamp {
    /// That of the first answer.
    pub(super) fn of(answers: &[Answer]) -> Result<Self, Failure> {
        let first = answers.first().ok_or_else(|| Failure::internal("a completion without a prompt"))?;
        let id = first.request_id.to_string();
        Ok(Self {
            id: format!("cmpl-{}", id.strip_prefix("req-").unwrap_or(&id)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            model: first.model.to_string(),
        })
    }

    fn completion(&self, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Completion {
        let Self { id, created, model } = self.clone();
        Completion { id, object: "text_completion", created, model, choices, usage, system_fingerprint: None }
    }
}

/// OpenAI's word; the orchestrator has checked the number.
fn finish_word(delta: &v1::Delta) -> Option<&'static str> {
    finish_reason(delta.finish_reason).ok().flatten().map(FinishReason::as_str)
}

/// A whole response, put together.
pub(super) struct Collected {
    choices: Vec<Collecting>,
    n: usize,
    usage: Usage,
}

#[derive(Default)]
struct Collecting {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::ChosenToken>,
    finish: Option<&'static str>,
    prompts: Prompts,
}

impl Collected {
    /// Nothing yet, of `n` answers to each of `n_prompts`.
    pub(super) fn new([n_prompts, n]: [usize; 2]) -> Self {
        let choices = (0..n_prompts * n).map(|_| Collecting::default()).collect();
        Self { choices, n, usage: Usage::default() }
    }

    pub(super) fn add(&mut self, prompt: usize, delta: v1::Delta) {
        // The orchestrator lets no other choice through.
        let Some(choice) = self.choices.get_mut(prompt * self.n + delta.choice as usize) else { return };
        choice.finish = finish_word(&delta).or(choice.finish);
        choice.text.push_str(&delta.text);
        choice.token_ids.extend(delta.token_ids);
        choice.logprobs.extend(delta.logprobs);
    }

    pub(super) fn end(&mut self, prompt: usize, summary: v1::Summary) {
        self.usage.add(&summary.usage.unwrap_or_default());
        for choice in self.choices.iter_mut().skip(prompt * self.n).take(self.n) {
            choice.prompts = Prompts::of(&summary);
        }
    }

    pub(super) fn into_completion(self, stamp: Stamp) -> Completion {
        let choice = |(index, choice): (usize, Collecting)| Choice {
            index,
            text: choice.text,
            logprobs: Logprobs::of(choice.logprobs, 0),
            finish_reason: Some(choice.finish.unwrap_or(FinishReason::Stop.as_str())),
            token_ids: choice.token_ids,
            prompts: choice.prompts,
        };
        let choices = self.choices.into_iter().enumerate().map(choice).collect();
        stamp.completion(choices, Some(Some(self.usage)))
    }
}

/// A response as events.
pub(super) struct Streamed {
    stamp: Stamp,
    include_usage: bool,
    n: usize,
    /// Characters of text so far, by choice.
    n_chars: Vec<usize>,
    n_open: usize,
    usage: Usage,
}

impl Streamed {
    /// Nothing yet, of `n` answers to each of `n_prompts`.
    pub(super) fn new(stamp: Stamp, include_usage: bool, [n_prompts, n]: [usize; 2]) -> Self {
        let n_chars = vec![0; n_prompts * n];
        Self { stamp, include_usage, n, n_chars, n_open: n_prompts, usage: Usage::default() }
    }

    /// Events for all pieces. A failure is the last event, without `[DONE]` after it.
    pub(super) fn events(
        self,
        pieces: impl Stream<Item = (usize, Result<Piece, Failure>)> + Send + 'static,
    ) -> impl Stream<Item = Bytes> + Send + 'static {
        let start = Some((self, Box::pin(pieces)));
        futures::stream::unfold(start, |state| async move {
            let (mut streamed, mut pieces) = state?;
            let (prompt, piece) = pieces.next().await?;
            match piece {
                Ok(Piece::Delta(delta)) => Some((streamed.delta(prompt, delta), Some((streamed, pieces)))),
                Ok(Piece::Summary(summary)) => {
                    Some((streamed.end(prompt, &summary), Some((streamed, pieces))))
                }
                Err(failure) => Some((sse::error(&failure), None)),
            }
        })
    }

    fn delta(&mut self, prompt: usize, delta: v1::Delta) -> Bytes {
        let index = prompt * self.n + delta.choice as usize;
        let finish_reason = finish_word(&delta);
        let offset = self.n_chars.get(index).copied().unwrap_or_default();
        if let Some(n_chars) = self.n_chars.get_mut(index) {
            *n_chars += delta.text.chars().count();
        }
        let logprobs = Logprobs::of(delta.logprobs, offset);
        let prompts = Prompts::default();
        let choice =
            Choice { index, text: delta.text, logprobs, finish_reason, token_ids: delta.token_ids, prompts };
        sse::event(&self.stamp.completion(vec![choice], self.include_usage.then_some(None)))
    }

    /// The prompts are known with the summary: a piece without text tells them.
    fn end(&mut self, prompt: usize, summary: &v1::Summary) -> Bytes {
        self.usage.add(&summary.usage.unwrap_or_default());
        self.n_open = self.n_open.saturating_sub(1);
        let mut events = Vec::new();
        let prompts = Prompts::of(summary);
        if prompts.encoder_prompt.is_some() || prompts.decoder_prompt.is_some() {
            let choice =
                |i| Choice { index: prompt * self.n + i, prompts: prompts.clone(), ..Choice::default() };
            let told =
                self.stamp.completion((0..self.n).map(choice).collect(), self.include_usage.then_some(None));
            events.extend_from_slice(&sse::event(&told));
        }
        if self.n_open == 0 {
            if self.include_usage {
                let usage = self.stamp.completion(Vec::new(), Some(Some(self.usage)));
                events.extend_from_slice(&sse::event(&usage));
            }
            events.extend_from_slice(&sse::done());
        }
        events.into()
    }
}
