//! Metrics of forwards that are captured as CUDA graphs.

use crate::metrics::{Counters, Gauges, Labels, MetricsRegistry};
use triptych_core::graph_stats::GraphStats;
use triptych_core::metrics;

/// Forwards with and without graphs, and what the graphs keep.
#[derive(Clone)]
pub struct GraphMeters {
    replays: Counters,
    eager: Counters,
    tokens: Counters,
    padding_tokens: Counters,
    graphs: Gauges,
    memory: Gauges,
}

impl GraphMeters {
    /// Registers those of encoders.
    pub fn of_encoders(registry: &MetricsRegistry) -> Self {
        Self {
            replays: registry.counters(metrics::ENCODE_GRAPH_REPLAYS),
            eager: registry.counters(metrics::ENCODE_EAGER_FORWARDS),
            tokens: registry.counters(metrics::ENCODE_GRAPH_TOKENS),
            padding_tokens: registry.counters(metrics::ENCODE_GRAPH_PADDING_TOKENS),
            graphs: registry.gauges(metrics::ENCODE_GRAPHS),
            memory: registry.gauges(metrics::ENCODE_GRAPH_MEMORY),
        }
    }

    /// Registers those of decoders.
    pub fn of_decoders(registry: &MetricsRegistry) -> Self {
        Self {
            replays: registry.counters(metrics::DECODE_GRAPH_REPLAYS),
            eager: registry.counters(metrics::DECODE_EAGER_STEPS),
            tokens: registry.counters(metrics::DECODE_GRAPH_TOKENS),
            padding_tokens: registry.counters(metrics::DECODE_GRAPH_PADDING_TOKENS),
            graphs: registry.gauges(metrics::DECODE_GRAPHS),
            memory: registry.gauges(metrics::DECODE_GRAPH_MEMORY),
        }
    }

    /// Adds what happened between two looks at a model's graphs. A model without graphs makes no series.
    pub fn observe(&self, labels: &Labels, before: GraphStats, after: GraphStats) {
        if before == after {
            return;
        }
        let Self { replays, eager, tokens, padding_tokens, graphs, memory } = self;
        for (counter, before, after) in [
            (replays, before.replays, after.replays),
            (eager, before.eager, after.eager),
            (tokens, before.tokens, after.tokens),
            (padding_tokens, before.padding_tokens, after.padding_tokens),
        ] {
            counter.get_or_create(labels).inc_by(after.saturating_sub(before));
        }
        for (gauge, before, after) in
            [(graphs, before.graphs, after.graphs), (memory, before.n_bytes, after.n_bytes)]
        {
            gauge.get_or_create(labels).inc_by(after as f64 - before as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_of_several_models_add_up() {
        let registry = MetricsRegistry::default();
        let meters = GraphMeters::of_encoders(&registry);
        let none = GraphStats::default();
        let shows = |name: &str| {
            let name = format!("triptych_{name}");
            let text = registry.encode();
            let value =
                |line: &str| line.strip_prefix(&name)?.trim_start_matches("{}").trim().parse::<f64>().ok();
            text.lines().find_map(value)
        };
        meters.observe(&Labels::new(), none, none);
        assert_eq!(shows("encode_graphs"), None, "an encoder without graphs has no metrics of them");
        let some =
            GraphStats { replays: 3, eager: 1, tokens: 64, padding_tokens: 16, graphs: 1, n_bytes: 100 };
        let more = GraphStats { replays: 5, tokens: 96, graphs: 2, n_bytes: 300, ..some };
        meters.observe(&Labels::new(), none, some);
        meters.observe(&Labels::new(), none, some);
        meters.observe(&Labels::new(), some, more);
        for (name, expect) in [
            ("encode_graph_replays_total", 8.0),
            ("encode_eager_forwards_total", 2.0),
            ("encode_graph_tokens_total", 160.0),
            ("encode_graph_padding_tokens_total", 32.0),
            ("encode_graphs", 3.0),
            ("encode_graph_memory_bytes", 400.0),
        ] {
            assert_eq!(shows(name), Some(expect), "{name}");
        }
    }
}
