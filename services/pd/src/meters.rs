//! The worker's metrics.

use std::time::Duration;
use triptych_core::graph_stats::GraphStats;
use triptych_core::metrics::{self, Metric};
use triptych_ec::metered::{CacheTier, EcObserver};
use triptych_engine::{AdapterLoad, Finished, Stats};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::compute_arbiter::BudgetUsage;
use triptych_runtime::graph_meters::GraphMeters;
use triptych_runtime::metrics::{Counters, Gauges, Histograms, Labels};

/// Metrics of one model.
#[derive(Clone)]
pub struct PdMeters {
    model: String,
    families: MetricFamilies,
    /// Statistics at the last update.
    last: Stats,
    last_graphs: GraphStats,
    /// Adapters at the last update.
    adapters: Vec<String>,
}

/// Metric families, shared by the models of a worker.
#[derive(Clone)]
pub struct MetricFamilies {
    queue: Histograms,
    prefill: Histograms,
    step: Histograms,
    load: Histograms,
    kv: Gauges,
    running: Gauges,
    waiting: Gauges,
    prompt_tokens: Counters,
    generation_tokens: Counters,
    preemptions: Counters,
    swaps: Counters,
    cached_tokens: Counters,
    checkpoint_hits: Counters,
    checkpoints: Gauges,
    computed_tokens: Counters,
    pending: Histograms,
    drafted_tokens: Counters,
    accepted_tokens: Counters,
    requests: Counters,
    adapters: Gauges,
    adapter_running: Gauges,
    adapter_waiting: Gauges,
    graphs: GraphMeters,
}

impl MetricFamilies {
    /// Registers the families.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            queue: registry.times(metrics::PD_QUEUE_TIME),
            prefill: registry.times(metrics::PREFILL_TIME),
            step: registry.times(metrics::STEP_TIME),
            load: registry.times(metrics::LOAD_TIME),
            kv: registry.gauges(metrics::KV_USAGE),
            running: registry.gauges(metrics::REQUESTS_RUNNING),
            waiting: registry.gauges(metrics::REQUESTS_WAITING),
            prompt_tokens: registry.counters(metrics::PROMPT_TOKENS),
            generation_tokens: registry.counters(metrics::GENERATION_TOKENS),
            preemptions: registry.counters(metrics::PREEMPTIONS),
            swaps: registry.counters(metrics::PREEMPTION_SWAPS),
            cached_tokens: registry.counters(metrics::CACHED_TOKENS),
            checkpoint_hits: registry.counters(metrics::STATE_CHECKPOINT_HITS),
            checkpoints: registry.gauges(metrics::STATE_CHECKPOINTS),
            computed_tokens: registry.counters(metrics::COMPUTED_TOKENS),
            pending: registry.times(metrics::PENDING_WAIT),
            drafted_tokens: registry.counters(metrics::DRAFTED_TOKENS),
            accepted_tokens: registry.counters(metrics::ACCEPTED_TOKENS),
            requests: registry.counters(metrics::REQUESTS),
            adapters: registry.gauges(metrics::LORA_ADAPTERS),
            adapter_running: registry.gauges(metrics::LORA_RUNNING),
            adapter_waiting: registry.gauges(metrics::LORA_WAITING),
            graphs: GraphMeters::of_decoders(registry),
        }
    }

    /// Metrics of one model.
    pub fn of_model(&self, model: &str) -> PdMeters {
        PdMeters {
            model: model.to_owned(),
            families: self.clone(),
            last: Stats::default(),
            last_graphs: GraphStats::default(),
            adapters: Vec::new(),
        }
    }
}

impl PdMeters {
    fn labels(&self) -> Labels {
        vec![("model", self.model.clone())]
    }

    fn pool_labels(&self, pool: &'static str) -> Labels {
        vec![("model", self.model.clone()), ("pool", pool.to_owned())]
    }

    /// Starts counting at `stats`, for an engine that has run before.
    pub fn since(self, stats: Stats) -> Self {
        Self { last: stats, ..self }
    }

