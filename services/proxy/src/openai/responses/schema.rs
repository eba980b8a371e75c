//! OpenAI's objects for responses and the events of their streams. Fields and their names only; `output` and `response`
//! fill them.

use super::super::token_logprob::TokenLogprob;
use super::settings::Settings;
use serde::Serialize;

/// A response.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Response {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    pub(super) completed_at: Option<u64>,
    pub(super) status: Status,
    pub(super) background: bool,
    pub(super) error: Option<ResponseError>,
    pub(super) incomplete_details: Option<IncompleteDetails>,
    pub(super) model: String,
    pub(super) output: Vec<OutputItem>,
    pub(super) previous_response_id: Option<&'static str>,
    pub(super) service_tier: &'static str,
    pub(super) store: bool,
    pub(super) truncation: &'static str,
    pub(super) usage: Option<ResponseUsage>,
    #[serde(flatten)]
    pub(super) settings: Settings,
}

/// State of a response, or of one of its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    InProgress,
    Completed,
    /// Cut at the largest number of tokens.
    Incomplete,
    Failed,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct ResponseError {
    pub(super) code: &'static str,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct IncompleteDetails {
    pub(super) reason: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ResponseUsage {
    pub(super) input_tokens: u32,
    pub(super) input_tokens_details: InputDetails,
    pub(super) output_tokens: u32,
    pub(super) output_tokens_details: OutputDetails,
    pub(super) total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct InputDetails {
    pub(super) cached_tokens: u32,
    /// 0: what the prefix cache keeps is not counted. OpenAI's libraries require it.
    pub(super) cache_write_tokens: u32,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct OutputDetails {
    pub(super) reasoning_tokens: u32,
}

/// An item of the output.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Reasoning {
        id: String,
        /// Always empty: the text is in `content`.
        summary: [(); 0],
        content: Vec<Part>,
        encrypted_content: Option<&'static str>,
        status: Status,
    },
    Message {
        id: String,
        status: Status,
        role: &'static str,
        content: Vec<Part>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: Status,
    },
}

/// A part of an item.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part {
    OutputText { text: String, annotations: [(); 0], logprobs: Vec<TokenLogprob> },
    ReasoningText { text: String },
}

/// An event of a stream.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Event {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    #[serde(flatten)]
    pub(super) fields: EventFields,
}

/// Fields of an event, by its kind.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum EventFields {
    Response {
        response: Box<Response>,
    },
    Item {
        output_index: usize,
        item: OutputItem,
    },
    Part {
        #[serde(flatten)]
        place: Place,
        part: Part,
    },
    TextDelta {
        #[serde(flatten)]
        place: Place,
        delta: String,
        logprobs: Vec<TokenLogprob>,
    },
    TextDone {
        #[serde(flatten)]
        place: Place,
        text: String,
        logprobs: Vec<TokenLogprob>,
    },
    ReasoningDelta {
        #[serde(flatten)]
        place: Place,
        delta: String,
    },
    ReasoningDone {
        #[serde(flatten)]
        place: Place,
        text: String,
    },
    ArgumentsDelta {
        item_id: String,
        output_index: usize,
        delta: String,
    },
    ArgumentsDone {
        item_id: String,
        output_index: usize,
        name: String,
        arguments: String,
    },
}

/// Place of a part in the output.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Place {
    pub(super) item_id: String,
    pub(super) output_index: usize,
    pub(super) content_index: usize,
}
