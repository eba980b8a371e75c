//! Server-sent events: `data: …` and an empty line.

use super::error::ErrorBody;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::Serialize;
use std::convert::Infallible;
use triptych_core::Failure;

/// What ends a stream of chat chunks.
pub(super) fn done() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// One event. JSON has no line breaks, so one `data` line holds it.
pub(super) fn event(data: &impl Serialize) -> Bytes {
    // Only maps with keys that are no strings fail, and there are none.
    let json = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("data: {json}\n\n"))
}

/// A failure in the middle of a stream; nothing follows it.
pub(super) fn error(failure: &Failure) -> Bytes {
    event(&ErrorBody::from(failure))
}

/// A response that sends the events as they come.
pub(super) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // Asks nginx in front not to collect events.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(events.map(Ok::<_, Infallible>))).into_response()
}
