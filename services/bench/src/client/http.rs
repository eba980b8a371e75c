//! Any OpenAI-compatible server, over streamed HTTP.

use super::body::{self, Body};
use super::models::ListedModel;
use super::sse::{AnswerState, LineBuffer, shortened};
use super::tokens::times;
use super::{Clock, ContentSource, PreparedRequest, Reply, Target};
use crate::offered::{ItemShape, Offered};
use crate::outcome::End;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use std::time::Duration;
use triptych_core::Modality;

/// Bytes that are read of an error response.
const MAX_ERROR: usize = 64 << 10;

/// Endpoint of OpenAI's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/audio/transcriptions`.
    Transcriptions,
}

impl Endpoint {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Transcriptions => "/v1/audio/transcriptions",
        }
    }
}

/// A server's URL and what is asked there.
#[derive(Clone, Debug)]
pub struct HttpTarget {
    client: reqwest::Client,
    base: String,
    endpoint: Endpoint,
    model: String,
    api_key: Option<String>,
}

impl HttpTarget {
    /// `base` is the server's URL, with or without `/v1`.
    ///
    /// # Errors
    /// An error if the client cannot be made, or the URL is wrong.
    pub fn new(
        base: &str,
        endpoint: Endpoint,
        model: String,
        api_key: Option<String>,
    ) -> Result<Self, reqwest::Error> {
        // As many connections as there are requests under way, kept and reused; no proxy of the environment.
        let client = reqwest::Client::builder()
            .no_proxy()
            .http1_only()
            .tcp_nodelay(true)
            .pool_max_idle_per_host(usize::MAX)
            .pool_idle_timeout(Duration::from_secs(300))
            .connect_timeout(Duration::from_secs(10))
            .build()?;
        let base = base.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let base = if base.contains("://") { base } else { format!("http://{base}") };
        // A URL that is none is found here, and not once a request.
        client.get(format!("{base}/v1/models")).build()?;
        Ok(Self { client, base, endpoint, model, api_key })
    }

    /// Models that the server lists, with the items that they take if it says so, as Triptych does.
    ///
    /// # Errors
    /// An error if it does not answer.
    pub async fn models(&self) -> Result<Vec<ListedModel>, reqwest::Error> {
        let mut request = self.client.get(format!("{}/v1/models", self.base));
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        let models: serde_json::Value = request.send().await?.error_for_status()?.json().await?;
        let listed = models.get("data").and_then(|data| data.as_array());
        Ok(listed.into_iter().flatten().filter_map(listed_model).collect())
    }

    /// The server's URL, without `/v1`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The target with another model.
    pub fn with_model(self, model: String) -> Self {
        Self { model, ..self }
    }
}

impl Target for HttpTarget {
    fn prepare(&self, offered: &Offered, content: &ContentSource) -> PreparedRequest {
        let audio_only = !offered.items.is_empty()
            && offered.items.iter().all(|i| matches!(i.shape, ItemShape::Audio { .. }));
        // Texts cannot be transcribed, so probes of texts go to the chat.
        let endpoint = if self.endpoint == Endpoint::Transcriptions && !audio_only {
            Endpoint::Chat
        } else {
            self.endpoint
        };
        let body = match endpoint {
            Endpoint::Chat => body::chat(&self.model, offered, content),
            Endpoint::Completions => body::completion(&self.model, offered, content),
            Endpoint::Transcriptions => body::transcription(&self.model, offered, content),
        };
        let url = format!("{}{}", self.base, endpoint.path());
        let asked = (endpoint != Endpoint::Transcriptions).then_some(offered.output_tokens);
        let target = self.clone();
        Box::new(move |clock| Box::pin(async move { target.send(url, body, asked, clock).await }))
    }

    fn name(&self) -> String {
        format!("{}{}", self.base, self.endpoint.path())
    }

    fn model(&self) -> String {
        self.model.clone()
    }
}

impl HttpTarget {
    async fn send(&self, url: String, body: Body, asked: Option<u32>, clock: Clock) -> Reply {
        let mut request = self.client.post(url).header("content-type", body.content_type).body(body.bytes);
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        let response = match request.send().await {
            Ok(response) => response,
            Err(e) => return Reply::without_tokens(End::Failed(broken(&e)), clock.now()),
        };
        let status = response.status();
        if !status.is_success() {
            let text = start_of(response).await;
            let end = match status.as_u16() {
                429 | 503 => End::Refused,
                code => End::Failed(format!("{code}: {}", message_of(&text))),
            };
            return Reply::without_tokens(end, clock.now());
        }
        read(response.bytes_stream().map(|bytes| bytes.map_err(|e| broken(&e))), asked, clock).await
    }
}

/// Reads an entry of a list of models.
fn listed_model(entry: &serde_json::Value) -> Option<ListedModel> {
    let name = entry.get("id")?.as_str()?.to_owned();
    let modalities = entry.get("modalities").and_then(|list| list.as_array());
    let parse = |name: &serde_json::Value| name.as_str().and_then(Modality::parse);
    Some(ListedModel { name, modalities: modalities.map(|list| list.iter().filter_map(parse).collect()) })
}

/// Reads a streamed answer to its end. `asked`: the tokens that it has to have; None: as many as it likes, but one.
async fn read(stream: impl Stream<Item = Result<Bytes, String>>, asked: Option<u32>, clock: Clock) -> Reply {
    let mut stream = std::pin::pin!(stream);
    let mut lines = LineBuffer::default();
    let mut answer = AnswerState::default();
    while let Some(bytes) = stream.next().await {
        let at = clock.now();
        match bytes.map(|bytes| lines.add(&bytes)) {
            Ok(Some(events)) => events.iter().for_each(|event| answer.event(event, at)),
            Ok(None) => answer.error = Some("a line of the stream is too long".to_owned()),
            Err(broken) => answer.error = Some(broken),
        }
        if answer.error.is_some() {
            break;
        }
    }
    let tokens = times(&answer.pieces, answer.completion_tokens);
    let end = match answer.error {
        Some(error) => End::Failed(error),
        None if !answer.over => End::Failed("the stream ended without an end".to_owned()),
        None if tokens.len() < asked.unwrap_or(1).max(1) as usize => End::Short,
        None => End::Whole,
    };
    Reply { tokens, prompt_tokens: answer.prompt_tokens, ..Reply::without_tokens(end, clock.now()) }
}

/// The start of a body, which holds the error message.
async fn start_of(mut response: reqwest::Response) -> String {
    let mut text = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        text.extend_from_slice(&bytes);
        if text.len() > MAX_ERROR {
            break;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Text of an error without the address: errors are counted by their text.
fn broken(error: &reqwest::Error) -> String {
    let mut text = match error {
        e if e.is_connect() => "cannot connect".to_owned(),
        e if e.is_timeout() => "timed out".to_owned(),
        e if e.is_body() || e.is_decode() => "the stream broke".to_owned(),
        _ => "the request failed".to_owned(),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        source = cause.source();
        if source.is_none() {
            text = format!("{text}: {}", shortened(&cause.to_string()));
        }
    }
    text
}

/// The message of an OpenAI error, or the body's start.
fn message_of(body: &str) -> String {
    let error = serde_json::from_str::<serde_json::Value>(body).ok();
    let error = error.as_ref().and_then(|e| e.get("error").or(Some(e)));
    let message = error.and_then(|e| e.get("message")).and_then(|m| m.as_str());
    shortened(message.unwrap_or(body).trim())
}

#[cfg(test)]
mod tests;
