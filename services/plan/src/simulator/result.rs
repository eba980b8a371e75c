//! The results of a simulated run.

use super::source::Source;
use crate::curves::Stage;
use std::time::Duration;
use triptych_bench::outcome::Outcome;

/// A run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// One for each offered request, in their order: what a client would have seen. For the judge.
    pub outcomes: Vec<Outcome>,
    /// The stages of each, in the same order.
    pub stages: Vec<Stages>,
    /// The use of each pool, in the cluster's order.
    pub pools: Vec<PoolUse>,
    /// Samples of the load, over time.
    pub timeline: Vec<Moment>,
    /// Spans of compute in the order of their ends, if they are recorded.
    pub spans: Vec<Span>,
    /// Sources of the items.
    pub items: ItemSources,
    /// Tokens of prompts whose keys and values were found in a worker's blocks, and of all prompts.
    pub prefix: PrefixUse,
    /// Sequences that gave up their blocks for others.
    pub preemptions: u64,
    /// Resources that were not given back: none, when every request has ended.
    pub left: LeftOver,
    /// From the start to the last event.
    pub span: Duration,
    /// Events that were worked through.
    pub n_events: u64,
}

/// The time of a request by stage. Of several items the slowest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Its slowest item, waiting for preprocessing and for its batch.
    pub encode_queue: Duration,
    /// Preprocessing it.
    pub preprocess: Duration,
    /// The forward of its batch.
    pub encode: Duration,
    /// Publishing its rows.
    pub publish: Duration,
    /// From READY to being on the PD worker.
    pub load: Duration,
    /// From arrival in the engine to the first step: waiting for blocks, budget and items.
    pub prefill_queue: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// A span of a worker's compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The worker's index in the cluster.
    pub worker: usize,
    /// Its stage.
    pub stage: Stage,
    /// Start, after the start of the run.
    pub began: Duration,
    /// End.
    pub ended: Duration,
    /// Sequences of a step, items of a forward.
    pub n: usize,
    /// Tokens that were computed.
    pub tokens: u64,
}

/// The use of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolUse {
    /// Its name.
    pub name: String,
    /// Its workers.
    pub workers: usize,
    /// Cores of all of them.
    pub cores: usize,
    /// Core-seconds that encoding took, preprocessing included.
    pub encode_s: f64,
    /// Of those, core-seconds of preprocessing.
    pub preprocess_s: f64,
    /// Core-seconds that engine steps took.
    pub step_s: f64,
    /// Core-seconds that proxy, store and clients took from it.
    pub front_s: f64,
    /// Core-seconds in which a core of it was busy.
    pub busy_s: f64,
    /// Those, over all core-seconds until the last arrival; more than 1 where a backlog was worked off after it.
    pub utilisation: f64,
    /// Batches of the encoders.
    pub n_batches: u64,
    /// Items in them.
    pub n_encoded: u64,
    /// Engine steps.
    pub n_steps: u64,
    /// Rows that they computed.
    pub n_rows: u64,
    /// Requests given to its PD workers.
    pub n_requests: u64,
}

/// A sample of the load at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moment {
    /// After the start of the run.
    pub at: Duration,
    /// Requests that were sent and have not ended.
    pub in_flight: usize,
    /// Items at encoders, those in a forward included; one that several towers read once for each.
    pub encode_items: usize,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that wait for blocks, budget or items.
    pub waiting: usize,
    /// Prompt tokens that are not read yet.
    pub waiting_tokens: usize,
    /// Part of the self-attention blocks in use, the mean over PD workers.
    pub kv_usage: f64,
    /// The same of the fullest one.
    pub kv_peak: f64,
}

/// Sources of the items. Each item of each request is counted once: of several towers, once all outputs are READY, by that which
/// took longest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ItemSources {
    /// READY a moment ago, as the proxy remembers.
    pub remembered: u64,
    /// On a PD worker, which got the request.
    pub resident: u64,
    /// In the store.
    pub stored: u64,
    /// Another request was having it made.
    pub shared: u64,
    /// Encoded for this request.
    pub encoded: u64,
    /// Of those that were encoded, how many an encoder still had the rows of.
    pub kept: u64,
    /// Refused, or failed.
    pub failed: u64,
    /// Loads by PD workers.
    pub loads: u64,
    /// Outputs whose rows were on the PD worker already.
    pub loads_saved: u64,
}

impl ItemSources {
    /// Counts an item from there.
    pub(super) fn count(&mut self, source: Source) {
        *match source {
            Source::Remembered => &mut self.remembered,
            Source::Resident => &mut self.resident,
            Source::Stored => &mut self.stored,
            Source::Shared => &mut self.shared,
            Source::Encoded | Source::Kept => &mut self.encoded,
        } += 1;
        self.kept += u64::from(source == Source::Kept);
    }

    /// Items in all.
    pub fn n(&self) -> u64 {
        self.remembered + self.resident + self.stored + self.shared + self.encoded + self.failed
    }

    /// Part of them that no encoder had to compute for their request.
    pub fn hit_rate(&self) -> f64 {
        let hits = self.remembered + self.resident + self.stored + self.shared + self.kept;
        hits as f64 / self.n().max(1) as f64
    }
}

/// Tokens of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixUse {
    /// Of all sequences that started.
    pub tokens: u64,
    /// Of those, how many were found in blocks.
    pub found: u64,
}

/// Resources that are still held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOver {
    /// Requests that have not ended.
    pub requests: usize,
    /// Sequences in engines.
    pub sequences: usize,
    /// Blocks that they hold.
    pub blocks: usize,
    /// Places at PD workers.
    pub places: usize,
    /// Jobs at encoders.
    pub jobs: usize,
    /// Work that the proxy believes to be with workers.
    pub leases: u64,
}
