//! The worker's metrics.

use std::time::Duration;
use triptych_core::graph_stats::GraphStats;
use triptych_core::{Modality, metrics};
use triptych_ec::metered::{CacheTier, EcObserver};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::graph_meters::GraphMeters;
use triptych_runtime::metrics::{Counters, Gauges, Histograms, Labels};

/// Metrics of this worker.
pub struct EncoderMeters {
    queue: Histograms,
    preprocess: Histograms,
    encode: Histograms,
    batch_items: Histograms,
    batch_tokens: Histograms,
    publish: Histograms,
    encodes: Counters,
    shared: Counters,
    requests: Counters,
    running: Gauges,
    corrupt: Counters,
    backlog: BacklogMeters,
    graphs: GraphMeters,
    weights: WeightsMeters,
}

/// Metrics of encoder weights.
struct WeightsMeters {
    loaded: Gauges,
    loads: Counters,
    load_time: Histograms,
    drops: Counters,
}

/// Gauges of queued and running work.
#[derive(Clone)]
pub struct BacklogMeters {
    tokens: Gauges,
    time: Gauges,
}

impl BacklogMeters {
    /// Registers the gauges.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            tokens: registry.gauges(metrics::ENCODE_QUEUED_TOKENS),
            time: registry.gauges(metrics::ENCODE_BACKLOG),
        }
    }

    /// Sets the output tokens and the predicted time of one kind of items.
    pub fn set(&self, model: &str, modality: Modality, tokens: u64, time: Duration) {
        let labels = vec![("model", model.to_owned()), ("modality", modality.to_string())];
        self.tokens.get_or_create(&labels).set(tokens as f64);
        self.time.get_or_create(&labels).set(time.as_secs_f64());
    }
}

impl EncoderMeters {
    /// Registers the metrics.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            queue: registry.times(metrics::ENCODE_QUEUE_TIME),
            preprocess: registry.times(metrics::PREPROCESS_TIME),
            encode: registry.times(metrics::ENCODE_TIME),
            batch_items: registry.sizes(metrics::ENCODE_BATCH_ITEMS),
            batch_tokens: registry.sizes(metrics::ENCODE_BATCH_TOKENS),
            publish: registry.times(metrics::PUBLISH_TIME),
            encodes: registry.counters(metrics::ENCODES),
            shared: registry.counters(metrics::ENCODES_SHARED),
            requests: registry.counters(metrics::REQUESTS),
            running: registry.gauges(metrics::REQUESTS_RUNNING),
            corrupt: registry.counters(metrics::EC_CORRUPT),
            backlog: BacklogMeters::new(registry),
            graphs: GraphMeters::of_encoders(registry),
            weights: WeightsMeters {
                loaded: registry.gauges(metrics::ENCODER_WEIGHTS_LOADED),
                loads: registry.counters(metrics::ENCODER_WEIGHT_LOADS),
                load_time: registry.times(metrics::ENCODER_WEIGHT_LOAD_TIME),
                drops: registry.counters(metrics::ENCODER_WEIGHT_DROPS),
            },
        }
    }

    /// Records that the weights of an encoder are in memory.
    pub fn weights_present(&self, of: &EncoderLabels) {
        self.weights.loaded.get_or_create(&of.labels(&[])).set(1.0);
    }

    /// Records that they are not.
    pub fn weights_absent(&self, of: &EncoderLabels) {
        self.weights.loaded.get_or_create(&of.labels(&[])).set(0.0);
    }

    /// Counts a load of weights, and its time if it ended well.
    pub fn weights_load_ended(&self, of: &EncoderLabels, outcome: &'static str, took: Option<Duration>) {
        self.weights.loads.get_or_create(&of.labels(&[("outcome", outcome)])).inc();
        if let Some(took) = took {
            self.weights.load_time.get_or_create(&of.labels(&[])).observe(took.as_secs_f64());
        }
    }

    /// Counts a drop of weights.
    pub fn weights_dropped(&self, of: &EncoderLabels, reason: &'static str) {
        self.weights.drops.get_or_create(&of.labels(&[("reason", reason)])).inc();
    }

    /// Gauges of queued and running work.
    pub fn backlog(&self) -> BacklogMeters {
        self.backlog.clone()
    }

    /// Records a batch.
    pub fn batch(&self, items: usize, tokens: usize, took: Duration) {
        self.batch_items.get_or_create(&Labels::new()).observe(items as f64);
        self.batch_tokens.get_or_create(&Labels::new()).observe(tokens as f64);
        self.encode.get_or_create(&Labels::new()).observe(took.as_secs_f64());
    }

    /// Records what an encoder's graphs did between two looks at them; all encoders of the worker together.
    pub fn graphs(&self, before: GraphStats, after: GraphStats) {
        self.graphs.observe(&Labels::new(), before, after);
    }

    /// Records an encoded and published item.
    pub fn item(&self, modality: Modality, times: JobTimes) {
        let labels = vec![("modality", modality.to_string())];
        self.encodes.get_or_create(&labels).inc();
        self.queue.get_or_create(&labels).observe(times.queue.as_secs_f64());
        self.preprocess.get_or_create(&labels).observe(times.preprocess.as_secs_f64());
        self.publish.get_or_create(&labels).observe(times.publish.as_secs_f64());
    }

    /// Counts a job that needed no encode of its own.
    pub fn shared(&self) {
        self.shared.get_or_create(&Labels::new()).inc();
    }

    /// Counts a finished job.
    pub fn job(&self, model: &str, outcome: &'static str) {
        self.requests
            .get_or_create(&vec![("model", model.to_owned()), ("outcome", outcome.to_owned())])
            .inc();
    }

    /// Counts an admitted job.
    pub fn admitted(&self) {
        self.running.get_or_create(&Labels::new()).inc();
    }

    /// Counts a released permit.
    pub fn left(&self) {
        self.running.get_or_create(&Labels::new()).dec();
    }
}

/// An encoder in metrics and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderLabels {
    /// The model.
    pub model: String,
    /// Kinds of its items, and the tower where there are several, joined by `-`.
    pub encoder: String,
}

impl EncoderLabels {
    /// Labels of a metric, with further ones.
    pub fn labels(&self, further: &[(&'static str, &'static str)]) -> Labels {
        let own = vec![("model", self.model.clone()), ("encoder", self.encoder.clone())];
        let further = further.iter().map(|(name, value)| (*name, (*value).to_owned()));
        own.into_iter().chain(further).collect()
    }
}

/// Times of a job's stages.
#[derive(Clone, Copy, Debug, Default)]
pub struct JobTimes {
    /// Time in the batcher's queue.
    pub queue: Duration,
    /// Time of preprocessing.
    pub preprocess: Duration,
    /// Time of the batch's forward.
    pub encode: Duration,
    /// Time of publishing.
    pub publish: Duration,
}

impl EcObserver for EncoderMeters {
    fn corrupt(&self, tier: CacheTier) {
        self.corrupt.get_or_create(&vec![("tier", tier.as_str().to_owned())]).inc();
    }

    // An encoder only publishes; hits and misses are counted by the readers.
    fn hit(&self, _: CacheTier) {}
    fn miss(&self, _: CacheTier) {}
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
}
