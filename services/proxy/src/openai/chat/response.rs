//! OpenAI's objects from the pieces of a chat answer: one completion, or a stream of chunks.

use super::super::prompt_logprobs::PromptLogprobs;
use super::super::response_head::ResponseHead;
use super::super::sse;
use super::super::token_logprob::TokenLogprob;
use super::super::usage::Usage;
use super::schema::{
    AnswerMessage, Call, Choice, Chunk, ChunkChoice, ChunkDelta, Completion, Logprobs, Reasoning,
};
use crate::orchestrate::{Answer, Piece};
use bytes::Bytes;
use futures::{Stream, stream};
use triptych_core::Failure;
use triptych_core::sampling::FinishReason;
use triptych_proto::convert::finish_name;
use triptych_proto::v1;

fn logprobs(tokens: Vec<v1::ChosenToken>) -> Option<Logprobs> {
    let content: Vec<TokenLogprob> = tokens.into_iter().map(Into::into).collect();
    (!content.is_empty()).then_some(Logprobs { content, refusal: None })
}

/// Collects a whole answer.
pub(super) struct ChatCollector {
    choices: Vec<CollectedChoice>,
    prompt_logprobs: PromptLogprobs,
}

#[derive(Default)]
struct CollectedChoice {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
    tokens: Vec<v1::ChosenToken>,
    finish: Option<&'static str>,
}

impl ChatCollector {
    pub(super) fn new(n_choices: u32) -> Self {
        Self {
            choices: (0..n_choices).map(|_| CollectedChoice::default()).collect(),
            prompt_logprobs: PromptLogprobs::default(),
        }
    }

    pub(super) fn add(&mut self, delta: v1::Delta) {
        self.prompt_logprobs.add(&delta);
        // The orchestrator lets no other choice through.
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return };
        choice.finish = finish_name(delta.finish_reason).or(choice.finish);
        choice.text.push_str(&delta.text);
        choice.reasoning.push_str(&delta.reasoning);
        for call in delta.tool_calls {
            match choice.calls.get_mut(call.index as usize) {
                Some(begun) => begun.function.arguments.push_str(&call.arguments),
                None => choice.calls.push(Call { index: None, ..call.into() }),
            }
        }
        choice.tokens.extend(delta.logprobs);
    }

    /// The completion; with log-probabilities of the prompt, if they were asked for.
    pub(super) fn into_completion(
        self,
        head: ResponseHead,
        summary: v1::Summary,
        has_prompt_logprobs: bool,
    ) -> Completion {
        let choices = self.choices.into_iter().zip(0..).map(|(mut choice, index)| Choice {
            index,
            logprobs: logprobs(std::mem::take(&mut choice.tokens)),
            finish_reason: choice.finish.unwrap_or(FinishReason::Stop.as_str()),
            message: choice.message(),
        });
        Completion {
            id: head.id,
            object: "chat.completion",
            created: head.created,
            model: head.model,
            choices: choices.collect(),
            usage: summary.usage.unwrap_or_default().into(),
            system_fingerprint: None,
            prompt_logprobs: self.prompt_logprobs.asked(has_prompt_logprobs),
        }
    }
}

impl CollectedChoice {
    fn message(self) -> AnswerMessage {
        let is_silent = self.text.is_empty() && !(self.calls.is_empty() && self.reasoning.is_empty());
        AnswerMessage {
            role: "assistant",
            content: (!is_silent).then_some(self.text),
            refusal: None,
            reasoning: Reasoning::of(self.reasoning),
            tool_calls: self.calls,
        }
    }
}

/// Turns an answer into events.
pub(super) struct ChatEvents {
    head: ResponseHead,
    include_usage: bool,
    /// Per choice: true once its role was sent.
    role_sent: Vec<bool>,
}

impl ChatEvents {
    pub(super) fn new(head: ResponseHead, include_usage: bool, n_choices: u32) -> Self {
        Self { head, include_usage, role_sent: vec![false; n_choices as usize] }
    }

    /// Events for `first` and the rest of the answer. A failure is an event without `[DONE]` after it.
    pub(super) fn events(self, first: Piece, answer: Answer) -> impl Stream<Item = Bytes> + Send + 'static {
        stream::unfold((self, Some(Ok(first)), answer), |(mut events, first, mut answer)| async move {
            let piece: Result<Piece, Failure> = match first {
                Some(piece) => piece,
                None => answer.next().await?,
            };
            let event = match piece {
                Ok(Piece::Delta(delta)) => events.delta(delta),
                Ok(Piece::Summary(summary)) => events.end(summary),
                Err(failure) => sse::error(&failure),
            };
            Some((event, (events, None, answer)))
        })
    }

    fn delta(&mut self, delta: v1::Delta) -> Bytes {
        let finish_reason = finish_name(delta.finish_reason);
        // A chunk that ends a choice has no call in it, as OpenAI's have none: its libraries tell of the end of a call by the chunk
        // behind it.
        let ends_apart = finish_reason.is_some() && !delta.tool_calls.is_empty();
        let index = delta.choice;
        let role_sent = self.role_sent.get_mut(index as usize);
        let role = role_sent.and_then(|sent| (!std::mem::replace(sent, true)).then_some("assistant"));
        let has_other = !(delta.reasoning.is_empty() && delta.tool_calls.is_empty());
        let choice = ChunkChoice {
            index,
            // The last delta of a choice may have no text.
            delta: ChunkDelta {
                role,
                content: Some(delta.text).filter(|text| (role.is_some() && !has_other) || !text.is_empty()),
                reasoning: Reasoning::of(delta.reasoning),
                tool_calls: delta.tool_calls.into_iter().map(Into::into).collect(),
            },
            logprobs: logprobs(delta.logprobs),
            finish_reason: finish_reason.filter(|_| !ends_apart),
        };
        let event = self.of_choice(choice);
        if !ends_apart {
            return event;
        }
        let end = ChunkChoice { index, delta: ChunkDelta::default(), logprobs: None, finish_reason };
        [event, self.of_choice(end)].concat().into()
    }

    fn of_choice(&self, choice: ChunkChoice) -> Bytes {
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
        let ResponseHead { id, created, model } = self.head.clone();
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
