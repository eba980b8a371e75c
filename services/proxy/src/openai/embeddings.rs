//! `POST /v1/embeddings` (platform.openai.com/docs/api-reference/embeddings) and vLLM's `/pooling`: rows of encoder outputs
//! without a decoder, their mean or as they are.

mod body;
mod pooled;

use super::api::{HttpApi, request_id};
use super::chat::ChatBody;
use super::error::HttpError;
use crate::orchestrate::{Rows, RowsOf};
use crate::request::Request;
use axum::Json;
use axum::extract::{Request as HttpRequest, State};
use body::EmbeddingsBody;
use futures::{StreamExt, TryStreamExt, stream};
use pooled::{Embedding, all_rows, mean};
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_core::{Failure, RequestId};

/// Inputs of one request that are encoded at once.
const AT_ONCE: usize = 8;

/// A list of embeddings: OpenAI's object, with vLLM's id and time.
#[derive(Debug, Serialize)]
pub(super) struct EmbeddingList<T> {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Entry<T>>,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize)]
struct Entry<T> {
    index: usize,
    object: &'static str,
    #[serde(flatten)]
    value: T,
}

#[derive(Debug, Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

/// One vector of an input.
#[derive(Debug, Serialize)]
pub(super) struct Pooled {
    embedding: Embedding,
}

/// Every row of an input.
#[derive(Debug, Serialize)]
pub(super) struct Unpooled {
    data: Vec<Vec<f32>>,
}

pub(super) async fn embed(
    State(api): State<HttpApi>,
    request: HttpRequest,
) -> Result<Json<EmbeddingList<Pooled>>, HttpError> {
    let (found, id, asked) = encoded(&api, request).await?;
    let pooled = |rows: &Rows| {
        let vector = mean(rows.output()?, asked.normalize.unwrap_or(true))?;
        asked.check_dimensions(vector.len())?;
        Ok(Pooled { embedding: Embedding::of(vector, asked.encoding()?) })
    };
    Ok(Json(list(id, "embedding", &found, pooled)?))
}

pub(super) async fn pool(
    State(api): State<HttpApi>,
    request: HttpRequest,
) -> Result<Json<EmbeddingList<Unpooled>>, HttpError> {
    let (found, id, asked) = encoded(&api, request).await?;
    asked.check_raw()?;
    let mut n_values = 0;
    let unpooled = |rows: &Rows| Ok(Unpooled { data: all_rows(rows.output()?, &mut n_values)? });
    Ok(Json(list(id, "pooling", &found, unpooled)?))
}

/// Rows of each input, in order.
async fn encoded(
    api: &HttpApi,
    request: HttpRequest,
) -> Result<(Vec<Rows>, RequestId, EmbeddingsBody), HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let read = super::body::json_twice(api, &call, &parts.headers, content).await?;
        let (mut asked, chat): (EmbeddingsBody, ChatBody) = read;
        asked.check_supported()?;
        let requests = asked.requests(chat, &call)?;
        Ok::<_, HttpError>((asked, requests, call.permit))
    };
    let (asked, requests, permit) = read.await.inspect_err(|e| api.refused(id, e))?;
    let rows = |request: Request| api.orchestrator.rows(request, RowsOf::OneTower, &permit);
    let found: Vec<Rows> =
        stream::iter(requests).map(rows).buffered(AT_ONCE).try_collect().await.map_err(in_own_names)?;
    Ok((found, id, asked))
}

/// Puts the name of this API in the place of the one that prompts have.
fn in_own_names(failure: Failure) -> Failure {
    match failure.param.as_deref() {
        Some("prompt") => failure.with_param("input"),
        _ => failure,
    }
}

fn list<T>(
    id: RequestId,
    object: &'static str,
    found: &[Rows],
    mut value: impl FnMut(&Rows) -> Result<T, Failure>,
) -> Result<EmbeddingList<T>, Failure> {
    let entry = |(index, rows)| Ok(Entry { index, object, value: value(rows)? });
    let prompt_tokens = found.iter().flat_map(Rows::items).map(|item| u64::from(item.n_tokens)).sum();
    let id = id.to_string();
    Ok(EmbeddingList {
        id: format!("embd-{}", id.strip_prefix("req-").unwrap_or(&id)),
        object: "list",
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        model: found.first().map(|rows| rows.model.to_string()).unwrap_or_default(),
        data: found.iter().enumerate().map(entry).collect::<Result<_, Failure>>()?,
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    })
}
