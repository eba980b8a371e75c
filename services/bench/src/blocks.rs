//! Blocks of a run: parts of minutes between which compared servers take turns, so that a slow hour of the machine hits all alike.
//!
//! A block is a run of its own, with a warm-up, and a part of the requests under a seed of its own. Servers that are compared get
//! the same requests at the same times in a block, so what one does better is seen block by block.

use crate::seed::mix;
use std::time::Duration;

/// A block of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Index in its run.
    pub idx: u32,
    /// Blocks of the run, at least one.
    pub n: u32,
}

impl Block {
    /// A run that is not cut.
    pub const WHOLE: Self = Self { idx: 0, n: 1 };

    /// Seed of the requests of a block of the run with this seed.
    pub fn seed(self, seed: u64) -> u64 {
        if self.n == 1 { seed } else { mix(mix(seed) ^ u64::from(self.idx)) }
    }

    /// The block's part of a run's requests; all blocks together have at least as many.
    pub fn requests(self, all: u64) -> u64 {
        all.div_ceil(u64::from(self.n.max(1)))
    }

    /// The block's part of a window.
    pub fn window(self, all: Duration) -> Duration {
        all / self.n.max(1)
    }
}

/// Blocks of about a given length in a window; without a length, or in a short window, one.
pub fn n_blocks(window: Duration, length: Option<Duration>) -> u32 {
    let Some(length) = length.filter(|length| !length.is_zero()) else { return 1 };
    // Saturates; a window of years has as many blocks as there are numbers.
    ((window.as_secs_f64() / length.as_secs_f64()).round() as u32).max(1)
}

/// A run, or a block of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunKey {
    /// Requests a second.
    pub rate: f64,
    /// Seed of the run.
    pub seed: u64,
    /// The block.
    pub block: Block,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_cut_into_blocks_of_about_the_length() {
        let s = Duration::from_secs;
        for (window, length, expect) in
            [(600, Some(120), 5), (200, Some(60), 3), (50, Some(120), 1), (600, None, 1), (600, Some(0), 1)]
        {
            assert_eq!(n_blocks(s(window), length.map(s)), expect, "{window} s in blocks of {length:?}");
        }
    }

    #[test]
    fn blocks_share_the_requests_and_no_seed() {
        let blocks = (0..3).map(|idx| Block { idx, n: 3 });
        assert_eq!(blocks.clone().map(|b| b.requests(1000)).collect::<Vec<_>>(), [334; 3]);
        let mut seeds: Vec<u64> =
            (1..=3).flat_map(|seed| blocks.clone().map(move |b| b.seed(seed))).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 9);
        assert_eq!(Block::WHOLE.seed(7), 7, "a whole run is as it was without blocks");
    }
}
