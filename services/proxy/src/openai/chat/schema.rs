//! OpenAI's objects for chat answers. Fields and their names only; `response` fills them.

use super::super::response_head::own_bytes;
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
    pub(super) content: String,
    pub(super) refusal: Option<&'static str>,
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
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Logprobs {
    pub(super) content: Vec<TokenLogprob>,
    pub(super) refusal: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct TokenLogprob {
    #[serde(flatten)]
    chosen: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct Alternative {
    bytes: Vec<u8>,
    logprob: f32,
    token: String,
}

impl From<v1::TokenLogprob> for Alternative {
    fn from(t: v1::TokenLogprob) -> Self {
        let bytes = own_bytes(&t).to_vec();
        // JSON has no infinity, and clients expect a number; OpenAI writes -9999 for a negligible probability.
        Self { bytes, logprob: t.logprob.max(-9999.0), token: t.text }
    }
}

impl From<v1::ChosenToken> for TokenLogprob {
    fn from(t: v1::ChosenToken) -> Self {
        Self {
            chosen: t.chosen.unwrap_or_default().into(),
            top_logprobs: t.top.into_iter().map(Into::into).collect(),
        }
    }
}
