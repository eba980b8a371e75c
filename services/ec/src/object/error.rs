//! Errors of EC objects.

use thiserror::Error;
use triptych_core::ContentKey;

/// Largest head of an object in bytes.
pub const MAX_HEAD_BYTES: usize = 16 << 10;

/// Bytes that are not the expected object. In every case it is quarantined and encoded again.
#[derive(Debug, Error)]
pub enum ObjectError {
    /// The bytes end early.
    #[error("object ends after {actual} bytes, {expected} expected")]
    Truncated {
        /// Bytes needed, as far as is known.
        expected: usize,
        /// Bytes there.
        actual: usize,
    },
    /// There are bytes after the last row.
    #[error("object has {actual} bytes, {expected} expected")]
    TrailingBytes {
        /// From the head.
        expected: usize,
        /// Bytes there.
        actual: usize,
    },
    /// The actual or claimed length of the object is over the limit.
    #[error("object claims {actual} bytes, the limit is {limit}")]
    TooLarge {
        /// Largest object.
        limit: usize,
        /// Claimed length; `usize::MAX` stands for anything that does not fit.
        actual: usize,
    },
    /// The claimed length of the head is over the limit.
    #[error("head claims {actual} bytes, the limit is {limit}")]
    HeadTooLarge {
        /// Largest head.
        limit: usize,
        /// Claimed length.
        actual: u64,
    },
    /// The head is not the JSON it should be.
    #[error("head cannot be read")]
    Json(#[from] serde_json::Error),
    /// An unknown value in the head.
    #[error("{field} of the head is not a known value")]
    Field {
        /// The field's name.
        field: &'static str,
    },
    /// A head that differs from the one that this version writes for its item.
    #[error("head does not agree with itself")]
    Inconsistent,
    /// An object of another key.
    #[error("object is of {actual:?}, asked for {expected:?}")]
    WrongKey {
        /// Asked for.
        expected: ContentKey,
        /// Found.
        actual: ContentKey,
    },
    /// An object of this key, but not of the announced item.
    #[error("object does not have the {field} that was announced")]
    NotAsAnnounced {
        /// The field that differs.
        field: &'static str,
    },
    /// The rows do not match the checksum.
    #[error("rows do not verify")]
    Rows(#[from] triptych_core::item::OutputError),
    /// No MAC, where this cluster requires one.
    #[error("object is not signed")]
    Unsigned,
    /// A MAC of none of this cluster's keys.
    #[error("object is signed with another key")]
    Forged,
    /// A malformed frame of the store around the object.
    #[error("store frame: {reason}")]
    Frame {
        /// The mistake.
        reason: &'static str,
    },
}
