//! The table from failure classes to gRPC codes and HTTP statuses, and back. No other file decides a status.

use http::StatusCode;
use std::time::Duration;
use tokio::task::JoinError;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use triptych_core::{Failure, FailureClass};

/// Metadata key with the request field at fault.
pub const PARAM_KEY: &str = "triptych-param";
/// Metadata key with the failure class, which a gRPC code alone does not determine.
pub const CLASS_KEY: &str = "triptych-class";
/// Metadata key with the pause before a retry, in milliseconds.
pub const RETRY_KEY: &str = "retry-after-ms";
/// Default pause of a retryable failure.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Longest pause accepted from another process.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// gRPC code of a class.
pub const fn grpc_code(class: FailureClass) -> Code {
    match class {
        FailureClass::InvalidArgument | FailureClass::TooLarge | FailureClass::Unprocessable => {
            Code::InvalidArgument
        }
        FailureClass::NotFound => Code::NotFound,
        FailureClass::Unauthenticated => Code::Unauthenticated,
        FailureClass::PermissionDenied => Code::PermissionDenied,
        FailureClass::Overloaded => Code::ResourceExhausted,
        FailureClass::DeadlineExceeded => Code::DeadlineExceeded,
        FailureClass::Cancelled => Code::Cancelled,
        FailureClass::Unavailable => Code::Unavailable,
        FailureClass::Mismatch => Code::FailedPrecondition,
        FailureClass::Quarantined | FailureClass::Internal => Code::Internal,
    }
}

