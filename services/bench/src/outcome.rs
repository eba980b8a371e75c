//! What became of an offered request, as its client saw it. Times are after the start of the run.

use std::time::Duration;

/// One for each offered request, however it ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Of [`crate::offered::Offered`].
    pub index: u64,
    /// When it should have been sent. Latencies count from here, so that a late client is not a fast server.
    pub due: Duration,
    /// When it was.
    pub sent: Duration,
    /// When each output token arrived; several of one message arrive at once.
    pub tokens: Vec<Duration>,
    /// When its end arrived.
    pub ended: Duration,
    /// How it ended.
    pub end: End,
    /// Items attached, and how many of them no encoder had to compute for this request, where the server says so.
    pub items: ItemCounts,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With all tokens that were asked for.
    Whole,
    /// With fewer tokens, none included.
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
