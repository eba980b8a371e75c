//! `GET /v1/realtime`: transcription of a live stream over a WebSocket, with OpenAI's events.
//!
//! Audio is transcribed as it arrives, again and again from the last cut; text goes out once two transcripts in a row agree on
//! it (`agreement`, LocalAgreement-2). The client ends an item by a commit. A session is one admitted request: its place, its
//! tenant's slot and the work on its audio end with its socket.

mod agreement;
mod audio;
mod events;
mod item;
mod session;
mod settings;
mod transcript;

use super::api::{HttpApi, request_id};
use super::error::HttpError;
use super::upgrade::UpgradeSlot;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use session::Session;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use triptych_core::{Failure, ModelName};

/// Largest message of a client: an append of about a minute of audio.
const MAX_MESSAGE: usize = 4 << 20;
/// Subprotocol that OpenAI's clients in browsers ask for.
const SUBPROTOCOL: &str = "realtime";

#[derive(Debug, Deserialize)]
pub(super) struct ConnectQuery {
    model: Option<String>,
    intent: Option<String>,
}

pub(super) async fn connect(
    State(api): State<HttpApi>,
    Query(query): Query<ConnectQuery>,
    request: Request,
) -> Result<Response, HttpError> {
    let id = request_id(&request);
    let read = || {
        if query.intent.as_deref().is_some_and(|intent| intent != "transcription") {
            let message = "intent is not transcription, which is what sessions are for";
            return Err(Failure::invalid(message).with_param("intent").into());
        }
        let key = accept_key(request.headers())?;
        let slot = request.extensions().get::<UpgradeSlot>().cloned();
        let slot = slot.ok_or_else(|| Failure::invalid("this listener takes no WebSocket"))?;
        let call = api.admit(&request)?;
        let place = call.caller.account.enter_session(api.sessions.per_tenant)?;
        Ok::<_, HttpError>((key, slot, call, place))
    };
    let (key, slot, call, place) = read().inspect_err(|e| api.refused(id, e))?;
    let model = query.model.filter(|name| !name.is_empty()).map(ModelName::new);
    let is_named = offers(request.headers());
    slot.leave(move |(stream, read)| async move {
        let config =
            WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
        let socket =
            WebSocketStream::from_partially_read(stream, read.into(), Role::Server, Some(config)).await;
        Session::new(api, call, model).run(socket).await;
        drop(place);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, key);
    if is_named {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    }
    Ok(response)
}

/// The answer to the key of a handshake (RFC 6455).
fn accept_key(headers: &HeaderMap) -> Result<HeaderValue, HttpError> {
    let has = |name: HeaderName, word: &str| {
        let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(word))
    };
    let is_upgrade = has(header::CONNECTION, "upgrade") && has(header::UPGRADE, "websocket");
    let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|_| is_upgrade);
    let is_known = headers.get(header::SEC_WEBSOCKET_VERSION).is_some_and(|version| version == "13");
    let key = key.filter(|_| is_known).ok_or_else(|| HttpError {
        status: StatusCode::UPGRADE_REQUIRED,
        failure: Failure::invalid("this route is a WebSocket of version 13: it needs the headers of one"),
        closes: false,
    })?;
    let accepted = HeaderValue::from_str(&derive_accept_key(key.as_bytes()));
    accepted.map_err(|e| Failure::internal(e).into())
}

/// True if the client offers OpenAI's subprotocol.
fn offers(headers: &HeaderMap) -> bool {
    let offered = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter();
    let offered = offered.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    offered.into_iter().any(|name| name.trim() == SUBPROTOCOL)
}
