//! Counters of encoder jobs and leases.

use crate::request_machine::action::{Counted, LeaseOutcome, SendReason};
use std::sync::Arc;
use triptych_core::metrics;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Labels};

/// The label of a lease's outcome.
const fn outcome_label(outcome: LeaseOutcome) -> &'static str {
    match outcome {
        LeaseOutcome::Granted => "granted",
        LeaseOutcome::Followed => "followed",
        LeaseOutcome::TakenOver => "taken_over",
        LeaseOutcome::Without => "without",
        LeaseOutcome::Lost => "lost",
    }
}

/// The counters.
#[derive(Clone)]
pub(super) struct EncodeMeters {
    jobs: Counters,
    shared: Counters,
    leases: Counters,
    exhausted: Counters,
}

impl EncodeMeters {
    pub(super) fn new(registry: &MetricsRegistry) -> Self {
        Self {
            jobs: registry.counters(metrics::ENCODE_JOBS),
            shared: registry.counters(metrics::ENCODES_SHARED),
            leases: registry.counters(metrics::ENCODE_LEASES),
            exhausted: registry.counters(metrics::RETRY_BUDGET_EXHAUSTED),
        }
    }

    /// A job went to a worker.
    pub(super) fn sent(&self, why: SendReason) {
        let why = match why {
            SendReason::First => "first",
            SendReason::Retry => "retry",
            SendReason::Hedge => "hedge",
            SendReason::Fallback => "fallback",
        };
        self.jobs.get_or_create(&vec![("why", why.to_owned())]).inc();
    }

    /// A request waits for a job that another one began in this proxy.
    pub(super) fn shared(&self) {
        self.shared.get_or_create(&Labels::new()).inc();
    }

    /// Counts what the machine decided.
    pub(super) fn count(&self, counted: Counted) {
        let unpaid = |what: &str| {
            self.exhausted.get_or_create(&vec![("for", what.to_owned())]).inc();
        };
        match counted {
            Counted::Lease(outcome) => (self.leases())(outcome),
            Counted::UnpaidRetry => unpaid("retry"),
            Counted::UnpaidHedge => unpaid("hedge"),
        }
    }

    /// Counts outcomes of leases.
    pub(super) fn leases(&self) -> Arc<dyn Fn(LeaseOutcome) + Send + Sync> {
        let leases = self.leases.clone();
        Arc::new(move |outcome| {
            leases.get_or_create(&vec![("outcome", outcome_label(outcome).to_owned())]).inc();
        })
    }
}
