//! Constants and conversions of both ends of the `EcObjects` service: frame sizes, HTTP/2 windows, keep-alive, status
//! codes.
//!
//! The windows are the difference between 0.8 and 1.9 ms for 2 MiB, and 9 and 20 ms for 20 MiB, on one host.

use crate::store::Listed;
use crate::store::lease::Acquired;
use bytes::Bytes;
use std::time::{Duration, UNIX_EPOCH};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use triptych_core::ContentKey;
use triptych_proto::v1;

/// Most bytes of an object in one message.
pub(crate) const FRAME_BYTES: usize = 1 << 20;
/// Most bytes of a message: a frame, or the heads of [`MAX_KEYS`] objects.
pub(crate) const MAX_MESSAGE_BYTES: usize = 2 * FRAME_BYTES;
/// Most keys in one request.
pub(crate) const MAX_KEYS: usize = 256;
/// Most entries of a page.
pub(crate) const MAX_PAGE: usize = 1024;
/// Longest wait of one call.
pub(crate) const MAX_PATIENCE: Duration = Duration::from_secs(30);
/// Longest life of a lease that is not renewed.
pub(crate) const MAX_LEASE: Duration = Duration::from_secs(600);
/// HTTP/2 window of a stream.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
/// HTTP/2 window of a connection.
pub(crate) const CONNECTION_WINDOW: u32 = 32 << 20;
/// Idle time before a keep-alive ping.
pub(crate) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Time to answer a ping, after which the connection is closed.
pub(crate) const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Carries the limit with a refusal of an object that is too large.
const LIMIT_HEADER: &str = "triptych-limit-bytes";

/// The refusal of an object that is too large.
pub(crate) fn too_large(limit: usize, actual: usize) -> Status {
    let mut status = Status::out_of_range(format!("object of {actual} bytes is over the limit of {limit}"));
    status.metadata_mut().insert(LIMIT_HEADER, MetadataValue::from(limit as u64));
    status
}

/// The limit in such a refusal, if the status is one.
pub(crate) fn limit_of(status: &Status) -> Option<usize> {
    if status.code() != Code::OutOfRange {
        return None;
    }
    status.metadata().get(LIMIT_HEADER)?.to_str().ok()?.parse().ok()
}

/// Parses a key from the wire.
pub(crate) fn key_of(bytes: &[u8]) -> Result<ContentKey, Box<Status>> {
    ContentKey::from_slice(bytes).ok_or_else(|| {
        Box::new(Status::invalid_argument(format!("key has {} bytes, a key has 32", bytes.len())))
    })
}

/// Bounds a lease's time to live from the wire.
pub(crate) fn lease_ttl(ttl_ms: u64) -> Duration {
    Duration::from_millis(ttl_ms).min(MAX_LEASE)
}

/// The response to a lease request.
pub(crate) fn acquired(acquired: Acquired) -> v1::LeaseResponse {
    match acquired {
        Acquired::Granted(lease) => v1::LeaseResponse { done: true, token: lease.token, left_ms: 0 },
        Acquired::Held { left } => v1::LeaseResponse {
            done: false,
            token: 0,
            left_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        },
    }
}

/// One object of a list.
pub(crate) fn listed(object: &Listed) -> v1::list_response::Entry {
    let stored = object.stored.and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    v1::list_response::Entry {
        key: Bytes::copy_from_slice(object.key.as_bytes()),
        len: object.len,
        stored_ms: stored.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
    }
}
