//! Calls to workers: deadline, trace context, and the classification of their failures.

use crate::request::item_of_param;
use crate::request_machine::deaths::Lost;
use std::error::Error;
use std::io;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tonic::{Code, ConnectError, Status, Streaming, TimeoutExpired};
use triptych_core::{Failure, FailureClass, ItemIdx};
use triptych_runtime::status::{CLASS_KEY, from_status};
use triptych_runtime::trace_context;

/// Metadata key with which a PD worker names the item whose encoder output it did not find, or found corrupt: its
/// index, in decimal. The status is Unavailable; a parameter `items[i]` on an Unavailable status says the same.
pub const MISSING_ITEM_KEY: &str = "triptych-missing-item";

/// Longest wait for the end of a stream that has answered.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A request to a worker, with the current trace context and the time until `deadline`.
pub fn outgoing<T>(message: T, deadline: Instant) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    trace_context::inject(request.metadata_mut());
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    request
}

/// Reads the end of a stream that has answered. Without it the other side would see a call that was cancelled.
pub async fn read_to_end<T>(mut stream: Streaming<T>) {
    let rest = async { while matches!(stream.message().await, Ok(Some(_))) {} };
    // Nobody waits for it.
    let _ = timeout(END_TIMEOUT, rest).await;
}

/// A failed call.
#[derive(Debug)]
pub struct CallFailure {
    /// The failure, for the request.
    pub failure: Failure,
    /// The way in which the worker was lost; `None`: it answered.
    pub lost: Option<Lost>,
    /// The item that the worker did not find.
    pub missing: Option<ItemIdx>,
}

impl From<Status> for CallFailure {
    fn from(status: Status) -> Self {
        let answered = status.metadata().contains_key(CLASS_KEY);
        let mut failure = from_status(&status);
        // Errors of the transport have a source, and one of several codes: Unknown, Internal, Cancelled.
        let broken = !answered && (status.source().is_some() || status.code() == Code::Unavailable);
        let lost = broken.then(|| lost(&status));
        if broken && status.code() != Code::DeadlineExceeded {
            failure = Failure::unavailable("a worker could not be reached").with_detail(&status);
        }
        let missing = missing_item(&status, &failure);
        Self { failure, lost, missing }
    }
}

impl From<Failure> for CallFailure {
    fn from(failure: Failure) -> Self {
        Self { failure, lost: None, missing: None }
    }
}

/// The way in which a call was lost, by its causes: an attempt to connect, a time that passed, or a closed connection.
fn lost(status: &Status) -> Lost {
    let causes = || std::iter::successors(status.source(), |cause| (*cause).source());
    let is_timeout = |cause: &(dyn Error + 'static)| {
        let is_io = cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::TimedOut);
        is_io
            || cause.is::<TimeoutExpired>()
            || cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout)
    };
    match causes().next() {
        _ if causes().any(|cause| cause.is::<ConnectError>()) => Lost::Unreached,
        _ if causes().any(is_timeout) => Lost::Silent,
        Some(_) => Lost::Closed,
        // The status of somebody between the two.
        None => Lost::Silent,
    }
}

fn missing_item(status: &Status, failure: &Failure) -> Option<ItemIdx> {
    let by_key =
        status.metadata().get(MISSING_ITEM_KEY).and_then(|v| v.to_str().ok()?.parse().ok().map(ItemIdx));
    let by_param = || match failure.class {
        FailureClass::Unavailable => failure.param.as_deref().and_then(item_of_param),
        _ => None,
    };
    by_key.or_else(by_param)
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_runtime::status::to_status;

    #[test]
    fn answers_and_broken_connections_are_distinguished() {
        let answer = CallFailure::from(to_status(&Failure::unavailable("the store is away")));
        assert_eq!(answer.lost, None);
        assert_eq!(answer.failure.message, "the store is away");
        assert_eq!(CallFailure::from(Status::unavailable("a proxy's word")).lost, Some(Lost::Silent));
        let of = |kind: io::ErrorKind| Box::new(io::Error::from(kind));
        let reset = CallFailure::from(Status::from_error(of(io::ErrorKind::ConnectionReset)));
        assert_eq!((reset.lost, reset.failure.class), (Some(Lost::Closed), FailureClass::Unavailable));
        let silent = CallFailure::from(Status::from_error(of(io::ErrorKind::TimedOut)));
        assert_eq!(silent.lost, Some(Lost::Silent));
        let refused = ConnectError(of(io::ErrorKind::ConnectionRefused));
        assert_eq!(CallFailure::from(Status::from_error(Box::new(refused))).lost, Some(Lost::Unreached));
    }

    #[test]
    fn a_missing_item_is_named_by_key_or_parameter() {
        let by_param = to_status(&Failure::unavailable("gone").with_param("items[3]"));
        assert_eq!(CallFailure::from(by_param).missing, Some(ItemIdx(3)));
        let mut by_key = to_status(&Failure::unavailable("gone"));
        by_key.metadata_mut().insert(MISSING_ITEM_KEY, 2.into());
        assert_eq!(CallFailure::from(by_key).missing, Some(ItemIdx(2)));
        let wrong_item = to_status(&Failure::invalid("not an image").with_param("items[3]"));
        assert_eq!(CallFailure::from(wrong_item).missing, None);
    }
}
