//! The proxy's metrics. Labels hold names of served models and fixed values, never client input.

use std::time::Duration;
use tokio::time::Instant;
use triptych_core::lifetime::ItemSource;
use triptych_core::{Failure, Modality, ModelName, metrics};
use triptych_proto::v1;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Gauges, Histograms, Labels};

/// Metrics of the workload, which the planner reads.
mod load {
    use triptych_core::metrics::Metric;

    const fn metric(name: &'static str, help: &'static str) -> Metric {
        Metric { name, unit: "", help }
    }

    pub const REQUEST_ITEMS: Metric =
        metric("requests_by_items", "Completed requests, by number of items; 16 means 16 or more");
    pub const REQUEST_TEXT_TOKENS: Metric =
        metric("request_text_tokens", "Prompt tokens of a request, without those of its items");
    pub const REQUEST_OUTPUT_TOKENS: Metric =
        metric("request_output_tokens", "Generated tokens of a request");
    pub const ITEM_TOKENS: Metric = metric(
        "item_tokens",
        "Encoder output tokens of an item, by modality; of several towers the first one's",
    );
}

/// Metrics of requests and items.
#[derive(Clone)]
pub struct Observer {
    requests: Counters,
    running: Gauges,
    first_token: Histograms,
    per_token: Histograms,
    end_to_end: Histograms,
    prompt_tokens: Counters,
    generation_tokens: Counters,
    item_source: Counters,
    resumed: Counters,
    retried: Counters,
    early: Counters,
    by_items: Counters,
    text_tokens: Histograms,
    output_tokens: Histograms,
    item_tokens: Histograms,
}

/// Items of a completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Number of items.
    pub n_items: usize,
    /// Encoder output tokens of all items; of several towers the first one's.
    pub item_tokens: u32,
}

/// An item of which all outputs are READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyItem {
    /// Kind of the item.
    pub modality: Modality,
    /// Source of its output; of several towers' that which took longest.
    pub source: ItemSource,
    /// Its encoder output tokens; of several towers the first one's.
    pub n_tokens: u32,
}

/// Cap of the `items` label, which bounds the number of label values.
const MAX_ITEMS_LABEL: usize = 16;

impl Observer {
    /// Registers the metrics.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            requests: registry.counters(metrics::REQUESTS),
            running: registry.gauges(metrics::REQUESTS_RUNNING),
            first_token: registry.times(metrics::TTFT),
            per_token: registry.times(metrics::TPOT),
            end_to_end: registry.times(metrics::E2E),
            prompt_tokens: registry.counters(metrics::PROMPT_TOKENS),
            generation_tokens: registry.counters(metrics::GENERATION_TOKENS),
            item_source: registry.counters(metrics::ITEM_SOURCE),
            resumed: registry.counters(metrics::RESUMED_STREAMS),
            retried: registry.counters(metrics::PD_RETRIES),
            early: registry.counters(metrics::EARLY_FORWARDS),
            by_items: registry.counters(load::REQUEST_ITEMS),
            text_tokens: registry.sizes(load::REQUEST_TEXT_TOKENS),
            output_tokens: registry.sizes(load::REQUEST_OUTPUT_TOKENS),
            item_tokens: registry.sizes(load::ITEM_TOKENS),
        }
    }

    /// Sets the number of requests in flight, over HTTP and gRPC.
    pub fn running(&self, n: usize) {
        self.running.get_or_create(&Labels::new()).set(n as f64);
    }

    /// Counts a request that ended before a model was chosen for it.
    pub fn refused(&self, failure: &Failure) {
        self.count("", failure.class.as_str());
    }

    /// Counts a request that a model answered or failed.
    pub fn ended(&self, model: &ModelName, outcome: Result<(), &Failure>, arrived: Instant) {
        self.count(model.as_str(), outcome.map_or_else(|f| f.class.as_str(), |()| "ok"));
        self.end_to_end.get_or_create(&of(model)).observe(arrived.elapsed().as_secs_f64());
    }

    /// Records the time to the first token.
    pub fn first_token(&self, model: &ModelName, after: Duration) {
        self.first_token.get_or_create(&of(model)).observe(after.as_secs_f64());
    }

    /// Counts an item by source, once more if it was encoded again because its object was gone.
    pub fn item(&self, one: ReadyItem) {
        let modality = ("modality", one.modality.to_string());
        let labels = vec![("source", one.source.as_str().to_owned()), modality.clone()];
        self.item_source.get_or_create(&labels).inc();
        self.item_tokens.get_or_create(&vec![modality]).observe(one.n_tokens.into());
    }

    /// Counts the tokens of a completed request; `per_token` if there were at least two.
    pub fn tokens(&self, model: &ModelName, usage: &v1::Usage, per_token: Option<Duration>) {
        self.prompt_tokens.get_or_create(&of(model)).inc_by(usage.prompt_tokens.into());
        self.generation_tokens.get_or_create(&of(model)).inc_by(usage.completion_tokens.into());
        if let Some(time) = per_token {
            self.per_token.get_or_create(&of(model)).observe(time.as_secs_f64());
        }
    }

    /// Records the size of a completed request.
    pub fn size(&self, model: &ModelName, usage: &v1::Usage, size: Size) {
        let n_items = size.n_items.min(MAX_ITEMS_LABEL).to_string();
        self.by_items.get_or_create(&vec![("model", model.to_string()), ("items", n_items)]).inc();
        // Where the decoder cross-attends to items, they are no part of its prompt.
        let text = usage.prompt_tokens.checked_sub(size.item_tokens).unwrap_or(usage.prompt_tokens);
        self.text_tokens.get_or_create(&of(model)).observe(text.into());
        self.output_tokens.get_or_create(&of(model)).observe(usage.completion_tokens.into());
    }

    /// Counts a stream that resumes on another PD worker.
    pub fn resumed(&self, model: &ModelName) {
        self.resumed.get_or_create(&of(model)).inc();
    }

    /// Counts a request that is sent to a PD worker again before its first token.
    pub fn retried(&self, model: &ModelName) {
        self.retried.get_or_create(&of(model)).inc();
    }

    /// Counts a request that is forwarded while an item is still being encoded.
    pub fn early(&self, model: &ModelName) {
        self.early.get_or_create(&of(model)).inc();
    }

    fn count(&self, model: &str, outcome: &str) {
        self.requests
            .get_or_create(&vec![("model", model.to_owned()), ("outcome", outcome.to_owned())])
            .inc();
    }
}

fn of(model: &ModelName) -> Labels {
    vec![("model", model.to_string())]
}

/// An item's source, as the wire enum.
pub fn wire_source(source: ItemSource) -> i32 {
    v1::ItemSource::from(source).into()
}
