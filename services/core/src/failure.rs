//! Failures as they cross crates and processes: a class that machines act on, and two texts for two readers.

use std::fmt;
use std::time::Duration;

/// Class of a failure: the action that a caller can take. The table of status codes lives in `runtime::status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// The request is wrong; sending it again is wrong again.
    InvalidArgument,
    /// The request names something that is not here: a model, a route.
    NotFound,
    /// Larger than a limit of this server.
    TooLarge,
    /// No key, or none that is valid.
    Unauthenticated,
    /// The client is known and not allowed to do this.
    PermissionDenied,
    /// A bounded queue is full; later it may fit.
    Overloaded,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The caller went away.
    Cancelled,
    /// A component that it needs is not available; a retry may succeed.
    Unavailable,
    /// Two components that must agree do not (fingerprints, versions). Only an operator can resolve it.
    Mismatch,
    /// Workers died each time this request was tried: it is not tried again for a while.
    Quarantined,
    /// Our bug.
    Internal,
}

impl FailureClass {
    /// Every class.
    pub const ALL: [Self; 12] = [
        Self::InvalidArgument,
        Self::NotFound,
        Self::TooLarge,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::Overloaded,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::Unavailable,
        Self::Mismatch,
        Self::Quarantined,
        Self::Internal,
    ];

    /// The label used in metrics, logs and error codes.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::NotFound => "not_found",
            Self::TooLarge => "too_large",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::Overloaded => "overloaded",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::Unavailable => "unavailable",
            Self::Mismatch => "mismatch",
            Self::Quarantined => "quarantined",
            Self::Internal => "internal",
        }
    }

    /// True if the same request may succeed on a retry, perhaps on another worker.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Overloaded | Self::Unavailable)
    }
}

/// A failure with its texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The action that a caller can take.
    pub class: FailureClass,
    /// Text for the client: the mistake and the allowed values, without internals.
    pub message: String,
    /// The request field at fault, as clients name it.
    pub param: Option<String>,
    /// Text for the operator; never leaves the cluster.
    pub detail: Option<String>,
    /// Pause before a retry makes sense, if known. Set only on retryable failures.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure with a text for the client.
    pub fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), param: None, detail: None, retry_after: None }
    }

    /// A wrong request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FailureClass::InvalidArgument, message)
    }

    /// Our bug: the cause goes to the operator's text only.
    pub fn internal(detail: impl fmt::Display) -> Self {
        Self::new(FailureClass::Internal, "internal error; the server's log has the cause")
            .with_detail(detail)
    }

    /// A component that is not available.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(FailureClass::Unavailable, message)
    }

    /// Names the field at fault.
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Adds the operator's text.
    pub fn with_detail(mut self, detail: impl fmt::Display) -> Self {
        self.detail = Some(detail.to_string());
        self
    }

    /// Sets the pause before a retry.
    pub fn with_retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class.as_str(), self.message)?;
        match &self.detail {
            Some(detail) => write!(f, " ({detail})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

impl From<crate::sampling::OutOfRange> for Failure {
    fn from(e: crate::sampling::OutOfRange) -> Self {
        Self::invalid(e.to_string()).with_param(e.field)
    }
}
