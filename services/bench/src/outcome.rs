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

impl Outcome {
    /// True if it ended with all tokens.
    pub fn is_whole(&self) -> bool {
        self.end == End::Whole && !self.tokens.is_empty()
    }

    /// Time from when it was due to its first token.
    pub fn ttft(&self) -> Option<Duration> {
        Some(self.tokens.first()?.saturating_sub(self.due))
    }

    /// Time from when it was due to its end.
    pub fn e2el(&self) -> Duration {
        self.ended.saturating_sub(self.due)
    }

    /// Mean time of the tokens after the first: (last - first) / (n - 1). None for fewer than two.
    pub fn tpot(&self) -> Option<Duration> {
        let first = self.tokens.first()?;
        let last = self.tokens.last()?;
        let n = u32::try_from(self.tokens.len()).ok()?.checked_sub(1).filter(|n| *n > 0)?;
        Some(last.saturating_sub(*first) / n)
    }

    /// Its latency limits in a run with these: its own, if it has some, of the latencies that the run limits.
    pub fn limits(&self, run: &Slo) -> Slo {
        let Some(own) = self.slo else { return *run };
        Slo { ttft: run.ttft.and(own.ttft), tpot: run.tpot.and(own.tpot), e2el: run.e2el.and(own.e2el) }
    }

    /// True if it met every limit ([`Self::limits`]). Refused, failed, short and unanswered requests meet none. A whole
    /// answer of one token has no TPOT to meet.
    pub fn meets(&self, slo: &Slo) -> bool {
        let within = |found: Option<Duration>, wanted: Option<Duration>| match wanted {
            None => true,
            Some(wanted) => found.is_some_and(|found| found <= wanted),
        };
        let slo = self.limits(slo);
        self.is_whole()
            && within(self.ttft(), slo.ttft)
            && (self.tokens.len() == 1 || within(self.tpot(), slo.tpot))
            && within(Some(self.e2el()), slo.e2el)
    }
}
