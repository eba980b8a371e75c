//! Where the time of a request went.

use std::time::Duration;

/// Time in each stage, as far as the request got. Sums of overlapping items are wall-clock, not added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Waiting: in the encoder's queue and in the engine's.
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

/// Where an item's encoder output came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemSource {
    /// Encoded for this request.
    Encoded,
    /// Encoded for another request at the same moment.
    Shared,
    /// Found in the EC store.
    Cached,
}

impl ItemSource {
    /// The word used in answers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Encoded => "encoded",
            Self::Shared => "shared",
            Self::Cached => "cached",
        }
    }
}
