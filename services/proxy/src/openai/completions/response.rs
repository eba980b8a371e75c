//! OpenAI's completion from the pieces of one or several answers: one object, or a stream of them.
//!
//! Choice `i` of prompt `p` has index `p · n + i`.

use super::super::prompt_logprobs::PromptLogprobs;
use super::super::response_head::ResponseHead;
use super::super::sse;
use super::super::usage::Usage;
use super::schema::{Choice, Completion, Logprobs, ReportedPrompts};
use crate::orchestrate::Piece;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use triptych_core::Failure;
use triptych_core::sampling::FinishReason;
use triptych_proto::convert::finish_name;
use triptych_proto::v1;

/// Number of choices of a response: `n` for each of `n_prompts` prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompletionShape {
    pub(super) n_prompts: usize,
    pub(super) n: usize,
}

fn completion(head: ResponseHead, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Completion {
    let ResponseHead { id, created, model } = head;
    Completion { id, object: "text_completion", created, model, choices, usage, system_fingerprint: None }
}

/// Collects a whole response.
pub(super) struct CompletionCollector {
    choices: Vec<CollectedChoice>,
    n: usize,
    usage: Usage,
    /// By prompt.
    prompt_logprobs: Vec<PromptLogprobs>,
}

#[derive(Default)]
struct CollectedChoice {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::ChosenToken>,
    finish: Option<&'static str>,
    prompts: ReportedPrompts,
}

impl CompletionCollector {
    /// An empty collector.
    pub(super) fn new(CompletionShape { n_prompts, n }: CompletionShape) -> Self {
        let choices = (0..n_prompts * n).map(|_| CollectedChoice::default()).collect();
        Self {
            choices,
            n,
            usage: Usage::default(),
            prompt_logprobs: vec![PromptLogprobs::default(); n_prompts],
        }
    }

    pub(super) fn add(&mut self, prompt: usize, delta: v1::Delta) {
        if let Some(of_prompt) = self.prompt_logprobs.get_mut(prompt) {
            of_prompt.add(&delta);
        }
        // The orchestrator lets no other choice through.
        let Some(choice) = self.choices.get_mut(prompt * self.n + delta.choice as usize) else { return };
        choice.finish = finish_name(delta.finish_reason).or(choice.finish);
        choice.text.push_str(&delta.text);
        choice.token_ids.extend(delta.token_ids);
        choice.logprobs.extend(delta.logprobs);
    }

    pub(super) fn end(&mut self, prompt: usize, summary: v1::Summary) {
        self.usage.add(&summary.usage.unwrap_or_default());
        for choice in self.choices.iter_mut().skip(prompt * self.n).take(self.n) {
            choice.prompts = ReportedPrompts::of(&summary);
        }
    }

    /// The completion; with log-probabilities of the prompt in each choice, if they were asked for.
    pub(super) fn into_completion(self, head: ResponseHead, has_prompt_logprobs: bool) -> Completion {
        let (n, of_prompts) = (self.n.max(1), self.prompt_logprobs);
        let of_prompt = |index: usize| of_prompts.get(index / n).cloned().unwrap_or_default();
        let choice = |(index, choice): (usize, CollectedChoice)| Choice {
            index,
            text: choice.text,
            logprobs: Logprobs::of(choice.logprobs, 0),
            finish_reason: Some(choice.finish.unwrap_or(FinishReason::Stop.as_str())),
            token_ids: choice.token_ids,
            prompts: choice.prompts,
            prompt_logprobs: of_prompt(index).asked(has_prompt_logprobs),
        };
        let choices = self.choices.into_iter().enumerate().map(choice).collect();
        completion(head, choices, Some(Some(self.usage)))
    }
}

/// Turns answers into events.
pub(super) struct CompletionEvents {
    head: ResponseHead,
    include_usage: bool,
    n: usize,
    /// Characters of text sent so far, by choice.
    n_chars: Vec<usize>,
    /// ReportedPrompts whose answer has not ended.
    n_open: usize,
    usage: Usage,
}

impl CompletionEvents {
    /// A stream before its first event.
    pub(super) fn new(head: ResponseHead, include_usage: bool, shape: CompletionShape) -> Self {
        let CompletionShape { n_prompts, n } = shape;
        let n_chars = vec![0; n_prompts * n];
        Self { head, include_usage, n, n_chars, n_open: n_prompts, usage: Usage::default() }
    }

    /// Events for all pieces. A failure is the last event, without `[DONE]` after it.
    pub(super) fn events(
        self,
        pieces: impl Stream<Item = (usize, Result<Piece, Failure>)> + Send + 'static,
    ) -> impl Stream<Item = Bytes> + Send + 'static {
        let start = Some((self, Box::pin(pieces)));
        futures::stream::unfold(start, |state| async move {
            let (mut events, mut pieces) = state?;
            let (prompt, piece) = pieces.next().await?;
            match piece {
                Ok(Piece::Delta(delta)) => Some((events.delta(prompt, delta), Some((events, pieces)))),
                Ok(Piece::Summary(summary)) => Some((events.end(prompt, &summary), Some((events, pieces)))),
                Err(failure) => Some((sse::error(&failure), None)),
            }
        })
    }

    fn delta(&mut self, prompt: usize, delta: v1::Delta) -> Bytes {
        let index = prompt * self.n + delta.choice as usize;
        let finish_reason = finish_name(delta.finish_reason);
        let offset = self.n_chars.get(index).copied().unwrap_or_default();
        if let Some(n_chars) = self.n_chars.get_mut(index) {
            *n_chars += delta.text.chars().count();
        }
        let logprobs = Logprobs::of(delta.logprobs, offset);
        let prompts = ReportedPrompts::default();
        let choice = Choice {
            index,
            text: delta.text,
            logprobs,
            finish_reason,
            token_ids: delta.token_ids,
            prompts,
            prompt_logprobs: None,
        };
        sse::event(&self.object(vec![choice], self.include_usage.then_some(None)))
    }

    fn object(&self, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Completion {
        completion(self.head.clone(), choices, usage)
    }

    /// The prompts are known with the summary, so they are sent in an object without text.
    fn end(&mut self, prompt: usize, summary: &v1::Summary) -> Bytes {
        self.usage.add(&summary.usage.unwrap_or_default());
        self.n_open = self.n_open.saturating_sub(1);
        let mut events = Vec::new();
        let prompts = ReportedPrompts::of(summary);
        if prompts.encoder_prompt.is_some() || prompts.decoder_prompt.is_some() {
            let choice =
                |i| Choice { index: prompt * self.n + i, prompts: prompts.clone(), ..Choice::default() };
            let prompts = self.object((0..self.n).map(choice).collect(), self.include_usage.then_some(None));
            events.extend_from_slice(&sse::event(&prompts));
        }
        if self.n_open == 0 {
            if self.include_usage {
                let usage = self.object(Vec::new(), Some(Some(self.usage)));
                events.extend_from_slice(&sse::event(&usage));
            }
            events.extend_from_slice(&sse::done());
        }
        events.into()
    }
}
