//! `POST /v1/responses` (platform.openai.com/docs/api-reference/responses): chat in the form that agents speak, without
//! state. Nothing is stored, so what refers to a stored response is refused by name.

mod body;
mod events;
mod input;
mod output;
mod response;
mod schema;
mod settings;

use super::api::{AdmittedCall, HttpApi, request_id};
use super::collected::CollectedLogprobs;
use super::error::HttpError;
use super::response_head::ResponseHead;
use super::sampling::SamplingBody;
use super::{body as bodies, sse};
use crate::orchestrate::{Answer, Piece};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response as HttpResponse};
use body::ResponsesBody;
use events::ResponseEvents;
use output::OutputWriter;
use response::ResponseFrame;
use settings::Settings;
use triptych_core::Failure;

pub(super) async fn create(State(api): State<HttpApi>, request: Request) -> Result<HttpResponse, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let read = bodies::json_twice(&api, &call, &parts.headers, content).await?;
        let (asked, sampling): (ResponsesBody, SamplingBody) = read;
        asked.check_supported(&sampling)?;
        Ok::<_, HttpError>((call, asked, sampling))
    };
    let (call, asked, sampling) = read.await.inspect_err(|e| api.refused(id, e))?;
    let (is_stream, settings) = (asked.is_stream(), asked.settings());
    let request = asked.into_request(&call, sampling).map_err(|f| HttpError::from(in_own_names(f)));
    let request = request.inspect_err(|e| api.refused(id, e))?;
    let AdmittedCall { permit, .. } = call;
    let answer = api.orchestrator.start(request, permit).map_err(in_own_names)?;
    respond(answer, settings, is_stream).await
}

/// The status is known with the first piece, so it is waited for before anything is sent.
async fn respond(mut answer: Answer, settings: Settings, is_stream: bool) -> Result<HttpResponse, HttpError> {
    let frame = ResponseFrame::new(ResponseHead::new("resp", &answer), settings);
    let first = next(&mut answer).await.map_err(in_own_names)?;
    if is_stream {
        return Ok(sse::response(ResponseEvents::new(frame).events(first, answer)));
    }
    let mut writer = OutputWriter::new(&frame.head.id);
    let mut logprobs = CollectedLogprobs::default();
    let mut piece = first;
    loop {
        match piece {
            Piece::Delta(delta) => {
                logprobs.add(&delta)?;
                // An object that is sent whole has no events.
                let _ = writer.push(delta);
            }
            Piece::Summary(summary) => {
                let (output, _) = writer.finish();
                return Ok(Json(frame.ended(output, &summary)).into_response());
            }
        }
        piece = next(&mut answer).await.map_err(in_own_names)?;
    }
}

async fn next(answer: &mut Answer) -> Result<Piece, Failure> {
    answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without an end")))
}

/// Puts the names of this API in the place of those that chat has for the same.
fn in_own_names(failure: Failure) -> Failure {
    let Some(param) = &failure.param else { return failure };
    let own = match &**param {
        "max_tokens" => "max_output_tokens".to_owned(),
        "response_format" => "text.format".to_owned(),
        "top_logprobs" | "logprobs" => "top_logprobs".to_owned(),
        param if param == "messages" || param.starts_with("messages[") => "input".to_owned(),
        param if param.starts_with("tools[") => param.replacen("].function.", "].", 1),
        _ => return failure,
    };
    failure.with_param(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_field_of_this_api() {
        for (chat, own) in [
            ("max_tokens", "max_output_tokens"),
            ("messages", "input"),
            ("messages[2].parts[0]", "input"),
            ("tools[1].function.name", "tools[1].name"),
            ("input[0].content[1].image_url", "input[0].content[1].image_url"),
        ] {
            let failure = in_own_names(Failure::invalid("x").with_param(chat));
            assert_eq!(failure.param.as_deref(), Some(own));
        }
        assert_eq!(in_own_names(Failure::invalid("x")).param, None);
    }
}
