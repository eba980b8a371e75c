//! Failures as they cross crates and processes: a class that machines act on, and two texts for two readers.

use std::fmt;
use std::time::Duration;

/// What a caller can do about a failure. The table of status codes lives in `runtime::status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// The request is wrong; sending it again is wrong again.
    InvalidArgument,
    /// The request names something that is not here: a model, a route.
    NotFound,
    /// Larger than a limit of this server.
    TooLarge,
    /// Nobody we know: no key, or none that is valid.
    Unauthenticated,
    /// Known, and not allowed.
    PermissionDenied,
    /// A bounded queue is full; later it may fit.
    Overloaded,
    /// Its time ran out.
    DeadlineExceeded,
    /// The caller went away.
    Cancelled,
    /// A part it needs is not there now; another try may find it.
    Unavailable,
    /// Two parts that must agree do not (fingerprints, versions): an operator's matter.
    Mismatch,
    /// Our bug.
    Internal,
}

impl FailureClass {
    /// Every class.
    pub const ALL: [Self; 11] = [
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
        Self::Internal,
    ];

    /// The word used in metrics, logs and error codes.
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
            Self::Internal => "internal",
        }
    }

    /// Whether the same request may succeed when it is sent again, perhaps elsewhere.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Overloaded | Self::Unavailable)
    }
}

/// A failure with its texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What a caller can do about it.
    pub class: FailureClass,
    /// For the client: names what was wrong and what is allowed, and nothing of the inside.
    pub message: String,
    /// The request field at fault, as clients name it.
    pub param: Option<String>,
    /// For the operator; never leaves the cluster.
    pub detail: Option<String>,
    /// The pause before another try makes sense, where the part that failed knows it. Only what is retryable tells it.
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

    /// Our bug: the client learns that it is ours, the operator what it is.
    pub fn internal(detail: impl fmt::Display) -> Self {
        Self::new(FailureClass::Internal, "internal error; the server's log has the cause")
            .with_detail(detail)
    }

    /// A part that is not there now.
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

    /// Says when another try makes sense.
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
