//! Failures of vLLM servers, and what they are for a request (docs.vllm.ai, "OpenAI-Compatible Server": an `error` with message,
//! type, param and code).

use serde::Deserialize;
use std::time::Duration;
use thiserror::Error;
use tonic::Status;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::status::to_status;

/// Longest message of a server that is passed on, in characters.
const MAX_MESSAGE: usize = 400;
/// Fields of embeddings, which only a server with `--enable-mm-embeds` reads.
const EMBEDS: [&str; 3] = ["image_embeds", "audio_embeds", "video_embeds"];

/// A call to a vLLM server that failed.
#[derive(Debug, Error)]
pub(crate) enum CallError {
    /// It was not reached, or went away.
    #[error("{0}")]
    Lost(String),
    /// It answered with an error.
    #[error("status {}: {}", .0.code, .0.message)]
    Refused(ServerError),
    /// Its answer is none.
    #[error("the answer of the vLLM server cannot be read: {0}")]
    Unreadable(String),
}

impl CallError {
    /// True if it is the server's own failure, which says nothing of the request.
    pub(crate) fn is_internal(&self) -> bool {
        matches!(self, Self::Refused(error) if error.code >= 500)
    }

    /// The status for the proxy. A server that was lost is told as a broken connection is, without a failure's class, so that
    /// its death is counted as any worker's.
    pub(crate) fn into_status(self) -> Status {
        match self {
            Self::Lost(why) => Status::unavailable(why),
            Self::Unreadable(why) => {
                let failure = Failure::unavailable("a vLLM server's answer cannot be read").with_detail(&why);
                tracing::warn!(why, "answer of a vLLM server cannot be read");
                to_status(&failure)
            }
            Self::Refused(error) => to_status(&error.failure()),
        }
    }
}

/// An error as a server describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerError {
    /// HTTP status.
    pub(crate) code: u16,
    /// Its text.
    pub(crate) message: String,
    /// The field at fault.
    pub(crate) param: Option<String>,
    /// Pause before another attempt.
    pub(crate) retry_after: Option<Duration>,
}

/// The body of an error; other servers before it answer with other texts.
#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorFields,
}

/// Fields of an error.
#[derive(Debug, Deserialize)]
pub(crate) struct ErrorFields {
    #[serde(default)]
    message: String,
    #[serde(default)]
    param: Option<String>,
    #[serde(default)]
    code: Option<serde_json::Value>,
}

impl ServerError {
    /// Reads the body of an answer with this status.
    pub(crate) fn read(code: u16, body: &[u8], retry_after: Option<Duration>) -> Self {
        let (message, param) = match serde_json::from_slice::<ErrorBody>(body) {
            Ok(ErrorBody { error }) => (error.message, error.param),
            Err(_) => (String::from_utf8_lossy(body).into_owned(), None),
        };
        Self { code, message: shortened(&message), param, retry_after }
    }

    /// An error in the middle of a stream.
    pub(crate) fn in_stream(error: ErrorFields) -> Self {
        let code = error.code.as_ref().and_then(serde_json::Value::as_u64);
        let code = code.and_then(|code| u16::try_from(code).ok()).filter(|code| *code >= 400).unwrap_or(500);
        Self { code, message: shortened(&error.message), param: error.param, retry_after: None }
    }

    /// The failure of the request.
    pub(crate) fn failure(&self) -> Failure {
        let Self { code, message, param, retry_after } = self;
        let detail = format!("a vLLM server answered {code}: {message}");
        let failure = match code {
            400 | 422 if param.as_deref().is_some_and(|param| EMBEDS.contains(&param)) => {
                tracing::error!(
                    message,
                    "vLLM server does not read items by metadata: start it with --enable-mm-embeds"
                );
                Failure::new(FailureClass::Mismatch, "this model's workers do not read encoder outputs")
            }
            // Its text has the lengths; the proxy knows such a failure by its parameter.
            400 | 422 if message.contains("maximum context length") => {
                Failure::new(FailureClass::TooLarge, message.clone()).with_param("prompt")
            }
            400 | 422 => {
                let failure = Failure::invalid(message.clone());
                param.iter().fold(failure, |failure, param| failure.with_param(param.clone()))
            }
            413 => Failure::new(FailureClass::TooLarge, message.clone()),
            401 | 403 => {
                tracing::error!(code, "vLLM server refuses the key of --vllm-api-key");
                Failure::new(FailureClass::Mismatch, "this model's workers refuse the proxy")
            }
            429 => Failure::new(FailureClass::Overloaded, "a vLLM server is full"),
            400..500 => Failure::unavailable("a vLLM server does not serve the request"),
            _ => Failure::unavailable("a vLLM server failed"),
        };
        let failure = failure.with_detail(detail);
        match retry_after {
            Some(pause) if failure.class.is_retryable() => failure.with_retry_after(*pause),
            _ => failure,
        }
    }
}

/// A field of a request that vLLM has nothing for.
pub(crate) fn no_field(param: &str, what: &str) -> Failure {
    Failure::invalid(format!("workers of this model run vLLM, which cannot be asked for {what}"))
        .with_param(param)
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: u16, body: &str) -> Failure {
        ServerError::read(code, body.as_bytes(), None).failure()
    }

    #[test]
    fn the_class_of_a_failure_follows_from_status_and_body() {
        use FailureClass::{InvalidArgument, Mismatch, Overloaded, TooLarge, Unavailable};
        let of = |message: &str, param: &str| {
            serde_json::json!({"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}})
                .to_string()
        };
        for (code, body, class, param) in [
            (400, of("top_p must be in (0, 1]", "top_p"), InvalidArgument, Some("top_p")),
            (422, "not json".to_owned(), InvalidArgument, None),
            (400, of("You must set `--enable-mm-embeds`", "image_embeds"), Mismatch, None),
            (
                400,
                of("This model's maximum context length is 512 tokens.", "input_tokens"),
                TooLarge,
                Some("prompt"),
            ),
            (413, String::new(), TooLarge, None),
            (401, String::new(), Mismatch, None),
            (404, of("The model `x` does not exist.", ""), Unavailable, None),
            (429, String::new(), Overloaded, None),
            (500, of("Internal server error", ""), Unavailable, None),
            (503, "x".repeat(1 << 20), Unavailable, None),
        ] {
            let failure = failure(code, &body);
            assert_eq!((failure.class, failure.param.as_deref()), (class, param), "{code} {body:.80}");
            assert!(failure.message.len() <= MAX_MESSAGE);
        }
    }

    #[test]
    fn what_went_wrong_in_a_server_is_for_the_operator() {
        let failure = failure(500, r#"{"error": {"message": "secret of the host"}}"#);
        assert!(!failure.message.contains("secret"), "{}", failure.message);
        assert!(failure.detail.unwrap().contains("secret"));
    }

    #[test]
    fn an_error_in_a_stream_has_its_code_in_its_fields() {
        let read = |text: &str| ServerError::in_stream(serde_json::from_str(text).unwrap()).code;
        assert_eq!(read(r#"{"message": "x", "code": 503}"#), 503);
        assert_eq!(read(r#"{"message": "x", "code": "bad"}"#), 500);
        assert_eq!(read(r#"{"code": 99999999}"#), 500);
        assert_eq!(read(r#"{"code": 200}"#), 500);
    }

    #[test]
    fn a_server_that_was_lost_has_no_class() {
        let status = CallError::Lost("connection refused".into()).into_status();
        assert!(status.metadata().is_empty(), "it is told as a broken connection is");
    }
}
