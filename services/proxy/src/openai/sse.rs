//! Server-sent events: `data: …` and an empty line.

use super::error::ErrorBody;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use tracing::Span;
use triptych_core::Failure;
use triptych_runtime::spans::served_failure;

/// The `stream_options` of a chat or completion body.
#[derive(Debug, Deserialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
}

/// The event that ends a stream of chunks.
pub(super) fn done() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// One event. JSON has no line breaks, so one `data` line holds it.
pub(super) fn event(data: &impl Serialize) -> Bytes {
    // Serialization fails for maps with non-string keys only, and there are none.
    let json = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("data: {json}\n\n"))
}

/// One event with a name of its own, as `/v1/responses` has them.
pub(super) fn named_event(name: &str, data: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {name}\ndata: {json}\n\n"))
}

/// The event of a failure in the middle of a stream; the stream ends with it. It is made inside the request's span.
pub(super) fn error(failure: &Failure) -> Bytes {
    served_failure(&Span::current(), failure.class);
    event(&ErrorBody::from(failure))
}

/// A response that streams the events.
pub(super) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // Turns off buffering in nginx.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(events.map(Ok::<_, Infallible>))).into_response()
}