    /// Records a step.
    pub fn step(&self, took: Duration) {
        self.families.step.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// Updates gauges and counters after a step.
    pub fn observe(&mut self, stats: Stats) {
        let labels = self.labels();
        let share = |used: usize, total: usize| if total == 0 { 0.0 } else { used as f64 / total as f64 };
        self.families.running.get_or_create(&labels).set(stats.running as f64);
        self.families.waiting.get_or_create(&labels).set(stats.waiting as f64);
        let last = std::mem::replace(&mut self.last, stats);
        for (family, now, before) in [
            (&self.families.preemptions, stats.preemptions, last.preemptions),
            (&self.families.swaps, stats.swaps, last.swaps),
            (&self.families.cached_tokens, stats.cached_tokens, last.cached_tokens),
            (&self.families.checkpoint_hits, stats.checkpoint_hits, last.checkpoint_hits),
            (&self.families.computed_tokens, stats.computed_tokens, last.computed_tokens),
            (&self.families.drafted_tokens, stats.drafted_tokens, last.drafted_tokens),
            (&self.families.accepted_tokens, stats.accepted_tokens, last.accepted_tokens),
        ] {
            family.get_or_create(&labels).inc_by(now - before);
        }
        let own = share(stats.self_used, stats.self_total);
        self.families.kv.get_or_create(&self.pool_labels("self")).set(own);
        let host = share(stats.host_used, stats.host_total);
        self.families.kv.get_or_create(&self.pool_labels("host")).set(host);
        let cross = share(stats.cross_used, stats.cross_total);
        self.families.kv.get_or_create(&self.pool_labels("cross")).set(cross);
        let states = share(stats.states_used, stats.states_total);
        self.families.kv.get_or_create(&self.pool_labels("state")).set(states);
        self.families.checkpoints.get_or_create(&labels).set(stats.state_checkpoints as f64);
    }

    /// Updates the gauges of adapters after a step, and removes those of adapters that are gone.
    pub fn observe_adapters(&mut self, loads: &[(String, AdapterLoad)]) {
        let labels = |adapter: &str| vec![("model", self.model.clone()), ("adapter", adapter.to_owned())];
        let families = &self.families;
        for gone in self.adapters.iter().filter(|name| !loads.iter().any(|(known, _)| known == *name)) {
            families.adapter_running.remove(&labels(gone));
            families.adapter_waiting.remove(&labels(gone));
        }
        for (name, load) in loads {
            families.adapter_running.get_or_create(&labels(name)).set(load.running as f64);
            families.adapter_waiting.get_or_create(&labels(name)).set(load.waiting as f64);
        }
        families.adapters.get_or_create(&self.labels()).set(loads.len() as f64);
        self.adapters = loads.iter().map(|(name, _)| name.clone()).collect();
    }

    /// Updates the metrics of decode graphs after a step.
    pub fn observe_graphs(&mut self, stats: GraphStats) {
        let last = std::mem::replace(&mut self.last_graphs, stats);
        self.families.graphs.observe(&self.labels(), last, stats);
    }

    /// Records a finished sequence; another worker generated `n_resumed` of its tokens.
    pub fn finished(&self, finished: &Finished, n_resumed: usize) {
        let labels = self.labels();
        self.families.queue.get_or_create(&labels).observe(finished.times.queue.as_secs_f64());
        self.families.prefill.get_or_create(&labels).observe(finished.times.prefill.as_secs_f64());
        self.families.prompt_tokens.get_or_create(&labels).inc_by(finished.n_prompt as u64);
        self.families
            .generation_tokens
            .get_or_create(&labels)
            .inc_by(finished.n_generated.saturating_sub(n_resumed) as u64);
    }

    /// Records the time until the items of a request were loaded.
    pub fn loaded(&self, took: Duration) {
        self.families.load.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// Records the time until pending items of a request were loaded.
    pub fn waited(&self, took: Duration) {
        self.families.pending.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// Counts a finished request.
    pub fn request(&self, outcome: &'static str) {
        let labels = vec![("model", self.model.clone()), ("outcome", outcome.to_owned())];
        self.families.requests.get_or_create(&labels).inc();
    }
}

/// Metrics of a worker with colocated encoders.
const WHILE_DECODING: Metric = Metric {
    name: "encoder_while_decoding",
    unit: "tokens",
    help: "Encoder output tokens computed while sequences of the same worker decoded",
};
const IN_SLACK: Metric = Metric {
    name: "encoder_in_decode_slack",
    unit: "tokens",
    help: "Of these, tokens for which decodes waited that were ahead of the TPOT SLO",
};
const AFTER_ENCODE: Metric = Metric {
    name: "engine_steps_after_encode",
    unit: "",
    help: "Engine steps that an encoder's forward ran before",
};
const MAX_BETWEEN: Metric = Metric {
    name: "encoder_between_steps_max",
    unit: "tokens",
    help: "Most encoder output tokens computed between two steps while sequences decoded",
};
const BUDGET: Metric = Metric {
    name: "encoder_between_steps_budget",
    unit: "tokens",
    help: "Encoder output tokens that may be computed between two steps; 0: any number",
};

/// Metrics of the compute arbiter between the engines and encoders of one worker.
#[derive(Clone)]
pub struct ArbiterMeters {
    while_decoding: Counters,
    in_slack: Counters,
    after_encode: Counters,
    most: Gauges,
    budget: Gauges,
}

impl ArbiterMeters {
    /// Registers the metrics.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            while_decoding: registry.counters(WHILE_DECODING),
            in_slack: registry.counters(IN_SLACK),
            after_encode: registry.counters(AFTER_ENCODE),
            most: registry.gauges(MAX_BETWEEN),
            budget: registry.gauges(BUDGET),
        }
    }

    /// Updates the metrics to the arbiter's totals; any engine of the worker may call it.
    pub fn observe(&self, usage: BudgetUsage) {
        let all = Labels::new();
        for (family, now) in [
            (&self.while_decoding, usage.tokens),
            (&self.in_slack, usage.tokens_in_slack),
            (&self.after_encode, usage.steps_after_encode),
        ] {
            let counter = family.get_or_create(&all);
            counter.inc_by(now.saturating_sub(counter.get()));
        }
        self.most.get_or_create(&all).set(usage.most as f64);
        self.budget.get_or_create(&all).set(usage.budget.unwrap_or(0) as f64);
    }
}

/// Metrics of the EC connector.
pub struct EcMeters {
    hits: Counters,
    misses: Counters,
    corrupt: Counters,
}

impl EcMeters {
    /// Registers the metrics.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            hits: registry.counters(metrics::EC_HITS),
            misses: registry.counters(metrics::EC_MISSES),
            corrupt: registry.counters(metrics::EC_CORRUPT),
        }
    }
}

