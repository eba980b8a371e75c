//! Conversion of a service's errors.

use crate::error::{BoxError, EcError, chain};
use crate::store::{Op, StoreKind};
use object_store::client::{HttpError, HttpErrorKind};
use std::error::Error;
use std::time::Duration;

/// Error codes for a missing bucket, which has the same status as a missing object.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "specified bucket does not exist"];

/// Codes with which services refuse a key, its signature or a token. A lack of permission has others.
const REFUSED: [&str; 7] = [
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "RequestTimeTooSkewed",
    "AuthenticationFailed",
    "AuthorizationFailure",
];

/// Error of a request, without the store's operation.
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

/// True if the bucket exists and the object does not.
pub(super) fn is_not_found(e: &object_store::Error) -> bool {
    let object_store::Error::NotFound { source, .. } = e else { return false };
    let text = source.to_string();
    !NO_BUCKET.iter().any(|code| text.contains(code))
}

/// The code with which the service refused the credentials; `None` for every other failure.
pub(super) fn refused_credentials(e: &EcError) -> Option<&'static str> {
    let EcError::Unavailable { source, .. } = e else { return None };
    let text = chain(&**source);
    let code = REFUSED.into_iter().find(|code| text.contains(code));
    let is_unknown = source
        .downcast_ref::<object_store::Error>()
        .is_some_and(|e| matches!(e, object_store::Error::Unauthenticated { .. }));
    code.or(is_unknown.then_some("unauthenticated"))
}

/// True if the condition of a write failed.
pub(super) fn is_conflict(e: &object_store::Error) -> bool {
    matches!(e, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

/// Kind of a transport failure; `None` for a reply of the service.
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
