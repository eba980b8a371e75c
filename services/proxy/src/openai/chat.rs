//! `POST /v1/chat/completions`.

mod input;
mod message;
mod response;
mod schema;
mod tools;

use super::api::{AdmittedCall, HttpApi, request_id};
use super::collected::CollectedLogprobs;
use super::error::HttpError;
use super::response_head::ResponseHead;
use super::sampling::SamplingBody;
use super::{body, sse};
use crate::orchestrate::{Answer, Piece};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
pub(super) use input::ChatBody;
use response::{ChatCollector, ChatEvents};
use triptych_core::Failure;

/// The requested form of the response.
struct ChatResponseForm {
    stream: bool,
    include_usage: bool,
    n_choices: u32,
    /// True if log-probabilities of the prompt are wanted.
    prompt_logprobs: bool,
}

pub(super) async fn complete(State(api): State<HttpApi>, request: Request) -> Result<Response, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, body) = request.into_parts();
        let read = body::json_twice(&api, &call, &parts.headers, body).await?;
        let (chat, sampling): (ChatBody, SamplingBody) = read;
        chat.check_supported()?;
        if chat.stream() {
            sampling.check_streamed()?;
        }
        Ok::<_, HttpError>((call, chat, sampling))
    };
    let (call, chat, sampling) = read.await.inspect_err(|e| api.refused(id, e))?;
    let form = ChatResponseForm {
        stream: chat.stream(),
        include_usage: chat.include_usage(),
        n_choices: sampling.n(),
        prompt_logprobs: sampling.prompt_logprobs(),
    };
    let request = chat.into_request(&call, sampling).map_err(HttpError::from);
    let request = request.inspect_err(|e| api.refused(id, e))?;
    let AdmittedCall { permit, .. } = call;
    let answer = api.orchestrator.start(request, permit)?;
    respond(answer, form).await
}

/// The status is known with the first piece, so it is waited for before anything is sent.
async fn respond(mut answer: Answer, form: ChatResponseForm) -> Result<Response, HttpError> {
    let head = ResponseHead::new("chatcmpl", &answer);
    let first = answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without a piece")))?;
    if form.stream {
        let streamed = ChatEvents::new(head, form.include_usage, form.n_choices);
        return Ok(sse::response(streamed.events(first, answer)));
    }
    let mut collected = ChatCollector::new(form.n_choices);
    let mut logprobs = CollectedLogprobs::default();
    let mut piece = first;
    loop {
        match piece {
            Piece::Delta(delta) => {
                logprobs.add(&delta)?;
                collected.add(delta);
            }
            Piece::Summary(summary) => {
                return Ok(
                    Json(collected.into_completion(head, summary, form.prompt_logprobs)).into_response()
                );
            }
        }
        piece = answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without an end")))?;
    }
}
