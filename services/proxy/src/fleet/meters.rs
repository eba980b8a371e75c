//! The fleet's metrics, for operators.

use super::catalog::{Catalog, Health};
use super::outlier::Cause;
use super::roles::ElasticRole;
use super::score::Reason;
use triptych_core::metrics;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::discovery::Role;
use triptych_runtime::metrics::{Counters, Gauges};

/// The fleet's metrics.
pub(super) struct FleetMeters {
    workers: Gauges,
    ejections: Counters,
    picks: Counters,
    refused: Counters,
    role_changes: Counters,
    encode_share: Gauges,
}

impl FleetMeters {
    pub(super) fn new(registry: &MetricsRegistry) -> Self {
        Self {
            workers: registry.gauges(metrics::WORKERS),
            ejections: registry.counters(metrics::WORKER_EJECTIONS),
            picks: registry.counters(metrics::WORKER_PICKS),
            refused: registry.counters(metrics::ADMISSION_REJECTIONS),
            role_changes: registry.counters(metrics::ROLE_CHANGES),
            encode_share: registry.gauges(metrics::ENCODE_SHARE),
        }
    }

    pub(super) fn picked(&self, role: Role, reason: Reason) {
        let labels = vec![("role", role.to_string()), ("reason", reason.as_str().to_owned())];
        self.picks.get_or_create(&labels).inc();
    }

    pub(super) fn ejected(&self, role: Role, cause: Cause) {
        let labels = vec![("role", role.to_string()), ("cause", cause.as_str().to_owned())];
        self.ejections.get_or_create(&labels).inc();
    }

    /// A worker with encoders has another role.
    pub(super) fn role_changed(&self, role: ElasticRole, cause: &str) {
        let labels = vec![("role", role.as_str().to_owned()), ("cause", cause.to_owned())];
        self.role_changes.get_or_create(&labels).inc();
    }

    /// Part of all work that is encodes, where roles are elastic.
    pub(super) fn encode_share(&self, share: f64) {
        self.encode_share.get_or_create(&Vec::new()).set(share);
    }

    /// An item that would have come too late at this stage.
    pub(super) fn refused(&self, stage: &str) {
        self.refused.get_or_create(&vec![("stage", stage.to_owned())]).inc();
    }

    /// Counts the workers in each state.
    pub(super) fn catalog(&self, catalog: &Catalog) {
        for role in Role::ALL {
            for health in Health::ALL {
                let n = catalog.workers.iter().filter(|w| w.role == role && w.health == health).count();
                let labels = vec![("role", role.to_string()), ("state", health.as_str().to_owned())];
                self.workers.get_or_create(&labels).set(n as f64);
            }
        }
    }
}
