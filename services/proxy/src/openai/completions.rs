//! `POST /v1/completions`: one prompt or several, each answered `n` times.
//!
//! Beside OpenAI's fields it takes those that encoder-decoder models need: `encoder_prompt` (text or token ids for the
//! encoder; `prompt` is then the decoder's, and may be left out) and `items` (image and audio parts as in a chat
//! message, which go to the encoder). Answers carry `token_ids`, and for encoder-decoder models `encoder_prompt` and
//! `decoder_prompt`, as extensions.

mod input;
mod response;
mod schema;

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
use futures::{StreamExt, stream};
use input::CompletionBody;
use response::{CompletionCollector, CompletionEvents, CompletionShape};
use triptych_core::Failure;

/// The requested form of the response.
struct CompletionResponseForm {
    stream: bool,
    include_usage: bool,
    /// Answers to each prompt.
    n: u32,
    /// True if log-probabilities of prompts are wanted.
    prompt_logprobs: bool,
}

pub(super) async fn complete(State(api): State<HttpApi>, request: Request) -> Result<Response, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, body) = request.into_parts();
        let read = body::json_twice(&api, &call, &parts.headers, body).await?;
        let (completion, sampling): (CompletionBody, SamplingBody) = read;
        completion.check_supported(&sampling)?;
        if completion.stream() {
            sampling.check_streamed()?;
        }
        Ok::<_, HttpError>((call, completion, sampling))
    };
    let (call, completion, sampling) = read.await.inspect_err(|e| api.refused(id, e))?;
    let form = CompletionResponseForm {
        stream: completion.stream(),
        include_usage: completion.include_usage(),
        n: sampling.n(),
        prompt_logprobs: sampling.prompt_logprobs(),
    };
    let requests = completion.into_requests(&call, sampling).map_err(HttpError::from);
    let requests = requests.inspect_err(|e| api.refused(id, e))?;
    let AdmittedCall { permit, .. } = call;
    // One permit for all prompts: they are in one body, and their number is bounded.
    let start = |request| api.orchestrator.start(request, permit.clone());
    let answers = requests.into_iter().map(start).collect::<Result<Vec<_>, Failure>>()?;
    respond(answers, form).await
}

async fn respond(answers: Vec<Answer>, form: CompletionResponseForm) -> Result<Response, HttpError> {
    let first = answers.first().ok_or_else(|| Failure::internal("a completion without a prompt"))?;
    let head = ResponseHead::new("cmpl", first);
    let shape = CompletionShape { n_prompts: answers.len(), n: form.n as usize };
    let has_prompt_logprobs = form.prompt_logprobs;
    let pieces = answers.into_iter().enumerate().map(|(prompt, answer)| {
        stream::unfold(answer, |mut answer| async move { Some((answer.next().await?, answer)) })
            .map(move |piece| (prompt, piece))
            .boxed()
    });
    let mut pieces = stream::select_all(pieces);
    if form.stream {
        // The status is known with the first piece, so it is waited for before anything is sent.
        let lost = || Failure::internal("an answer without a piece");
        let (prompt, first) = pieces.next().await.ok_or_else(lost)?;
        let first = first?;
        let streamed = CompletionEvents::new(head, form.include_usage, shape);
        let pieces = stream::once(async move { (prompt, Ok(first)) }).chain(pieces);
        return Ok(sse::response(streamed.events(pieces)));
    }
    let mut collected = CompletionCollector::new(shape);
    let mut logprobs = CollectedLogprobs::default();
    while let Some((prompt, piece)) = pieces.next().await {
        match piece? {
            Piece::Delta(delta) => {
                logprobs.add(&delta)?;
                collected.add(prompt, delta);
            }
            Piece::Summary(summary) => collected.end(prompt, summary),
        }
    }
    Ok(Json(collected.into_completion(head, has_prompt_logprobs)).into_response())
}