/// HTTP status of a class. 499 is nginx's status for a client that disconnected.
pub fn http_status(class: FailureClass) -> StatusCode {
    match class {
        FailureClass::InvalidArgument => StatusCode::BAD_REQUEST,
        FailureClass::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        FailureClass::Unprocessable => StatusCode::UNPROCESSABLE_ENTITY,
        FailureClass::NotFound => StatusCode::NOT_FOUND,
        FailureClass::Unauthenticated => StatusCode::UNAUTHORIZED,
        FailureClass::PermissionDenied => StatusCode::FORBIDDEN,
        FailureClass::Overloaded => StatusCode::TOO_MANY_REQUESTS,
        FailureClass::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        FailureClass::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        FailureClass::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        FailureClass::Mismatch | FailureClass::Quarantined | FailureClass::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// True for a prompt that is longer than the model's context: too large, and about the prompt.
pub fn exceeds_context(failure: &Failure) -> bool {
    let is_prompt = |param: &str| ["prompt", "messages", "encoder_prompt"].contains(&param);
    failure.class == FailureClass::TooLarge && failure.param.as_deref().is_some_and(is_prompt)
}

/// HTTP status of a failure: of its class; of a prompt beyond the context 400, as in OpenAI's API.
pub fn http_status_of(failure: &Failure) -> StatusCode {
    if exceeds_context(failure) { StatusCode::BAD_REQUEST } else { http_status(failure.class) }
}

/// Pause before a retry: the failure's own, or [`RETRY_AFTER`]. `None` if the failure is not retryable.
pub fn retry_after(failure: &Failure) -> Option<Duration> {
    failure.class.is_retryable().then(|| failure.retry_after.unwrap_or(RETRY_AFTER))
}

/// The same for HTTP's `Retry-After`: seconds, rounded up, at least 1.
pub fn retry_after_seconds(failure: &Failure) -> Option<u64> {
    let pause = retry_after(failure)?;
    Some((pause.as_secs() + u64::from(pause.subsec_nanos() > 0)).max(1))
}

/// Longest message sent, in characters: a status travels in a header, whose size peers limit, and a message may quote
/// a client's text.
const MAX_MESSAGE_CHARS: usize = 512;

/// The status sent for a failure. The operator's detail stays here.
pub fn to_status(failure: &Failure) -> Status {
    let mut metadata = MetadataMap::new();
    if let Ok(class) = failure.class.as_str().parse() {
        metadata.insert(CLASS_KEY, class);
    }
    if let Some(Ok(param)) = failure.param.as_deref().map(str::parse) {
        metadata.insert(PARAM_KEY, param);
    }
    if let Some(pause) = retry_after(failure) {
        metadata.insert(RETRY_KEY, u64::try_from(pause.as_millis()).unwrap_or(u64::MAX).into());
    }
    let message: String = failure.message.chars().take(MAX_MESSAGE_CHARS).collect();
    Status::with_metadata(grpc_code(failure.class), message, metadata)
}

/// The failure behind a status that came from another process of the cluster, or from the transport.
pub fn from_status(status: &Status) -> Failure {
    let tagged = status.metadata().get(CLASS_KEY).and_then(|v| v.to_str().ok());
    if let Some(class) = FailureClass::ALL.into_iter().find(|c| Some(c.as_str()) == tagged) {
        let param = status.metadata().get(PARAM_KEY).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let retry_after = received_pause(status.metadata()).filter(|_| class.is_retryable());
        return Failure { class, message: status.message().to_owned(), param, detail: None, retry_after };
    }
    let detail = format!("{:?}: {}", status.code(), status.message());
    match status.code() {
        Code::DeadlineExceeded => {
            Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out").with_detail(detail)
        }
        Code::ResourceExhausted => {
            Failure::new(FailureClass::Overloaded, "a worker is full").with_detail(detail)
        }
        // A codec's word for a message over its limits.
        Code::OutOfRange => Failure::new(FailureClass::TooLarge, status.message()),
        Code::Cancelled | Code::Unavailable | Code::Unknown | Code::Aborted => {
            Failure::unavailable("a worker could not be reached").with_detail(detail)
        }
        _ => Failure::internal(detail),
    }
}

/// The failure behind a task that ended without its result. Unless it panicked, the process ends.
pub fn from_join_error(what: &str, error: &JoinError) -> Failure {
    let detail = format!("{what}: {error}");
    match error.is_panic() {
        true => Failure::internal(detail),
        false => process_ends(detail),
    }
}

/// The failure of work that is dropped because its process ends: another worker can go on.
pub fn process_ends(detail: String) -> Failure {
    Failure::unavailable("the worker is ending").with_detail(detail)
}

fn received_pause(metadata: &MetadataMap) -> Option<Duration> {
    let millis = metadata.get(RETRY_KEY)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(millis).min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panicked_is_a_bug_and_one_that_was_cancelled_can_be_tried_elsewhere() {
        let panicked = tokio::spawn(async { panic!("a bug") }).await.expect_err("it panics");
        assert_eq!(from_join_error("work", &panicked).class, FailureClass::Internal);
        let task = tokio::spawn(std::future::pending::<()>());
        task.abort();
        let cancelled = task.await.expect_err("it is cancelled");
        assert_eq!(from_join_error("work", &cancelled).class, FailureClass::Unavailable);
    }

    #[test]
    fn every_class_survives_the_wire_without_its_detail() {
        for class in FailureClass::ALL {
            let pause = Duration::from_millis(2300);
            let sent = Failure::new(class, "42 items, the limit is 16")
                .with_param("items")
                .with_detail("secret")
                .with_retry_after(pause);
            let status = to_status(&sent);
            assert!(!format!("{status:?}").contains("secret"));
            assert_eq!(
                from_status(&status),
                Failure { detail: None, retry_after: class.is_retryable().then_some(pause), ..sent }
            );
        }
    }

    #[test]
    fn http_pauses_are_rounded_up_to_seconds() {
        let cases = [(0, 1), (1, 1), (1000, 1), (1001, 2), (2999, 3)];
        for (millis, expect) in cases {
            let failure = Failure::unavailable("x").with_retry_after(Duration::from_millis(millis));
            assert_eq!(retry_after_seconds(&failure), Some(expect), "{millis} ms");
        }
        assert_eq!(retry_after_seconds(&Failure::unavailable("x")), Some(1));
        assert_eq!(retry_after(&Failure::invalid("x").with_retry_after(RETRY_AFTER)), None);
    }

    #[test]
    fn a_prompt_beyond_the_context_is_a_bad_request_and_a_large_item_is_not() {
        let too_large = Failure::new(FailureClass::TooLarge, "5000 tokens, the limit is 4096");
        for (param, status) in [("prompt", 400), ("messages", 400), ("items[0]", 413), ("n", 413)] {
            let failure = too_large.clone().with_param(param);
            assert_eq!(
                (http_status_of(&failure).as_u16(), exceeds_context(&failure)),
                (status, status == 400)
            );
        }
        assert_eq!(http_status_of(&too_large), StatusCode::PAYLOAD_TOO_LARGE);
        assert!(!exceeds_context(&Failure::invalid("empty").with_param("prompt")));
    }

    #[test]
    fn a_malformed_pause_is_ignored_and_a_long_one_is_capped() {
        let read = |text: &str| {
            let mut status = to_status(&Failure::unavailable("x"));
            status.metadata_mut().insert(RETRY_KEY, text.parse().unwrap());
            from_status(&status).retry_after
        };
        assert_eq!(read("soon"), None);
        assert_eq!(read("-5"), None);
        assert_eq!(read("18446744073709551615"), Some(MAX_RETRY_AFTER));
    }

    #[test]
    fn a_message_that_quotes_a_client_at_length_still_fits_a_header() {
        let status = to_status(&Failure::invalid("é".repeat(100_000)));
        assert_eq!(status.message().chars().count(), MAX_MESSAGE_CHARS);
    }

    #[test]
    fn a_bare_transport_error_is_retryable() {
        assert!(from_status(&Status::unavailable("connection refused")).class.is_retryable());
        assert_eq!(from_status(&Status::internal("x")).class, FailureClass::Internal);
    }

    #[test]
    fn a_message_over_the_limits_of_a_codec_is_the_senders_fault() {
        let failure = from_status(&Status::out_of_range("the message has 5 lists"));
        let expect = Failure::new(FailureClass::TooLarge, "the message has 5 lists");
        assert_eq!(failure, expect);
    }

    #[test]
    fn client_mistakes_are_4xx_and_ours_5xx() {
        for class in FailureClass::ALL {
            let ours = matches!(
                class,
                FailureClass::Unavailable
                    | FailureClass::Internal
                    | FailureClass::Mismatch
                    | FailureClass::Quarantined
                    | FailureClass::DeadlineExceeded
            );
            assert_eq!(http_status(class).is_server_error(), ours, "{class:?}");
        }
    }
}
