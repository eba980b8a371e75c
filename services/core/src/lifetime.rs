//! Time of a request by stage, and the sources of its items.

use std::time::Duration;

/// Time in each stage that the request reached. For items that overlap it is wall-clock time, not a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Time in the encoder's queue and in the engine's.
    pub queue: Duration,
    /// Preprocessing and encoder forward, for the slowest item that was encoded.
    pub encode: Duration,
    /// Publishing it to the EC store.
    pub publish: Duration,
    /// Loading encoder outputs on the PD worker.
    pub load: Duration,
    /// Prefill: from the first scheduled token of the prompt to its last.
    pub prefill: Duration,
    /// From the request's arrival at the proxy to its first token.
    pub first_token: Duration,
    /// Mean time between tokens after the first; zero for fewer than two.
    pub per_token: Duration,
}

/// Source of an item's encoder output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemSource {
    /// Encoded for this request.
    Encoded,
    /// Encoded for another request that was in flight.
    Shared,
    /// Found in the EC store.
    Cached,
}

impl ItemSource {
    /// The label used in responses and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Encoded => "encoded",
            Self::Shared => "shared",
            Self::Cached => "cached",
        }
    }
}
