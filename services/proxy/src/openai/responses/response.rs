//! The response object around an output: in progress, ended, or failed.

use super::super::response_head::ResponseHead;
use super::output::Output;
use super::schema::{
    IncompleteDetails, InputDetails, OutputDetails, OutputItem, Response, ResponseError, ResponseUsage,
    Status,
};
use super::settings::Settings;
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;

/// The parts of a response that are known when it begins.
#[derive(Clone, Debug)]
pub(super) struct ResponseFrame {
    pub(super) head: ResponseHead,
    settings: Settings,
}

impl ResponseFrame {
    /// The frame; the id gets OpenAI's spelling, which some clients look for.
    pub(super) fn new(mut head: ResponseHead, settings: Settings) -> Self {
        head.id = head.id.replacen('-', "_", 1);
        Self { head, settings }
    }

    /// A response that was begun.
    pub(super) fn in_progress(&self) -> Response {
        let ResponseHead { id, created, model } = self.head.clone();
        Response {
            id,
            object: "response",
            created_at: created,
            completed_at: None,
            status: Status::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            model,
            output: Vec::new(),
            previous_response_id: None,
            service_tier: "default",
            store: false,
            truncation: "disabled",
            usage: None,
            settings: self.settings.clone(),
        }
    }

    /// A response that has its whole output, or as much of it as it may have.
    pub(super) fn ended(&self, output: Output, summary: &v1::Summary) -> Response {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let Output { items, is_cut, n_reasoning_tokens } = output;
        Response {
            status: if is_cut { Status::Incomplete } else { Status::Completed },
            completed_at: (!is_cut).then(now),
            incomplete_details: is_cut.then_some(IncompleteDetails { reason: "max_output_tokens" }),
            output: items,
            usage: Some(usage(&summary.usage.unwrap_or_default(), n_reasoning_tokens)),
            ..self.in_progress()
        }
    }

    /// A response that failed in the middle.
    pub(super) fn failed(&self, output: Vec<OutputItem>, failure: &Failure) -> Response {
        let code = match failure.class {
            FailureClass::Overloaded => "rate_limit_exceeded",
            FailureClass::InvalidArgument | FailureClass::TooLarge | FailureClass::Unprocessable => {
                "invalid_prompt"
            }
            _ => "server_error",
        };
        let error = ResponseError { code, message: failure.message.clone() };
        Response { status: Status::Failed, error: Some(error), output, ..self.in_progress() }
    }
}

fn usage(counts: &v1::Usage, reasoning_tokens: u32) -> ResponseUsage {
    let (input_tokens, output_tokens) = (counts.prompt_tokens, counts.completion_tokens);
    ResponseUsage {
        input_tokens,
        input_tokens_details: InputDetails { cached_tokens: counts.cached_tokens, cache_write_tokens: 0 },
        output_tokens,
        output_tokens_details: OutputDetails { reasoning_tokens: reasoning_tokens.min(output_tokens) },
        total_tokens: u64::from(input_tokens) + u64::from(output_tokens),
    }
}
