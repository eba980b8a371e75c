//! `POST /tokenize` and `/detokenize`, in the format of vLLM.

use super::api::{HttpApi, request_id};
use super::body;
use super::chat::ChatBody;
use super::error::HttpError;
use super::sampling::SamplingBody;
use crate::orchestrate::TokenOptions;
use axum::Json;
use axum::extract::{Request, State};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, ModelName};

/// The body, as parsed. A conversation is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizeBody {
    prompt: Option<String>,
    messages: Option<IgnoredAny>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

#[derive(Debug, Serialize)]
pub(super) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeBody {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
pub(super) struct Detokenized {
    prompt: String,
}

pub(super) async fn tokenize(
    State(api): State<HttpApi>,
    request: Request,
) -> Result<Json<Tokenized>, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let (asked, chat): (TokenizeBody, ChatBody) =
            body::json_twice(&api, &call, &parts.headers, content).await?;
        chat.check_supported()?;
        let mut request = chat.into_request(&call, SamplingBody::default())?;
        match (&asked.prompt, &asked.messages) {
            (Some(text), None) => request.prompt = Prompt::Singleton(TextOrTokens::Text(text.clone())),
            (None, Some(_)) => {}
            _ => {
                return Err(Failure::invalid("one of prompt and messages is needed")
                    .with_param("prompt")
                    .into());
            }
        }
        Ok::<_, HttpError>((asked, request, call.permit))
    };
    let (asked, request, _permit) = read.await.inspect_err(|e| api.refused(id, e))?;
    let with_texts = asked.return_token_strs.unwrap_or(false);
    let options =
        TokenOptions { without_special_tokens: asked.add_special_tokens == Some(false), with_texts };
    let found = api.orchestrator.tokenize(request, options).await?;
    Ok(Json(Tokenized {
        count: found.token_ids.len(),
        max_model_len: found.max_context,
        token_strs: with_texts.then_some(found.texts),
        tokens: found.token_ids,
    }))
}

pub(super) async fn detokenize(
    State(api): State<HttpApi>,
    request: Request,
) -> Result<Json<Detokenized>, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let (asked, _): (DetokenizeBody, IgnoredAny) =
            body::json_twice(&api, &call, &parts.headers, content).await?;
        let missing = || Failure::invalid("tokens is missing").with_param("tokens");
        let tokens = asked.tokens.ok_or_else(missing)?;
        let model = asked.model.filter(|name| !name.is_empty()).map(ModelName::new);
        Ok::<_, HttpError>((call, model, tokens))
    };
    let (call, model, tokens) = read.await.inspect_err(|e| api.refused(id, e))?;
    let times = (call.arrived, call.deadline);
    let found = api.orchestrator.detokenize(model.as_ref(), tokens, &call.caller, times).await?;
    Ok(Json(Detokenized { prompt: found.text }))
}
