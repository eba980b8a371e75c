//! Pieces of an answer become OpenAI's objects: one completion, or chunks as they come.

use super::super::sse;
use super::super::usage::Usage;
use super::shape::{
    AnswerMessage, Choice, Chunk, ChunkChoice, ChunkDelta, Completion, Logprobs, TokenLogprob,
};
use crate::orchestrate::{Answer, Piece};
use bytes::Bytes;
use futures::{Stream, stream};
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_core::Failure;
use triptych_core::sampling::FinishReason;
use triptych_proto::convert::finish_reason;
use triptych_proto::v1;

/// What every object of one answer carries.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    id: String,
    created: u64,
    model: String,
}

impl Stamp {
    pub(super) fn of(answer: &Answer) -> Self {
        let id = answer.request_id.to_string();
        Self {
            id: format!("chatcmpl-{}", id.strip_prefix("req-").unwrap_or(&id)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            model: answer.model.to_string(),
        }
    }
}

/// OpenAI's word; the orchestrator has checked the number.
fn finish_word(delta: &v1::Delta) -> Option<&'static str> {
    finish_reason(delta.finish_reason).ok().flatten().map(FinishReason::as_str)
}

fn logprobs(tokens: Vec<v1::ChosenToken>) -> Option<Logprobs> {
    let content: Vec<TokenLogprob> = tokens.into_iter().map(Into::into).collect();
    (!content.is_empty()).then_some(Logprobs { content, refusal: None })
}

/// A whole answer, put together.
pub(super) struct Collected(Vec<Collecting>);

#[derive(Default)]
struct Collecting {
    text: String,
    tokens: Vec<v1::ChosenToken>,
    finish: Option<&'static str>,
}

impl Collected {
    pub(super) fn new(n_choices: u32) -> Self {
        Self((0..n_choices).map(|_| Collecting::default()).collect())
    }

    pub(super) fn add(&mut self, delta: v1::Delta) {
        // The orchestrator lets no other choice through.
        let Some(choice) = self.0.get_mut(delta.choice as usize) else { return };
        choice.finish = finish_word(&delta).or(choice.finish);
        choice.text.push_str(&delta.text);
        choice.tokens.extend(delta.logprobs);
    }

    pub(super) fn into_completion(self, stamp: Stamp, summary: v1::Summary) -> Completion {
        let choices = self.0.into_iter().zip(0..).map(|(choice, index)| Choice {
            index,
            message: AnswerMessage { role: "assistant", content: choice.text, refusal: None },
            logprobs: logprobs(choice.tokens),
            finish_reason: choice.finish.unwrap_or(FinishReason::Stop.as_str()),
        });
        Completion {
            id: stamp.id,
            object: "chat.completion",
            created: stamp.created,
            model: stamp.model,
            choices: choices.collect(),
            usage: summary.usage.unwrap_or_default().into(),
            system_fingerprint: None,
        }
    }
}

/// An answer as events.
pub(super) struct Streamed {
    stamp: Stamp,
    include_usage: bool,
    /// Per choice: whether its role went out.
    introduced: Vec<bool>,
}

impl Streamed {
    pub(super) fn new(stamp: Stamp, include_usage: bool, n_choices: u32) -> Self {
        Self { stamp, include_usage, introduced: vec![false; n_choices as usize] }
    }

    /// `first`, and what follows it. A failure is an event without `[DONE]` after it.
    pub(super) fn events(self, first: Piece, answer: Answer) -> impl Stream<Item = Bytes> + Send + 'static {
        stream::unfold((self, Some(Ok(first)), answer), |(mut streamed, first, mut answer)| async move {
            let piece: Result<Piece, Failure> = match first {
                Some(piece) => piece,
                None => answer.next().await?,
            };
            let event = match piece {
                Ok(Piece::Delta(delta)) => streamed.delta(delta),
                Ok(Piece::Summary(summary)) => streamed.end(summary),
                Err(failure) => sse::error(&failure),
            };
            Some((event, (streamed, None, answer)))
        })
    }

    fn delta(&mut self, delta: v1::Delta) -> Bytes {
        let finish_reason = finish_word(&delta);
        let introduced = self.introduced.get_mut(delta.choice as usize);
        let role = introduced.and_then(|done| (!std::mem::replace(done, true)).then_some("assistant"));
        let choice = ChunkChoice {
            index: delta.choice,
            // The end of a choice may come without text.
            delta: ChunkDelta {
                role,
                content: Some(delta.text).filter(|text| role.is_some() || !text.is_empty()),
            },
            logprobs: logprobs(delta.logprobs),
            finish_reason,
        };
        let usage = self.include_usage.then_some(None);
        sse::event(&self.chunk(vec![choice], usage))
    }

    fn end(&mut self, summary: v1::Summary) -> Bytes {
        let mut events = Vec::new();
        if self.include_usage {
            let usage = Usage::from(summary.usage.unwrap_or_default());
            events.extend_from_slice(&sse::event(&self.chunk(Vec::new(), Some(Some(usage)))));
        }
        events.extend_from_slice(&sse::done());
        events.into()
    }

    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Option<Usage>>) -> Chunk {
        let Stamp { id, created, model } = self.stamp.clone();
        Chunk {
            id,
            object: "chat.completion.chunk",
            created,
            model,
            choices,
            usage,
            system_fingerprint: None,
        }
    }
}
