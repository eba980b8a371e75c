//! Conversions between wire and core types; the only place where a wire enum becomes a core enum.
//!
//! proto3 lets any number stand in an enum and any field be absent, so each conversion from the wire returns a
//! [`WireError`] that names the field, and none panics; property tests in this file's crate hold that.

mod chat;
pub mod item;
mod output;
mod prompt;
mod sampling;

pub use item::{encoder_id, frames, item_form, modality, options};
pub use sampling::{finish_name, finish_reason, sampling_from_wire, sampling_to_wire};

use crate::v1;
use thiserror::Error;
use triptych_core::{AdapterId, ContentKey, Failure, Fingerprint, Tower};

/// A message that does not follow the schema's comments.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum WireError {
    /// A field that must be set is not.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A number that is no value of the enum.
    #[error("{field} is {value}, which is not a value of {set}")]
    Enum {
        /// The field.
        field: &'static str,
        /// The number.
        value: i32,
        /// The enum.
        set: &'static str,
    },
    /// A byte field of the wrong length.
    #[error("{field} has {actual} bytes, expected {expected}")]
    Length {
        /// The field.
        field: &'static str,
        /// Expected length in bytes.
        expected: usize,
        /// Actual length in bytes.
        actual: usize,
    },
    /// Anything else.
    #[error("{field}: {message}")]
    Value {
        /// The field.
        field: &'static str,
        /// The mistake.
        message: String,
    },
}

impl WireError {
    /// The field at fault.
    pub const fn field(&self) -> &'static str {
        match self {
            Self::Missing { field }
            | Self::Enum { field, .. }
            | Self::Length { field, .. }
            | Self::Value { field, .. } => field,
        }
    }
}

impl From<WireError> for Failure {
    fn from(e: WireError) -> Self {
        Self::invalid(e.to_string()).with_param(e.field())
    }
}

/// Reads a content key.
///
/// # Errors
/// [`WireError::Length`] unless it has 32 bytes.
pub fn key(bytes: &[u8], field: &'static str) -> Result<ContentKey, WireError> {
    ContentKey::from_slice(bytes).ok_or(WireError::Length { field, expected: 32, actual: bytes.len() })
}

/// Reads a fingerprint.
///
/// # Errors
/// [`WireError::Length`] unless it has 32 bytes.
pub fn fingerprint(bytes: &[u8], field: &'static str) -> Result<Fingerprint, WireError> {
    Fingerprint::from_slice(bytes).ok_or(WireError::Length { field, expected: 32, actual: bytes.len() })
}

/// Reads the digests of a tower.
///
/// # Errors
/// [`WireError::Length`] unless each has 32 bytes.
pub fn tower(tower: &v1::worker_model::Tower) -> Result<Tower, WireError> {
    Ok(Tower {
        configuration: fingerprint(&tower.configuration, "configuration")?,
        processor: fingerprint(&tower.processor, "processor")?,
        weights: fingerprint(&tower.weights, "weights")?,
    })
}

impl From<&Tower> for v1::worker_model::Tower {
    fn from(tower: &Tower) -> Self {
        let bytes = |digest: &Fingerprint| digest.as_bytes().to_vec().into();
        Self {
            configuration: bytes(&tower.configuration),
            processor: bytes(&tower.processor),
            weights: bytes(&tower.weights),
        }
    }
}

/// Reads the identity of an adapter.
///
/// # Errors
/// [`WireError::Length`] unless it has 32 bytes.
pub fn adapter(bytes: &[u8], field: &'static str) -> Result<AdapterId, WireError> {
    AdapterId::from_slice(bytes).ok_or(WireError::Length { field, expected: 32, actual: bytes.len() })
}

fn required<T>(value: Option<T>, field: &'static str) -> Result<T, WireError> {
    value.ok_or(WireError::Missing { field })
}
