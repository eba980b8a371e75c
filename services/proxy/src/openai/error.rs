//! Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::status::{exceeds_context, http_status_of, retry_after_seconds};

/// A failure with its HTTP status: of its class, or one that only HTTP has (405, 408).
#[derive(Debug)]
pub(super) struct HttpError {
    pub(super) status: StatusCode,
    pub(super) failure: Failure,
    /// True if the connection closes without waiting for the rest of the body.
    pub(super) closes: bool,
}

/// A client's text in quotes: at most 80 characters of it.
pub(super) fn quoted(value: &str) -> String {
    format!("{:?}", value.chars().take(80).collect::<String>())
}

/// A failure for a field with a value that is not allowed.
pub(super) fn invalid_field(field: &str, value: &str, allowed: &str) -> Failure {
    Failure::invalid(format!("{field} is {}, allowed are {allowed}", quoted(value))).with_param(field)
}

impl From<Failure> for HttpError {
    fn from(failure: Failure) -> Self {
        let closes = failure.class == FailureClass::TooLarge && !exceeds_context(&failure);
        Self { status: http_status_of(&failure), failure, closes }
    }
}

/// The body of an error response, and the data of an error event.
#[derive(Debug, Serialize)]
pub(super) struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl<'a> From<&'a Failure> for ErrorBody<'a> {
    fn from(failure: &'a Failure) -> Self {
        let kind = match failure.class {
            FailureClass::InvalidArgument
            | FailureClass::NotFound
            | FailureClass::TooLarge
            | FailureClass::Unprocessable => "invalid_request_error",
            FailureClass::Unauthenticated => "authentication_error",
            FailureClass::PermissionDenied => "permission_error",
            FailureClass::Overloaded => "rate_limit_error",
            FailureClass::DeadlineExceeded => "timeout_error",
            FailureClass::Cancelled
            | FailureClass::Unavailable
            | FailureClass::Mismatch
            | FailureClass::Quarantined
            | FailureClass::Internal => "server_error",
        };
        let param = failure.param.as_deref();
        let code = match failure.class {
            FailureClass::InvalidArgument => None,
            FailureClass::NotFound if param == Some("model") => Some("model_not_found"),
            FailureClass::Unauthenticated => Some("invalid_api_key"),
            FailureClass::Quarantined => Some("request_quarantined"),
            FailureClass::TooLarge if exceeds_context(failure) => Some("context_length_exceeded"),
            class => Some(class.as_str()),
        };
        Self { error: ErrorFields { message: &failure.message, kind, param, code } }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(ErrorBody::from(&self.failure))).into_response();
        if let Some(seconds) = retry_after_seconds(&self.failure) {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if self.failure.class == FailureClass::Quarantined {
            // OpenAI's clients try again after any 500 that does not say this.
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the request's span.
        response.extensions_mut().insert(self.failure.class);
        if self.closes {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_names_or_null() {
        let cases = [
            (FailureClass::InvalidArgument, Some("n"), None),
            (FailureClass::NotFound, Some("model"), Some("model_not_found")),
            (FailureClass::NotFound, None, Some("not_found")),
            (FailureClass::Overloaded, None, Some("overloaded")),
            (FailureClass::Quarantined, None, Some("request_quarantined")),
            (FailureClass::TooLarge, Some("prompt"), Some("context_length_exceeded")),
            (FailureClass::TooLarge, Some("items[0]"), Some("too_large")),
        ];
        for (class, param, code) in cases {
            let failure = Failure { param: param.map(str::to_owned), ..Failure::new(class, "m") };
            let body = serde_json::to_value(ErrorBody::from(&failure)).unwrap();
            assert_eq!(body["error"]["code"], serde_json::json!(code));
            assert_eq!(body["error"]["param"], serde_json::json!(param));
            assert_eq!(body["error"]["message"], "m");
        }
    }
}
