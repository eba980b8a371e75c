//! How sequences that write keep going while others read their prompts.
//!
//! A step that reads a chunk of a prompt may take as long as many that only write: on a CPU, which computes slowly for the
//! memory that it reads, a hundred of them. Chunks bound how long such a step is (<https://arxiv.org/abs/2403.02310>), and
//! not how many follow each other while prompts wait. So a share of the engine's time is theirs who write: after a step
//! that read beside them they go on alone until they have had it. Of time that nobody writes in nothing is owed, and
//! nothing is saved up.

use std::time::Duration;

/// Whose the next step is.
#[derive(Debug)]
pub(super) struct Pace {
    /// Seconds of steps that only write, for each second of those that read as well.
    ratio: f64,
    owed_s: f64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Did {
    /// Rows of prompts, or projections.
    pub reads: bool,
    /// Rows of sequences that write.
    pub writes: bool,
}

impl Pace {
    /// With so many hundredths of the time for those who write, less than all.
    pub fn new(percent: u8) -> Self {
        let percent = f64::from(percent.min(99));
        Self { ratio: percent / (100.0 - percent), owed_s: 0.0 }
    }

    /// Whether the next step is theirs who write, if anyone does.
    pub fn only_writes(&self) -> bool {
        self.owed_s > 0.0
    }

    /// A step ran and took this long.
    pub fn note(&mut self, did: Did, took: Duration) {
        let took_s = took.as_secs_f64();
        self.owed_s = match did {
            Did { reads: true, writes: true } => took_s * self.ratio,
            Did { reads: true, writes: false } => 0.0,
            Did { reads: false, .. } => (self.owed_s - took_s).max(0.0),
        };
    }
}
