//! Sums of metrics over the processes of a role, those included that have ended.

use crate::names::{ENCODERS, PDS, PROXIES};
use std::collections::BTreeMap;
use triptych_tests::cluster::sum_series;

/// Streams that another PD worker went on with.
pub const RESUMED: &str = "triptych_resumed_streams_total";
const OF_PROXIES: &[&str] = &["triptych_item_source_total", RESUMED];
const OF_ENCODERS: &[&str] = &["triptych_encodes_total"];
const OF_PDS: &[&str] = &["triptych_ec_corrupt_objects_total", "triptych_ec_misses_total"];

/// Sums so far.
#[derive(Clone, Debug, Default)]
pub struct MetricSums(pub BTreeMap<&'static str, f64>);

impl MetricSums {
    /// Adds what a member's metrics say.
    pub fn add(&mut self, member: &str, metrics: &str) {
        let roles = [(&PROXIES[..], OF_PROXIES), (&ENCODERS, OF_ENCODERS), (&PDS, OF_PDS)];
        let names = roles.into_iter().filter(|(members, _)| members.contains(&member));
        for name in names.flat_map(|(_, names)| names) {
            *self.0.entry(name).or_default() += sum_series(metrics, name);
        }
    }

    /// The sum of one metric.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}
