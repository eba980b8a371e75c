//! What a service's failure means to a caller.

use crate::error::{BoxError, EcError};
use crate::store::{Op, StoreKind};
use object_store::client::{HttpError, HttpErrorKind};
use std::error::Error;
use std::time::Duration;

/// How the services call a bucket that is not there, which has the same status as an object that is not.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "specified bucket does not exist"];

/// Why an operation did not end well; it does not know which operation.
#[derive(Debug)]
pub(super) enum BucketError {
    Service(object_store::Error),
    Other(BoxError),
}

impl From<object_store::Error> for BucketError {
    fn from(e: object_store::Error) -> Self {
        Self::Service(e)
    }
}

impl From<&'static str> for BucketError {
    fn from(reason: &'static str) -> Self {
        Self::Other(reason.into())
    }
}

impl BucketError {
    pub(super) fn refine(self, op: Op, limit: Duration) -> EcError {
        match self {
            Self::Service(e) if transport(&e) == Some(HttpErrorKind::Timeout) => {
                EcError::TimedOut { store: StoreKind::Object, op, limit }
            }
            Self::Service(e) => EcError::unavailable(StoreKind::Object, op, e),
            Self::Other(e) => EcError::unavailable(StoreKind::Object, op, e),
        }
    }
}

/// Whether there is no object, in a bucket that is there.
pub(super) fn is_not_found(e: &object_store::Error) -> bool {
    let object_store::Error::NotFound { source, .. } = e else { return false };
    let text = source.to_string();
    !NO_BUCKET.iter().any(|code| text.contains(code))
}

/// Whether a condition on a write did not hold.
pub(super) fn is_conflict(e: &object_store::Error) -> bool {
    matches!(e, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

/// How the connection failed, if it was that and not the service's answer.
pub(super) fn transport(e: &(dyn Error + 'static)) -> Option<HttpErrorKind> {
    let mut cause = Some(e);
    while let Some(e) = cause {
        if let Some(http) = e.downcast_ref::<HttpError>() {
            return Some(http.kind());
        }
        cause = e.source();
    }
    None
}
