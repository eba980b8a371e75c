//! Metrics with the names of `core::metrics`, in prometheus-client's registry, exposed as OpenMetrics text.

use parking_lot::{Mutex, MutexGuard};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use triptych_core::metrics::Metric;

/// Label values of a family, as pairs.
pub type Labels = Vec<(&'static str, String)>;
/// A counter for each set of labels.
pub type Counters = Family<Labels, Counter>;
/// A gauge for each set of labels.
pub type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;
/// A histogram for each set of labels.
pub type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// All metrics of a process. Cheap to clone. Colocated roles may register the same metric; they share its family.
#[derive(Clone, Debug)]
pub struct MetricsRegistry(Arc<Mutex<Families>>);

/// The registry, and its families by name.
#[derive(Debug)]
struct Families {
    registry: Registry,
    counters: HashMap<&'static str, Counters>,
    gauges: HashMap<&'static str, Gauges>,
    histograms: HashMap<&'static str, Histograms>,
}

impl Default for MetricsRegistry {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Families {
            registry: Registry::with_prefix("triptych"),
            counters: HashMap::new(),
            gauges: HashMap::new(),
            histograms: HashMap::new(),
        })))
    }
}

impl MetricsRegistry {
    /// Registers a counter family.
    pub fn counters(&self, metric: Metric) -> Counters {
        let mut families = self.families();
        if let Some(family) = families.counters.get(metric.name) {
            return family.clone();
        }
        let family = Counters::default();
        families.register(metric, family.clone());
        families.counters.insert(metric.name, family.clone());
        family
    }

    /// Registers a gauge family.
    pub fn gauges(&self, metric: Metric) -> Gauges {
        let mut families = self.families();
        if let Some(family) = families.gauges.get(metric.name) {
            return family.clone();
        }
        let family = Gauges::default();
        families.register(metric, family.clone());
        families.gauges.insert(metric.name, family.clone());
        family
    }

    /// Registers a histogram of times, 100 µs to about 100 s.
    pub fn times(&self, metric: Metric) -> Histograms {
        self.histograms(metric, || Histogram::new(exponential_buckets(1e-4, 2.0, 20)))
    }

    /// Registers a histogram of counts, 1 to about a million.
    pub fn sizes(&self, metric: Metric) -> Histograms {
        self.histograms(metric, || Histogram::new(exponential_buckets(1.0, 2.0, 20)))
    }

    fn histograms(&self, metric: Metric, new: fn() -> Histogram) -> Histograms {
        let mut families = self.families();
        if let Some(family) = families.histograms.get(metric.name) {
            return family.clone();
        }
        let family = Histograms::new_with_constructor(new);
        families.register(metric, family.clone());
        families.histograms.insert(metric.name, family.clone());
        family
    }

    fn families(&self) -> MutexGuard<'_, Families> {
        self.0.lock()
    }

    /// Every metric as OpenMetrics text.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.families().registry);
        text
    }
}

impl Families {
    fn register(&mut self, metric: Metric, family: impl prometheus_client::registry::Metric) {
        let registry = &mut self.registry;
        match metric.unit {
            "" => registry.register(metric.name, metric.help, family),
            unit => registry.register_with_unit(metric.name, metric.help, Unit::Other(unit.into()), family),
        }
    }
}

/// Content type of [`MetricsRegistry::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::metrics;

    #[test]
    fn text_has_name_unit_help_and_labels() {
        let registry = MetricsRegistry::default();
        registry.counters(metrics::REQUESTS).get_or_create(&vec![("outcome", "ok".into())]).inc();
        registry.times(metrics::TTFT).get_or_create(&vec![("model", "m".into())]).observe(0.5);
        let text = registry.encode();
        for line in [
            "# HELP triptych_time_to_first_token_seconds Time from arrival to the first token.",
            "# UNIT triptych_time_to_first_token_seconds seconds",
            "triptych_requests_total{outcome=\"ok\"} 1",
            "triptych_time_to_first_token_seconds_count{model=\"m\"} 1",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_metric_registered_twice_is_one() {
        let registry = MetricsRegistry::default();
        for _ in 0..2 {
            registry.counters(metrics::REQUESTS).get_or_create(&Labels::new()).inc();
            registry.gauges(metrics::REQUESTS_RUNNING).get_or_create(&Labels::new()).inc();
            registry.times(metrics::TTFT).get_or_create(&Labels::new()).observe(0.5);
        }
        let text = registry.encode();
        for line in ["triptych_requests_total{} 2", "triptych_requests_running{} 2.0"] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        assert_eq!(text.matches("# HELP triptych_time_to_first_token_seconds").count(), 1, "{text}");
    }
}
