//! `POST /v1/chat/completions`.

mod answer;
mod input;
pub(super) mod message;
mod shape;

use super::error::HttpError;
use super::sampling::SamplingBody;
use super::{Call, Face, body, sse};
use crate::orchestrate::{Answer, Piece};
use answer::{Collected, Stamp, Streamed};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use input::ChatBody;
pub(super) use input::StreamOptions;
use triptych_core::Failure;

/// What a client wants of the answer's form.
struct Form {
    stream: bool,
    include_usage: bool,
    n_choices: u32,
}

pub(super) async fn complete(State(face): State<Face>, request: Request) -> Result<Response, HttpError> {
    let read = async {
        let call = face.admit(&request)?;
        let (parts, body) = request.into_parts();
        let read = body::json_twice(&face, &call, (&parts.headers, body)).await?;
        let (chat, sampling): (ChatBody, SamplingBody) = read;
        chat.check_supported()?;
        Ok::<_, HttpError>((call, chat, sampling))
    };
    let (call, chat, sampling) = read.await.inspect_err(|e| face.refused(e))?;
    let form = Form { stream: chat.stream(), include_usage: chat.include_usage(), n_choices: sampling.n() };
    let request =
        chat.into_request(&call, sampling).inspect_err(|f| face.orchestrator.observer.refused(f))?;
    let Call { permit, span, .. } = call;
    let answer = span.in_scope(|| face.orchestrator.start(request, permit))?;
    respond(answer, form).await
}

/// The status is known with the first piece, so it is waited for before anything is sent.
async fn respond(mut answer: Answer, form: Form) -> Result<Response, HttpError> {
    let stamp = Stamp::of(&answer);
    let first = answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without a piece")))?;
    if form.stream {
        let streamed = Streamed::new(stamp, form.include_usage, form.n_choices);
        return Ok(sse::response(streamed.events(first, answer)));
    }
    let mut collected = Collected::new(form.n_choices);
    let mut piece = first;
    loop {
        match piece {
            Piece::Delta(delta) => collected.add(delta),
            Piece::Summary(summary) => {
                return Ok(Json(collected.into_completion(stamp, summary)).into_response());
            }
        }
        piece = answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without an end")))?;
    }
}
