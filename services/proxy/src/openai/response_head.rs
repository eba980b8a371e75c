//! The fields that every object of a chat or completion response carries, and readings of the wire.

use crate::orchestrate::Answer;
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_proto::v1;

/// Id, creation time and model of a response.
#[derive(Clone, Debug)]
pub(super) struct ResponseHead {
    pub(super) id: String,
    /// Seconds since the epoch.
    pub(super) created: u64,
    pub(super) model: String,
}

impl ResponseHead {
    /// The head of an answer's response; its id is the request's, with `prefix` for `req`.
    pub(super) fn new(prefix: &str, answer: &Answer) -> Self {
        let id = answer.request_id.to_string();
        Self {
            id: format!("{prefix}-{}", id.strip_prefix("req-").unwrap_or(&id)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            model: answer.model.to_string(),
        }
    }
}

/// The bytes of a reported token: its own, or those of its text from a worker that sends none.
pub(super) fn own_bytes(token: &v1::TokenLogprob) -> &[u8] {
    if token.bytes.is_empty() { token.text.as_bytes() } else { &token.bytes }
}
