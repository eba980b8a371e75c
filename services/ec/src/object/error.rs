//! Errors of EC objects.

use thiserror::Error;
use triptych_core::ContentKey;

/// The head of any object fits in its first bytes, this many.
pub const MAX_HEAD_BYTES: usize = 16 << 10;

/// Why bytes are not the object they should be. Each is cured in the same way: quarantine and encode again.
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
    /// The object, or what it claims to be, is over the limit.
    #[error("object claims {actual} bytes, the limit is {limit}")]
    TooLarge {
        /// Largest object.
        limit: usize,
        /// Claimed length; `usize::MAX` stands for anything that does not fit.
        actual: usize,
    },
    /// The length of the head is not believable.
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
    /// A value of the head is not one we know.
    #[error("{field} of the head is not a known value")]
    Field {
        /// The value's name.
        field: &'static str,
    },
    /// The head describes an item, but is not what this version writes for it.
    #[error("head does not agree with itself")]
    Inconsistent,
    /// A whole object, but of another key.
    #[error("object is of {actual:?}, asked for {expected:?}")]
    WrongKey {
        /// Asked for.
        expected: ContentKey,
        /// Found.
        actual: ContentKey,
    },
    /// An object of this key, but not of the item that was announced under it.
    #[error("object does not have the {field} that was announced")]
    NotAsAnnounced {
        /// What differs.
        field: &'static str,
    },
    /// The rows do not hash to the checksum.
    #[error("rows do not verify")]
    Rows(#[from] triptych_core::item::OutputError),
    /// It has no MAC, and this cluster's objects have one.
    #[error("object is not signed")]
    Unsigned,
    /// Its MAC is of none of this cluster's keys.
    #[error("object is signed with another key")]
    Forged,
    /// The store's own frame around the object makes no sense.
    #[error("store frame: {reason}")]
    Frame {
        /// What is wrong.
        reason: &'static str,
    },
}
