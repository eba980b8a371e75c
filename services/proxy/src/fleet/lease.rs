//! A worker that has been given a piece of work, and what became of it.

use super::outlier::{Origin, Outcome};
use super::score::Reason;
use super::size::Forecast;
use super::state::FleetState;
use super::view::Sent;
use super::worker::Worker;
use crate::wire::CallFailure;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use triptych_core::{EncoderId, FailureClass, ModelName, WorkerId};
use triptych_runtime::discovery::Role;

/// A worker that has been given a piece of work. Dropping it takes the work off its load; its holder reports how the
/// work ended with one of the `report_*`, unless that tells nothing of the worker.
pub struct Lease {
    shared: Arc<FleetState>,
    worker: Arc<Worker>,
    work: Sent,
    epoch: u64,
    forecast: Option<Forecast>,
    reason: Reason,
}

impl Lease {
    pub(super) fn new(shared: Arc<FleetState>, worker: Arc<Worker>, given: Given) -> Self {
        let Given { work, forecast, reason } = given;
        let epoch = worker.give(work);
        shared.meters.picked(worker.role(), reason);
        Self { shared, worker, work, epoch, forecast, reason }
    }

    /// Name of the worker.
    pub fn id(&self) -> &WorkerId {
        &self.worker.id
    }

    /// Its `host:port`.
    pub fn address(&self) -> &str {
        &self.worker.endpoint.address
    }

    /// The connection to it.
    pub fn channel(&self) -> Channel {
        self.worker.channel()
    }

    /// Forecast of the item's encode, as of when it was given; `None` if the worker has not measured that.
    pub fn forecast(&self) -> Option<Forecast> {
        self.forecast
    }

    /// p95 of the time in which jobs of so many output tokens are done that were given to it with this one; `None`
    /// if it has not measured that.
    pub fn p95_of_tokens(&self, model: &ModelName, encoder: EncoderId, tokens: u32) -> Option<Duration> {
        self.worker.view().p95_of_tokens(self.forecast, (model, encoder), tokens)
    }

    /// True if it is a PD worker.
    pub fn is_pd(&self) -> bool {
        self.worker.role() == Role::Pd
    }

    /// True if it is a PD worker that encodes since nobody else can.
    pub fn is_last_resort(&self) -> bool {
        self.reason == Reason::LastResort
    }

    /// It did its part.
    pub fn report_ok(&self) {
        self.shared.count(&self.worker, Outcome::Good);
    }

    /// It did not answer in time. After a few of these in a row its connection is replaced.
    pub fn report_timeout(&self) {
        self.shared.count(&self.worker, Outcome::TimedOut);
    }

    /// It went away: nothing more is sent until it has described itself again.
    pub fn report_broken(&self) {
        self.shared.set_down(&self.worker);
        self.worker.ask_again.notify_one();
    }

    /// True if it has nothing else.
    pub fn is_alone(&self) -> bool {
        self.reason == Reason::Alone
    }

    /// Lets it take other work again, if it was to have nothing else.
    pub fn admit_others(&mut self) {
        if self.reason == Reason::Alone {
            self.reason = Reason::Only;
            self.shared.end_isolation(&self.worker);
        }
    }

    /// Counts a call that failed, as far as it tells of the worker. A worker that goes away fails once, however many
    /// calls it had, and what the same requests are answered with tells nothing new.
    pub fn report(&self, failed: &CallFailure, origin: Origin) {
        let count = |outcome| self.shared.count(&self.worker, outcome);
        match failed.failure.class {
            _ if failed.lost.is_some() => {
                let was_up = self.worker.view().is_up;
                if was_up {
                    count(Outcome::Failed);
                }
                self.report_broken();
            }
            // It said what it was to say.
            _ if failed.missing.is_some() => self.report_ok(),
            FailureClass::Unavailable => count(Outcome::Failed),
            FailureClass::Internal => count(Outcome::Internal(origin)),
            FailureClass::InvalidArgument | FailureClass::NotFound | FailureClass::TooLarge => {
                self.report_ok()
            }
            FailureClass::Overloaded
            | FailureClass::DeadlineExceeded
            | FailureClass::Cancelled
            | FailureClass::PermissionDenied
            | FailureClass::Unauthenticated
            | FailureClass::Quarantined
            | FailureClass::Unprocessable
            | FailureClass::Mismatch => {}
        }
    }
}

/// The work that a worker is given, and the reason for the choice.
pub(super) struct Given {
    pub(super) work: Sent,
    pub(super) forecast: Option<Forecast>,
    pub(super) reason: Reason,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.worker.done(self.epoch, self.work);
        match self.reason {
            Reason::Probe => self.shared.end_probe(&self.worker),
            Reason::Alone => self.shared.end_isolation(&self.worker),
            _ => {}
        }
    }
}
