//! Names, units and help texts of every metric. The field's names; all are under `triptych_`.
//!
//! `runtime::telemetry` registers them; a test asks `/metrics` of each process for the ones it owns.

/// A metric's name without prefix and unit, its unit, and its help text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name, without the `triptych_` prefix and the unit's suffix.
    pub name: &'static str,
    /// `seconds`, `bytes`, `tokens`, `ratio`, or empty for plain counts.
    pub unit: &'static str,
    /// One sentence.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident = $name:literal, $unit:literal, $help:literal;)*) => {
        $(#[doc = $help] pub const $id: Metric = Metric { name: $name, unit: $unit, help: $help };)*
        /// Every metric.
        pub const ALL: &[Metric] = &[$($id),*];
    };
}

metrics! {
    REQUESTS = "requests", "", "Requests ended, by model and outcome";
    RESUMED = "resumed_streams", "", "Streams that another PD worker went on with in the middle";
    RETRIED = "pd_retries", "", "Requests sent to a PD worker again before their first token";
    EARLY = "early_forwards", "", "Requests sent to a PD worker while an item of theirs was being encoded";
    PENDING_WAIT = "pending_item_wait", "seconds", "Time a PD worker waited for items that were being encoded";
    REQUESTS_RUNNING = "requests_running", "", "Requests that are being worked on";
    REQUESTS_WAITING = "requests_waiting", "", "Requests that wait for their first step";
    TTFT = "time_to_first_token", "seconds", "Time from arrival to the first token";
    TPOT = "time_per_output_token", "seconds", "Mean time between tokens after the first, per request";
    E2E = "e2e_request_latency", "seconds", "Time from arrival to the last token";
    PROMPT_TOKENS = "prompt_tokens", "", "Prompt tokens read";
    GENERATION_TOKENS = "generation_tokens", "", "Tokens written";
    ENCODE_QUEUE_TIME = "encode_queue_time", "seconds", "Time an encoder job waited for its batch";
    PREPROCESS_TIME = "preprocess_time", "seconds", "Time to decode and preprocess an item";
    ENCODE_TIME = "encode_time", "seconds", "Time of an encoder forward, per batch";
    ENCODE_BATCH_ITEMS = "encode_batch_items", "", "Items in an encoder batch";
    ENCODE_BATCH_TOKENS = "encode_batch_tokens", "", "Output tokens of an encoder batch";
    ENCODES = "encodes", "", "Items encoded, by modality";
    ENCODE_JOBS = "encode_jobs", "", "Encoder jobs sent by the proxy, by why: first, retry, hedge, fallback";
    ENCODES_SHARED = "encodes_shared", "", "Items whose encode was under way when they were asked for";
    ENCODE_LEASES = "encode_leases", "", "What became of asking for the lease of an item, by outcome";
    RETRY_BUDGET_EXHAUSTED = "retry_budget_exhausted", "", "Retries and hedges that the retry budget did not pay";
    ENCODE_QUEUED_TOKENS = "encode_queued_tokens", "", "Output tokens of the items that wait for an encoder or are in one, by model and modality";
    ENCODE_BACKLOG = "encode_backlog", "seconds", "Predicted time of the encoder jobs that wait or run, by model and modality";
    PUBLISH_TIME = "ec_publish_time", "seconds", "Time to publish an encoder output";
    LOAD_TIME = "ec_load_time", "seconds", "Time to load an encoder output";
    EC_HITS = "ec_hits", "", "Encoder outputs found, by tier";
    EC_MISSES = "ec_misses", "", "Encoder outputs not found, by tier";
    EC_CORRUPT = "ec_corrupt_objects", "", "Objects that did not verify and were quarantined";
    WORKERS = "fleet_workers", "", "Workers that this proxy knows, by role and state";
    EJECTIONS = "worker_ejections", "", "Workers left alone for a while because they failed, by role and cause";
    PICKS = "worker_picks", "", "Pieces of work given to workers, by role and why that worker";
    REFUSED_AT_DOOR = "refused_at_door", "", "Requests refused before any work, since they could not be answered in time";
    EC_OPERATIONS = "ec_operations", "", "Operations of the EC store, by tier, operation and outcome";
    EC_OPERATION_TIME = "ec_operation_time", "seconds", "Time of an operation of the EC store, by tier and operation";
    EC_TRANSFERRED = "ec_transferred", "bytes", "Bytes of objects written to and read from the EC store, by tier and operation";
    ITEM_SOURCE = "item_source", "", "Items by where their encoder output came from";
    PD_QUEUE_TIME = "pd_queue_time", "seconds", "Time a request waited in the engine for its first step";
    PREFILL_TIME = "prefill_time", "seconds", "Time from the first scheduled prompt token to the last";
    KV_USAGE = "kv_cache_usage", "ratio", "Share of KV blocks in use, by pool";
    STEP_TIME = "engine_step_time", "seconds", "Time of one engine step";
    PREEMPTIONS = "preemptions", "", "Sequences that gave up their blocks to others";
    SWAPS = "preemption_swaps", "", "Of those, how many left their keys and values in host memory";
    CACHED_TOKENS = "cached_prompt_tokens", "", "Prompt tokens whose keys and values were there already";
    COMPUTED_TOKENS = "computed_tokens", "", "Token rows that engine steps computed, of prompts and answers";
    DRAFTED_TOKENS = "drafted_tokens", "", "Tokens guessed ahead";
    DRAINING = "draining", "", "1 from the beginning of a stop to the end of the process, else 0";
    ACCEPTED_TOKENS = "accepted_tokens", "", "Tokens guessed ahead that were right";
}
