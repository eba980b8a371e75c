//! Names, units and help texts of every metric; all names start with `triptych_`.
//!
//! `runtime::metrics` registers them.

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
    RESUMED_STREAMS = "resumed_streams", "", "Streams that another PD worker resumed";
    PD_RETRIES = "pd_retries", "", "Requests sent to a PD worker again before their first token";
    EARLY_FORWARDS = "early_forwards", "", "Requests sent to a PD worker while an item of theirs was being encoded";
    PENDING_WAIT = "pending_item_wait", "seconds", "Time that a PD worker waited for items in encoding";
    REQUESTS_RUNNING = "requests_running", "", "Requests in progress";
    REQUESTS_WAITING = "requests_waiting", "", "Requests waiting for their first step";
    LORA_ADAPTERS = "lora_adapters", "", "LoRA adapters that are loaded";
    LORA_RUNNING = "lora_requests_running", "", "Sequences of a LoRA adapter that run";
    LORA_WAITING = "lora_requests_waiting", "", "Sequences of a LoRA adapter that wait";
    TTFT = "time_to_first_token", "seconds", "Time from arrival to the first token";
    TPOT = "time_per_output_token", "seconds", "Mean time between tokens after the first, per request";
    E2E = "e2e_request_latency", "seconds", "Time from arrival to the last token";
    PROMPT_TOKENS = "prompt_tokens", "", "Prompt tokens processed";
    GENERATION_TOKENS = "generation_tokens", "", "Tokens generated";
    ENCODE_QUEUE_TIME = "encode_queue_time", "seconds", "Time an encoder job waited for its batch";
    PREPROCESS_TIME = "preprocess_time", "seconds", "Time to decode and preprocess an item";
    ENCODE_TIME = "encode_time", "seconds", "Time of an encoder forward, per batch";
    ENCODE_BATCH_ITEMS = "encode_batch_items", "", "Items in an encoder batch";
    ENCODE_BATCH_TOKENS = "encode_batch_tokens", "", "Output tokens of an encoder batch";
    ENCODE_GRAPH_REPLAYS = "encode_graph_replays", "", "Encoder forwards that replayed a CUDA graph";
    ENCODE_EAGER_FORWARDS = "encode_eager_forwards", "", "Encoder forwards without a graph on a worker that has graphs";
    ENCODE_GRAPH_TOKENS = "encode_graph_tokens", "", "Output tokens of replayed encoder graphs, padding included";
    ENCODE_GRAPH_PADDING_TOKENS = "encode_graph_padding_tokens", "", "Output tokens of replayed encoder graphs that are padding";
    ENCODE_GRAPHS = "encode_graphs", "", "Encoder graphs captured";
    ENCODE_GRAPH_MEMORY = "encode_graph_memory", "bytes", "GPU memory that encoder graphs keep";
    DECODE_GRAPH_REPLAYS = "decode_graph_replays", "", "Decode steps that replayed a CUDA graph";
    DECODE_EAGER_STEPS = "decode_eager_steps", "", "Decode steps without a graph on a worker that has graphs";
    DECODE_GRAPH_TOKENS = "decode_graph_tokens", "", "Rows of replayed decode graphs, padding included";
    DECODE_GRAPH_PADDING_TOKENS = "decode_graph_padding_tokens", "", "Rows of replayed decode graphs that are padding";
    DECODE_GRAPHS = "decode_graphs", "", "Decode graphs captured";
    DECODE_GRAPH_MEMORY = "decode_graph_memory", "bytes", "GPU memory that decode graphs keep";
    ENCODES = "encodes", "", "Items encoded, by modality";
    ENCODE_JOBS = "encode_jobs", "", "Encoder jobs sent by the proxy, by reason: first, retry, hedge, fallback";
    ENCODES_SHARED = "encodes_shared", "", "Items that joined an encode in flight";
    ENCODE_LEASES = "encode_leases", "", "Requests for the encode lease of an item, by outcome";
    RETRY_BUDGET_EXHAUSTED = "retry_budget_exhausted", "", "Retries and hedges refused by the retry budget";
    ENCODE_QUEUED_TOKENS = "encode_queued_tokens", "", "Output tokens of the items queued or in progress at the encoder, by model and modality";
    ENCODE_BACKLOG = "encode_backlog", "seconds", "Predicted time of the encoder jobs queued or in progress, by model and modality";
    ENCODER_WEIGHTS_LOADED = "encoder_weights_loaded", "", "1 while the weights of an encoder are in memory, else 0, by model and encoder";
    ENCODER_WEIGHT_LOADS = "encoder_weight_loads", "", "Loads of encoder weights while the worker serves, by model, encoder and outcome: ok, failed, no_memory";
    ENCODER_WEIGHT_LOAD_TIME = "encoder_weight_load_time", "seconds", "Time to load encoder weights while the worker serves";
    ENCODER_WEIGHT_DROPS = "encoder_weight_drops", "", "Encoder weights dropped, by model, encoder and reason: idle, memory";
    PUBLISH_TIME = "ec_publish_time", "seconds", "Time to publish an encoder output";
    LOAD_TIME = "ec_load_time", "seconds", "Time to load an encoder output";
    EC_HITS = "ec_hits", "", "Encoder outputs found, by tier";
    EC_MISSES = "ec_misses", "", "Encoder outputs not found, by tier";
    EC_CACHE = "ec_cache", "bytes", "Encoder outputs in a PD worker's memory, by state: held by requests or on their way to them, resident, budget of both";
    EC_CACHE_WAITS = "ec_cache_waits", "", "Requests that waited for room for their encoder outputs on a PD worker";
    EC_CORRUPT = "ec_corrupt_objects", "", "Objects that did not verify and were quarantined";
    WORKERS = "fleet_workers", "", "Workers known to this proxy, by role and state";
    WORKER_EJECTIONS = "worker_ejections", "", "Workers ejected for a while after failures, by role and cause";
    WORKER_PICKS = "worker_picks", "", "Jobs sent to workers, by role and reason of the choice";
    ROLE_CHANGES = "role_changes", "", "Changes of the roles of PD workers with encoders, by new role and cause: load, operator";
    ENCODE_SHARE = "encode_share", "ratio", "Part of the work of workers with elastic roles that is encodes";
    ADMISSION_REJECTIONS = "admission_rejections", "", "Requests rejected on admission, because they could not be answered in time";
    EC_OPERATIONS = "ec_operations", "", "Operations of the EC store, by tier, operation and outcome";
    EC_OPERATION_TIME = "ec_operation_time", "seconds", "Time of an operation of the EC store, by tier and operation";
    EC_CIRCUIT_BREAKER = "ec_circuit_breaker", "", "1 for the state of the circuit breaker of the EC store, else 0, by tier and state";
    EC_TRANSFERRED = "ec_transferred", "bytes", "Bytes of objects written to and read from the EC store, by tier and operation";
    ITEM_SOURCE = "item_source", "", "Items by the source of their encoder output";
    PD_QUEUE_TIME = "pd_queue_time", "seconds", "Time a request waited in the engine for its first step";
    PREFILL_TIME = "prefill_time", "seconds", "Time from the first scheduled prompt token to the last";
    KV_USAGE = "kv_cache_usage", "ratio", "Fraction of KV blocks, or of slots of recurrent states, in use, by pool";
    STEP_TIME = "engine_step_time", "seconds", "Time of one engine step";
    PREEMPTIONS = "preemptions", "", "Sequences preempted";
    PREEMPTION_SWAPS = "preemption_swaps", "", "Preempted sequences whose KV blocks were swapped to host memory";
    STATE_CHECKPOINTS = "state_checkpoints", "", "Checkpoints of recurrent states, which are free when needed";
    STATE_CHECKPOINT_HITS = "state_checkpoint_hits", "", "Sequences that began with a checkpoint of a recurrent state";
    CACHED_TOKENS = "cached_prompt_tokens", "", "Prompt tokens found in the prefix cache";
    COMPUTED_TOKENS = "computed_tokens", "", "Tokens computed by engine steps, of prompts and answers";
    DRAFTED_TOKENS = "drafted_tokens", "", "Draft tokens proposed by speculative decoding";
    QUOTA_STORE_UP = "quota_store_up", "", "1 while all proxies count the rates of tenants together, 0 while this one counts alone";
    QUOTAS_COUNTED_ALONE = "quotas_counted_alone", "", "Takes from tenants' rates that this proxy counted alone, since the quota store was away";
    DRAINING = "draining", "", "1 while the process drains, else 0";
    ACCEPTED_TOKENS = "accepted_tokens", "", "Draft tokens accepted";
}
