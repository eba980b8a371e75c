//! What is counted about encoder jobs and leases.

use std::sync::Arc;
use triptych_core::metrics;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Labels};

/// Why a job was sent to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The output was nowhere.
    First,
    /// The worker before failed.
    Retry,
    /// The worker before is slow.
    Hedge,
    /// No encoder could, so a PD worker that holds one was asked.
    Fallback,
}

/// What became of asking for a key's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LeaseOutcome {
    /// It was free.
    Granted,
    /// Somebody else had it, and then the object was there.
    Followed,
    /// Somebody else had it, gave up or died, and it was had then.
    TakenOver,
    /// The store has none, or did not answer.
    Without,
    /// It went to another while the job ran.
    Lost,
}

impl LeaseOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Followed => "followed",
            Self::TakenOver => "taken_over",
            Self::Without => "without",
            Self::Lost => "lost",
        }
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
    pub(super) fn sent(&self, why: Sent) {
        let why = match why {
            Sent::First => "first",
            Sent::Retry => "retry",
            Sent::Hedge => "hedge",
            Sent::Fallback => "fallback",
        };
        self.jobs.get_or_create(&vec![("why", why.to_owned())]).inc();
    }

    /// A request waits for a job that another one began in this proxy.
    pub(super) fn shared(&self) {
        self.shared.get_or_create(&Labels::new()).inc();
    }

    /// The retry budget did not pay.
    pub(super) fn exhausted(&self, what: &'static str) {
        self.exhausted.get_or_create(&vec![("for", what.to_owned())]).inc();
    }

    /// Counts what becomes of leases.
    pub(super) fn leases(&self) -> Arc<dyn Fn(LeaseOutcome) + Send + Sync> {
        let leases = self.leases.clone();
        Arc::new(move |outcome| {
            leases.get_or_create(&vec![("outcome", outcome.as_str().to_owned())]).inc();
        })
    }
}
