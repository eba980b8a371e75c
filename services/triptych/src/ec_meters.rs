//! Metrics of each tier of the store.

use triptych_core::metrics;
use triptych_ec::breaker::BreakerState;
use triptych_ec::metered::{CacheTier, EcObserver, Operation};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Gauges, Histograms};

/// Counts operations. Hits and loads are counted by the caller of the store.
pub struct TierMeters {
    operations: Counters,
    bytes: Counters,
    times: Histograms,
    breakers: Gauges,
}

impl TierMeters {
    /// Registers them.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            operations: registry.counters(metrics::EC_OPERATIONS),
            bytes: registry.counters(metrics::EC_TRANSFERRED),
            times: registry.times(metrics::EC_OPERATION_TIME),
            breakers: registry.gauges(metrics::EC_CIRCUIT_BREAKER),
        }
    }
}

impl EcObserver for TierMeters {
    fn hit(&self, _: CacheTier) {}
    fn miss(&self, _: CacheTier) {}
    fn corrupt(&self, _: CacheTier) {}
    fn published(&self, _: usize, _: std::time::Duration) {}
    fn loaded(&self, _: usize, _: std::time::Duration) {}

    fn operation(&self, operation: Operation) {
        let Operation { tier, op, outcome, bytes, took } = operation;
        let labels = vec![("tier", tier.as_str().to_owned()), ("op", op.as_str().to_owned())];
        self.times.get_or_create(&labels).observe(took.as_secs_f64());
        if bytes > 0 {
            self.bytes.get_or_create(&labels).inc_by(bytes as u64);
        }
        let ended = [labels, vec![("outcome", outcome.as_str().to_owned())]].concat();
        self.operations.get_or_create(&ended).inc();
    }

    fn breaker(&self, tier: CacheTier, state: BreakerState) {
        for each in BreakerState::ALL {
            let labels = vec![("tier", tier.as_str().to_owned()), ("state", each.as_str().to_owned())];
            self.breakers.get_or_create(&labels).set(f64::from(u8::from(each == state)));
        }
    }
}
