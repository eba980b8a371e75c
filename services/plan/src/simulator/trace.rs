//! A simulated run as a timeline in Chrome's trace event format, as `--trace-file` writes it of a cluster: the two lie on one
//! another, step by step, for the same arrivals.

use super::result::Simulation;
use super::spec::ClusterSpec;
use crate::curves::Stage;
use serde_json::{Value, json};
use std::time::Duration;

/// The events, in an order that `--trace-file` may have too. Empty without
/// [`ClusterSpec::records_spans`].
pub fn events<'a>(spec: &'a ClusterSpec, run: &'a Simulation) -> impl Iterator<Item = Value> + 'a {
    let workers = spec.pools.iter().flat_map(|pool| (0..pool.workers).map(move |i| (&pool.name, i)));
    let named = workers.enumerate().filter(|_| !run.spans.is_empty()).map(|(pid, (pool, i))| {
        json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": format!("{pool}-{i}")}})
    });
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let spans = run.spans.iter().map(move |span| {
        // A thread for each kind, as the product has.
        let (name, tid, counted) = match span.stage {
            Stage::Preprocess(_) => ("preprocess", 1, "items"),
            Stage::Encode(_) => ("forward", 2, "items"),
            Stage::Prefill | Stage::Decode => ("step", 3, "sequences"),
        };
        json!({
            "ph": "X",
            "cat": "compute",
            "name": name,
            "pid": span.worker,
            "tid": tid,
            "ts": us(span.began),
            "dur": us(span.ended - span.began),
            "args": {counted: span.n, "tokens": span.tokens},
        })
    });
    named.chain(spans)
}

/// The text of a file, an event a line.
pub fn text(events: impl Iterator<Item = Value>) -> String {
    let mut text = "[\n".to_owned();
    events.for_each(|event| text.push_str(&format!("{event},\n")));
    text
}
