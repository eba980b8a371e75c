//! Failures that the machine of a request finds itself.

use super::deaths::REMEMBERED;
use std::time::Duration;
use triptych_core::{Failure, FailureClass};

/// The failure of a request whose time is over.
pub fn out_of_time(limit: Duration) -> Failure {
    let message = format!("the request was not answered within {} s", limit.as_secs_f32());
    Failure::new(FailureClass::DeadlineExceeded, message)
}

/// The failure of a request that workers died of.
pub fn quarantined() -> Failure {
    let minutes = REMEMBERED.as_secs() / 60;
    let message = format!(
        "workers died while they had this request, the last one when it had nothing else or as the third; it is \
         refused for up to {minutes} minutes after the last death"
    );
    Failure::new(FailureClass::Quarantined, message)
}

/// A failure after text went out: it is not sent again from here, and the client should know why.
pub fn broken_off(failure: Failure) -> Failure {
    if failure.param.as_deref() == Some("resume") {
        // That is the proxy's account of the answer, and nothing of the client's.
        return Failure::internal(failure);
    }
    if failure.class != FailureClass::Unavailable {
        return failure;
    }
    let detail = failure.to_string();
    Failure::unavailable("the worker went away while it wrote the answer, which is incomplete; try again")
        .with_detail(detail)
}

/// The failure of an item that names an encoder output which is not there, or not its tenant's.
pub fn not_stored() -> Failure {
    let message =
        "there is no such encoder output of this model: it was never made, or is gone; make it again";
    Failure::new(FailureClass::NotFound, message)
}