/// Metrics of the rows on this worker.
#[derive(Clone)]
pub struct RowMeters {
    bytes: Gauges,
    waits: Counters,
}

impl RowMeters {
    /// Registers the metrics.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self { bytes: registry.gauges(metrics::EC_CACHE), waits: registry.counters(metrics::EC_CACHE_WAITS) }
    }

    /// Records the bytes that requests hold, those that are here, and the budget of both.
    pub fn observe(&self, held: usize, resident: usize, budget: usize) {
        for (state, bytes) in [("held", held), ("resident", resident), ("budget", budget)] {
            self.bytes.get_or_create(&vec![("state", state.to_owned())]).set(bytes as f64);
        }
    }

    /// Counts a request that waits for room.
    pub fn waits(&self) {
        self.waits.get_or_create(&Labels::new()).inc();
    }
}

fn tier_labels(tier: CacheTier) -> Labels {
    vec![("tier", tier.as_str().to_owned())]
}

impl EcObserver for EcMeters {
    fn hit(&self, tier: CacheTier) {
        self.hits.get_or_create(&tier_labels(tier)).inc();
    }

    fn miss(&self, tier: CacheTier) {
        self.misses.get_or_create(&tier_labels(tier)).inc();
    }

    fn corrupt(&self, tier: CacheTier) {
        self.corrupt.get_or_create(&tier_labels(tier)).inc();
    }

    // Load time is recorded per request; a PD worker does not publish.
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
}
