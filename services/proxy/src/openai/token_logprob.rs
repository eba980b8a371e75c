//! OpenAI's object for the log-probability of a token and of its alternatives, the same in chat and in responses.

use super::response_head::own_bytes;
use serde::Serialize;
use triptych_proto::v1;

/// A chosen token with its alternatives, best first.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TokenLogprob {
    #[serde(flatten)]
    chosen: Alternative,
    top_logprobs: Vec<Alternative>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Alternative {
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
