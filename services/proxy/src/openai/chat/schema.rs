//! OpenAI's objects for chat answers. Fields and their names only; `response` fills them.

use super::super::prompt_logprobs::PromptLogprobs;
use super::super::token_logprob::TokenLogprob;
use super::super::usage::Usage;
use serde::Serialize;
use triptych_proto::v1;

#[derive(Debug, Serialize)]
pub(super) struct Completion {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Usage,
    pub(super) system_fingerprint: Option<&'static str>,
    /// Absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize)]
pub(super) struct Choice {
    pub(super) index: u32,
    pub(super) message: AnswerMessage,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct AnswerMessage {
    pub(super) role: &'static str,
    /// Null beside calls or reasoning alone.
    pub(super) content: Option<String>,
    pub(super) refusal: Option<&'static str>,
    #[serde(flatten)]
    pub(super) reasoning: Option<Reasoning>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<Call>,
}

/// Reasoning under its two names: DeepSeek's, and the one that vLLM writes beside it.
#[derive(Debug, Serialize)]
pub(super) struct Reasoning {
    reasoning: String,
    reasoning_content: String,
}

impl Reasoning {
    /// `None` for an empty text.
    pub(super) fn of(text: String) -> Option<Self> {
        (!text.is_empty()).then(|| Self { reasoning: text.clone(), reasoning_content: text })
    }
}

/// A call of a tool, or in a stream a piece of one.
#[derive(Debug, Serialize)]
pub(super) struct Call {
    /// In a stream alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) id: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: Called,
}

#[derive(Debug, Serialize)]
pub(super) struct Called {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) name: String,
    pub(super) arguments: String,
}

impl From<v1::ToolCallDelta> for Call {
    /// The piece of a stream; the first one of a call has its id and name.
    fn from(call: v1::ToolCallDelta) -> Self {
        Self {
            index: Some(call.index),
            kind: (!call.id.is_empty()).then_some("function"),
            id: call.id,
            function: Called { name: call.name, arguments: call.arguments },
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Chunk {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) choices: Vec<ChunkChoice>,
    /// Absent unless usage was asked for; then null on every chunk but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    pub(super) system_fingerprint: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChunkChoice {
    pub(super) index: u32,
    pub(super) delta: ChunkDelta,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(flatten)]
    pub(super) reasoning: Option<Reasoning>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<Call>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Logprobs {
    pub(super) content: Vec<TokenLogprob>,
    pub(super) refusal: Option<&'static str>,
}
