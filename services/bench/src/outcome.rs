//! Outcome of an offered request, as its client saw it. Times are after the start of the run.

use crate::slo::Slo;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// One for each offered request, however it ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Index of the [`crate::offered::Offered`] request.
    pub index: u64,
    /// Time at which it was due. Latencies count from here, so that a late client is not a fast server.
    pub due: Duration,
    /// Time at which it was sent.
    pub sent: Duration,
    /// Arrival time of each output token; tokens of one message arrive at once.
    pub tokens: Vec<Duration>,
    /// Arrival time of its end.
    pub ended: Duration,
    /// Kind of end.
    pub end: End,
    /// Number of items, and of those found in a cache or shared, if the server reports it.
    pub items: ItemCounts,
    /// Latency limits of its own; `None`: those of the run.
    pub slo: Option<Slo>,
}

/// End of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// All requested tokens.
    Whole,
    /// Fewer tokens, or none.
    Short,
    /// Refused for lack of room: `RESOURCE_EXHAUSTED`, 429, 503.
    Refused,
    /// Failed otherwise: the status, or what broke.
    Failed(String),
    /// Not ended when the run stopped waiting.
    Unended,
}

/// Items of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ItemCounts {
    /// Attached.
    pub n: u32,
    /// Found in a cache, or shared with another request's encode.
    pub n_found: u32,
}
