//! What goes wrong between a caller and a store, and what each failure means to a request.
//!
//! A miss is not an error: it is `None`. None of these ends a process, and all but [`EcError::Config`] are
//! states that a caller passes through: another try, or encoding again.

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
    /// The store is not there, or did not do it. Another try may succeed.
    #[error("{store} store: {op} failed")]
    Unavailable {
        /// Which store.
        store: StoreKind,
        /// What was asked.
        op: Op,
        /// Why.
        #[source]
        source: BoxError,
    },
    /// The store did not answer in time. It may have done it.
    #[error("{store} store: {op} did not end within {limit:?}")]
    TimedOut {
        /// Which store.
        store: StoreKind,
        /// What was asked.
        op: Op,
        /// The limit that passed.
        limit: Duration,
    },
    /// The store cannot do this at all. Never retried.
    #[error("a {store} store has no {op}")]
    Unsupported {
        /// Which store.
        store: StoreKind,
        /// What was asked.
        op: Op,
    },
    /// So much is asked of the store that more would only wait. Not retried here: that would ask for more still.
    #[error("{store} store: {op} refused, {limit} operations wait already")]
    Overloaded {
        /// Which store.
        store: StoreKind,
        /// What was asked.
        op: Op,
        /// Most that wait.
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
    /// What lies under the key is not an object. Quarantine it and publish again.
    #[error("object {key:?} does not verify")]
    Corrupt {
        /// Its key.
        key: ContentKey,
        /// Why.
        #[source]
        source: ObjectError,
    },
    /// The setting is wrong or cannot be followed here. Only at start, or when a service answers for the first time.
    #[error("EC store {setting:?}: {reason}")]
    Config {
        /// The setting, without secrets.
        setting: String,
        /// What is wrong, and what is allowed.
        reason: String,
    },
}

impl EcError {
    /// Wraps the cause of a store that does not work.
    pub fn unavailable(store: StoreKind, op: Op, source: impl Into<BoxError>) -> Self {
        Self::Unavailable { store, op, source: source.into() }
    }

    /// Whether the same operation may succeed when it is tried again.
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
                "the encoder cache has as much to do as it takes; try again in a moment",
            ),
            EcError::TooLarge { limit, actual } => Failure::new(
                FailureClass::TooLarge,
                format!("the encoder output has {actual} bytes, the limit is {limit}"),
            ),
            EcError::Config { .. } | EcError::Unsupported { .. } => return Failure::internal(chain(e)),
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
