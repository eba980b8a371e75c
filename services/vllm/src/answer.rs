//! vLLM's chunks as pieces of an answer.

mod logprobs;

use crate::failure::{CallError, ErrorFields, ServerError};
use logprobs::Logprobs;
use serde::Deserialize;
use std::time::{Duration, Instant};
use triptych_core::lifetime::StageTimes;
use triptych_proto::v1;

/// A chunk of a chat or a completion.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<ErrorFields>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    /// Of a chat.
    #[serde(default)]
    delta: Option<ChatDelta>,
    /// Of a completion.
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
}

#[derive(Default, Deserialize)]
struct ChatDelta {
    #[serde(default)]
    content: Option<String>,
    /// Set by a server that reads reasoning itself.
    #[serde(default, alias = "reasoning_content")]
    reasoning: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: Option<u32>,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

/// Reads the chunks of an answer.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    began: Instant,
    /// Times of the first and the latest piece.
    pieces: Option<(Instant, Instant)>,
    /// Choices that have not ended.
    n_open: u32,
    usage: v1::Usage,
}

impl AnswerReader {
    /// For an answer of so many choices, which is asked for now.
    pub(crate) fn new(n_choices: u32, now: Instant) -> Self {
        Self { began: now, pieces: None, n_open: n_choices, usage: v1::Usage::default() }
    }

    /// True if anything of the answer came.
    pub(crate) fn has_begun(&self) -> bool {
        self.pieces.is_some()
    }

    /// The pieces in a chunk.
    ///
    /// # Errors
    /// [`CallError`] of a chunk that is none, or that tells an error.
    pub(crate) fn read(&mut self, chunk: &[u8], now: Instant) -> Result<Vec<v1::Delta>, CallError> {
        let chunk: Chunk = serde_json::from_slice(chunk).map_err(|e| CallError::Unreadable(e.to_string()))?;
        if let Some(error) = chunk.error {
            return Err(CallError::Refused(ServerError::in_stream(error)));
        }
        if let Some(usage) = chunk.usage {
            self.usage.prompt_tokens = usage.prompt_tokens;
            self.usage.completion_tokens = usage.completion_tokens.unwrap_or_default();
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.usage.cached_tokens = cached.unwrap_or_default();
        }
        let mut pieces = Vec::new();
        for choice in chunk.choices {
            pieces.extend(self.piece(choice)?);
        }
        if !pieces.is_empty() {
            let first = self.pieces.map_or(now, |(first, _)| first);
            self.pieces = Some((first, now));
        }
        Ok(pieces)
    }

    fn piece(&mut self, choice: Choice) -> Result<Option<v1::Delta>, CallError> {
        let delta = choice.delta.unwrap_or_default();
        let token_ids = choice.token_ids.unwrap_or_default();
        let finish_reason = finish_reason(choice.finish_reason.as_deref())?;
        let piece = v1::Delta {
            choice: choice.index,
            text: choice.text.or(delta.content).unwrap_or_default(),
            reasoning: delta.reasoning.unwrap_or_default(),
            logprobs: choice.logprobs.map_or_else(Vec::new, |logprobs| logprobs.tokens(&token_ids)),
            token_ids,
            finish_reason: finish_reason.into(),
            ..v1::Delta::default()
        };
        let has_ended = finish_reason != v1::FinishReason::Unspecified;
        self.n_open = self.n_open.saturating_sub(u32::from(has_ended));
        let is_empty = piece.text.is_empty() && piece.reasoning.is_empty() && piece.token_ids.is_empty();
        Ok((!is_empty || has_ended).then_some(piece))
    }

    /// The end of the answer.
    ///
    /// # Errors
    /// [`CallError::Lost`] if choices have not ended.
    pub(crate) fn finish(&self) -> Result<v1::Summary, CallError> {
        if self.n_open > 0 {
            return Err(CallError::Lost("vLLM server: it ended its answer early".into()));
        }
        let (first, latest) = self.pieces.unwrap_or((self.began, self.began));
        let n_steps = self.usage.completion_tokens.saturating_sub(1);
        let times = StageTimes {
            prefill: first.saturating_duration_since(self.began),
            per_token: latest.duration_since(first).checked_div(n_steps).unwrap_or(Duration::ZERO),
            ..StageTimes::default()
        };
        Ok(v1::Summary { usage: Some(self.usage), times: Some(times.into()), ..v1::Summary::default() })
    }
}

/// The reason for the end of a choice. `error` is a failure in the middle.
fn finish_reason(reason: Option<&str>) -> Result<v1::FinishReason, CallError> {
    match reason {
        None => Ok(v1::FinishReason::Unspecified),
        Some("length") => Ok(v1::FinishReason::Length),
        Some("stop" | "tool_calls" | "repetition") => Ok(v1::FinishReason::Stop),
        Some(other) => Err(CallError::Refused(ServerError {
            code: 500,
            message: format!("the answer ended with {other:.40}"),
            param: None,
            retry_after: None,
        })),
    }
}

#[cfg(test)]
mod tests;
