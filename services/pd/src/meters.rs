//! The worker's metrics.

use std::time::Duration;
use triptych_core::metrics::{self, Metric};
use triptych_ec::metered::{EcObserver, Tier};
use triptych_engine::{Finished, Stats};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Gauges, Histograms, Labels};
use triptych_runtime::turnstile::Spent;

/// Handles on what this worker counts, for one model.
#[derive(Clone)]
pub struct Meters {
    model: String,
    families: Families,
    /// What was counted when it was last looked at.
    last: Stats,
}

/// The families, shared by the models of a worker.
#[derive(Clone)]
pub struct Families {
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
    computed_tokens: Counters,
    pending: Histograms,
    drafted_tokens: Counters,
    accepted_tokens: Counters,
    requests: Counters,
}

impl Families {
    /// Registers them.
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
            computed_tokens: registry.counters(metrics::COMPUTED_TOKENS),
            pending: registry.times(metrics::PENDING_WAIT),
            drafted_tokens: registry.counters(metrics::DRAFTED_TOKENS),
            accepted_tokens: registry.counters(metrics::ACCEPTED_TOKENS),
            requests: registry.counters(metrics::REQUESTS),
        }
    }

    /// The handles of one model.
    pub fn of_model(&self, model: &str) -> Meters {
        Meters { model: model.to_owned(), families: self.clone(), last: Stats::default() }
    }
}

impl Meters {
    fn labels(&self) -> Labels {
        vec![("model", self.model.clone())]
    }

    fn pool_labels(&self, pool: &'static str) -> Labels {
        vec![("model", self.model.clone()), ("pool", pool.to_owned())]
    }

    /// The same for an engine that has run before: what it counted by then is not counted here.
    pub fn since(self, stats: Stats) -> Self {
        Self { last: stats, ..self }
    }

    /// The engine ran a step.
    pub fn step(&self, took: Duration) {
        self.families.step.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// What the engine holds after a step.
    pub fn books(&mut self, stats: Stats) {
        let labels = self.labels();
        let share = |used: usize, total: usize| if total == 0 { 0.0 } else { used as f64 / total as f64 };
        self.families.running.get_or_create(&labels).set(stats.running as f64);
        self.families.waiting.get_or_create(&labels).set(stats.waiting as f64);
        let last = std::mem::replace(&mut self.last, stats);
        for (family, now, before) in [
            (&self.families.preemptions, stats.preemptions, last.preemptions),
            (&self.families.swaps, stats.swaps, last.swaps),
            (&self.families.cached_tokens, stats.cached_tokens, last.cached_tokens),
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
    }

    /// A sequence ended as it should; `n_given` of its tokens were written elsewhere.
    pub fn finished(&self, finished: &Finished, n_given: usize) {
        let labels = self.labels();
        self.families.queue.get_or_create(&labels).observe(finished.times.queue.as_secs_f64());
        self.families.prefill.get_or_create(&labels).observe(finished.times.prefill.as_secs_f64());
        self.families.prompt_tokens.get_or_create(&labels).inc_by(finished.n_prompt as u64);
        self.families
            .generation_tokens
            .get_or_create(&labels)
            .inc_by(finished.n_generated.saturating_sub(n_given) as u64);
    }

    /// The items of a request were there after this long.
    pub fn loaded(&self, took: Duration) {
        self.families.load.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// Items that were being encoded when their request came were there after this long.
    pub fn waited(&self, took: Duration) {
        self.families.pending.get_or_create(&self.labels()).observe(took.as_secs_f64());
    }

    /// A request ended.
    pub fn request(&self, outcome: &'static str) {
        let labels = vec![("model", self.model.clone()), ("outcome", outcome.to_owned())];
        self.families.requests.get_or_create(&labels).inc();
    }
}

/// Of a worker that holds encoders too.
const BESIDE_DECODING: Metric = Metric {
    name: "encoder_beside_decoding",
    unit: "tokens",
    help: "Encoder output tokens computed while sequences of the same worker decoded",
};
const AFTER_ENCODE: Metric = Metric {
    name: "steps_after_encode",
    unit: "",
    help: "Engine steps before which an encoder had its turn",
};
const MOST_BETWEEN: Metric = Metric {
    name: "encoder_between_steps_most",
    unit: "tokens",
    help: "The most encoder output tokens computed between two steps while sequences decoded",
};
const BUDGET: Metric = Metric {
    name: "encoder_between_steps_budget",
    unit: "tokens",
    help: "Encoder output tokens that may be computed between two steps; 0: any number",
};

/// How the turns between engines and encoders of one worker go.
#[derive(Clone)]
pub struct TurnMeters {
    beside_decoding: Counters,
    after_encode: Counters,
    most: Gauges,
    budget: Gauges,
}

impl TurnMeters {
    /// Registers them.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            beside_decoding: registry.counters(BESIDE_DECODING),
            after_encode: registry.counters(AFTER_ENCODE),
            most: registry.gauges(MOST_BETWEEN),
            budget: registry.gauges(BUDGET),
        }
    }

    /// What the turnstile has counted so far; whichever engine of the worker tells it.
    pub fn saw(&self, spent: Spent) {
        let all = Labels::new();
        for (family, now) in
            [(&self.beside_decoding, spent.tokens), (&self.after_encode, spent.steps_after_encode)]
        {
            let counter = family.get_or_create(&all);
            counter.inc_by(now.saturating_sub(counter.get()));
        }
        self.most.get_or_create(&all).set(spent.most as f64);
        self.budget.get_or_create(&all).set(spent.budget.unwrap_or(0) as f64);
    }
}

/// What the EC connector counts.
pub struct EcMeters {
    hits: Counters,
    misses: Counters,
    corrupt: Counters,
}

impl EcMeters {
    /// Registers them.
    pub fn new(registry: &MetricsRegistry) -> Self {
        Self {
            hits: registry.counters(metrics::EC_HITS),
            misses: registry.counters(metrics::EC_MISSES),
            corrupt: registry.counters(metrics::EC_CORRUPT),
        }
    }
}

fn tier_labels(tier: Tier) -> Labels {
    vec![("tier", tier.as_str().to_owned())]
}

impl EcObserver for EcMeters {
    fn hit(&self, tier: Tier) {
        self.hits.get_or_create(&tier_labels(tier)).inc();
    }

    fn miss(&self, tier: Tier) {
        self.misses.get_or_create(&tier_labels(tier)).inc();
    }

    fn corrupt(&self, tier: Tier) {
        self.corrupt.get_or_create(&tier_labels(tier)).inc();
    }

    // The time of a load is counted per request, publishing does not happen here.
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
}
