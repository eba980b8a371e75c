//! Reads request bodies with a limit on size, on silence, and on time: a declared length over the limit is refused
//! before a byte is read, and a body that trickles is given up. One that is so large that it has items takes its place as such
//! before it is read: uploads may take long.

use super::api::{AdmittedCall, HttpApi};
use super::error::HttpError;
use super::json_error;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use triptych_core::{Failure, FailureClass};

/// Bodies above this size in bytes are parsed on a blocking thread, and count as such with items.
const INLINE_BYTES: usize = 1 << 20;

/// Largest number of values in a JSON body. A prompt of token ids fits; many small values cannot take much memory.
const MAX_VALUES: usize = 256 << 10;

/// Largest number of lists and objects in a JSON body. An object of two bytes takes up to 700 in memory.
const MAX_CONTAINERS: usize = 16 << 10;

/// Errors of reading a body.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(super) enum BodyError {
    #[error("the body has {len} bytes or more, the limit is {limit}")]
    TooLarge { len: u64, limit: usize },
    #[error("the body did not arrive in time")]
    Slow,
    #[error("the body broke off")]
    Broken,
    #[error("this tenant holds its quota of memory already")]
    OverQuota,
}

impl From<BodyError> for HttpError {
    fn from(e: BodyError) -> Self {
        let of = |class| Self { closes: true, ..Self::from(Failure::new(class, e.to_string())) };
        match e {
            BodyError::TooLarge { .. } => of(FailureClass::TooLarge),
            BodyError::Slow => {
                Self { status: StatusCode::REQUEST_TIMEOUT, ..of(FailureClass::InvalidArgument) }
            }
            BodyError::OverQuota => of(FailureClass::Overloaded),
            BodyError::Broken => of(FailureClass::InvalidArgument),
        }
    }
}

/// Refuses a declared length over the limit; returns it, 0 without one.
pub(super) fn check_declared(headers: &HeaderMap, limit: usize) -> Result<u64, BodyError> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    match declared.unwrap_or(0) {
        len if len > limit as u64 => Err(BodyError::TooLarge { len, limit }),
        len => Ok(len),
    }
}

/// The pieces of a body, as a stream. It ends after the first error.
pub(super) fn pieces(
    api: &HttpApi,
    call: &AdmittedCall,
    body: Body,
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send + use<> {
    let caller = call.caller.clone();
    let limit = api.limits.max_body_bytes;
    let idle = api.times.body_idle;
    let deadline = call.deadline;
    stream::unfold(Some((body.into_data_stream(), 0usize, caller)), move |state| async move {
        let (mut body, received, caller) = state?;
        let until = (Instant::now() + idle).min(deadline);
        let piece = match timeout_at(until, body.next()).await {
            Err(_) => Err(BodyError::Slow),
            Ok(None) => return None,
            Ok(Some(Err(_))) => Err(BodyError::Broken),
            Ok(Some(Ok(piece))) => Ok(piece),
        };
        let received = received.saturating_add(piece.as_ref().map_or(0, Bytes::len));
        match piece {
            Ok(_) if received > limit => {
                Some((Err(BodyError::TooLarge { len: received as u64, limit }), None))
            }
            Ok(piece) if caller.hold_bytes(piece.len()).is_err() => Some((Err(BodyError::OverQuota), None)),
            Ok(piece) => Some((Ok(piece), Some((body, received, caller)))),
            Err(e) => Some((Err(e), None)),
        }
    })
}

/// Parses a JSON body as two types, each of which takes the fields it knows. Errors name the field, the line and the
/// column, which `#[serde(flatten)]` would lose.
pub(super) async fn json_twice<A, B>(
    api: &HttpApi,
    call: &AdmittedCall,
    headers: &HeaderMap,
    body: Body,
) -> Result<(A, B), HttpError>
where
    A: DeserializeOwned + Send + 'static,
    B: DeserializeOwned + Send + 'static,
{
    let declared = check_declared(headers, api.limits.max_body_bytes)?;
    let mut bytes = BytesMut::new();
    let mut pieces = std::pin::pin!(pieces(api, call, body));
    loop {
        if declared.max(bytes.len() as u64) > INLINE_BYTES as u64 {
            call.with_items()?;
        }
        let Some(piece) = pieces.next().await else { break };
        bytes.extend_from_slice(&piece?);
    }
    if bytes.len() > INLINE_BYTES {
        let both = move || Ok::<_, Failure>((parse(&bytes)?, parse(&bytes)?));
        Ok(api.orchestrator.materials.preparing.run(both).await??)
    } else {
        Ok((parse(&bytes)?, parse(&bytes)?))
    }
}

/// Counts the values, by commas, and the lists and objects, which one value may nest.
fn check_values(bytes: &[u8]) -> Result<(), Failure> {
    let (mut n_values, mut n_containers) = (1, 0);
    let mut is_text = false;
    let mut is_escaped = false;
    for byte in bytes {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' if !is_text => n_values += 1,
            b'[' | b'{' if !is_text => n_containers += 1,
            _ => {}
        }
    }
    if n_values > MAX_VALUES {
        let message = format!("the body has {n_values} values or more, the limit is {MAX_VALUES}");
        return Err(Failure::invalid(message));
    }
    if n_containers > MAX_CONTAINERS {
        let message =
            format!("the body has {n_containers} lists and objects or more, the limit is {MAX_CONTAINERS}");
        return Err(Failure::invalid(message));
    }
    Ok(())
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    json_error::check_object(bytes)?;
    check_values(bytes)?;
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| json_error::failure(&e))?;
    reader.end().map_err(|e| Failure::invalid(format!("the body goes on after its JSON: {e}")))?;
    Ok(value)
}
