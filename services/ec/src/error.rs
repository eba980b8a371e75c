//! Errors of stores, and their conversion to a request's failure.
//!
//! A miss is not an error: it is `None`. None of these ends a process, and after all but [`EcError::Config`] a caller
//! continues: with a retry, or by encoding again.

use crate::object::ObjectError;
use crate::store::kind::{Op, StoreKind};
use std::error::Error;
use std::time::Duration;
use thiserror::Error;
use triptych_core::{ContentKey, Failure, FailureClass};

/// The cause inside a library that a store is built on.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A failed operation on a store.
#[derive(Debug, Error)]
pub enum EcError {
    /// The store is unreachable, or failed. A retry may succeed.
    #[error("{store} store: {op} failed")]
    Unavailable {
        /// Kind of the store.
        store: StoreKind,
        /// The operation.
        op: Op,
        /// Cause.
        #[source]
        source: BoxError,
    },
    /// No answer in time. The operation may have taken place.
    #[error("{store} store: {op} did not end within {limit:?}")]
    TimedOut {
        /// Kind of the store.
        store: StoreKind,
        /// The operation.
        op: Op,
        /// The limit that passed.
        limit: Duration,
    },
    /// The store does not have this operation. Never retried.
    #[error("a {store} store has no {op}")]
    Unsupported {
        /// Kind of the store.
        store: StoreKind,
        /// The operation.
        op: Op,
    },
    /// The store was opened to be read. Never retried.
    #[error("the {store} store was opened to be read: no {op}")]
    ReadOnly {
        /// Kind of the store.
        store: StoreKind,
        /// The operation.
        op: Op,
    },
    /// There is no such store, and it was opened without leave to make one. Only at open.
    #[error("there is no {store} store at {place}")]
    NoStore {
        /// Kind of the store.
        store: StoreKind,
        /// Path of its directory or slab.
        place: String,
    },
    /// The queue of the store is full. Not retried here, which would add load.
    #[error("{store} store: {op} refused, {limit} operations are queued already")]
    Overloaded {
        /// Kind of the store.
        store: StoreKind,
        /// The operation.
        op: Op,
        /// Length of the queue.
        limit: usize,
    },
    /// The object is larger than this store takes. Never retried.
    #[error("object of {actual} bytes is over the limit of {limit}")]
    TooLarge {
        /// Largest object.
        limit: usize,
        /// This one.
        actual: usize,
    },
    /// The bytes under the key are no valid object. Quarantine it and publish again.
    #[error("object {key:?} does not verify")]
    Corrupt {
        /// Its key.
        key: ContentKey,
        /// Cause.
        #[source]
        source: ObjectError,
    },
    /// The setting is wrong or cannot be used here. Only at start, or at the first answer of a service.
    #[error("EC store {setting:?}: {reason}")]
    Config {
        /// The setting, without secrets.
        setting: String,
        /// The mistake, and the allowed values.
        reason: String,
    },
}

impl EcError {
    /// Wraps the cause of a failed operation.
    pub fn unavailable(store: StoreKind, op: Op, source: impl Into<BoxError>) -> Self {
        Self::Unavailable { store, op, source: source.into() }
    }

    /// True if a retry of the operation may succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::TimedOut { .. })
    }
}

impl From<&EcError> for Failure {
    fn from(e: &EcError) -> Self {
        let failure = match e {
            EcError::Unavailable { .. } | EcError::TimedOut { .. } | EcError::Corrupt { .. } => {
                Failure::unavailable("the encoder cache is not available now; try again")
            }
            EcError::Overloaded { .. } => Failure::new(
                FailureClass::Overloaded,
                "the encoder cache is overloaded; try again in a moment",
            ),
            EcError::TooLarge { limit, actual } => Failure::new(
                FailureClass::TooLarge,
                format!("the encoder output has {actual} bytes, the limit is {limit}"),
            ),
            EcError::Config { .. }
            | EcError::Unsupported { .. }
            | EcError::ReadOnly { .. }
            | EcError::NoStore { .. } => return Failure::internal(chain(e)),
        };
        failure.with_detail(chain(e))
    }
}

impl From<EcError> for Failure {
    fn from(e: EcError) -> Self {
        Self::from(&e)
    }
}

/// An error and its causes on one line.
pub fn chain(e: &(dyn Error + 'static)) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text.push_str(": ");
        text.push_str(&e.to_string());
        cause = e.source();
    }
    text
}
