//! Content of items: new, or repeated.

use crate::offered::{ItemShape, OfferedItem};
use crate::seed::{BenchRng, unit};
use crate::text::{Settings, TextError};
use rand_distr::{Distribution, Zipf};
use std::collections::VecDeque;

/// The largest pool.
const MAX_POOL: u64 = 1_000_000;

/// Repetition of items.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Content {
    /// Never.
    Fresh,
    /// Each is one of a pool, the k-th with weight k^-s.
    Pool { n: u64, s: f64 },
    /// This share of items repeats one of the last `n` different ones, those of late with more weight; the others
    /// are new. So the share of items that were offered before is known, and is the same from the start to the end.
    Share { share: f64, n: u64, s: f64 },
}

impl Content {
    /// Reads `pool`, `zipf` and `share`.
    pub(super) fn read(settings: &mut Settings, default: Self) -> Result<Self, TextError> {
        let (pool, zipf) = match default {
            Self::Pool { n, s } | Self::Share { n, s, .. } => (n, s),
            Self::Fresh => (0, 1.0),
        };
        let n = settings.number("pool", pool, (0, MAX_POOL))?;
        let s = settings.number("zipf", zipf, (0.0, 10.0))?;
        let share = settings.number("share", -1.0, (0.0, 1.0))?;
        Ok(match (share, n) {
            (share, n) if share >= 0.0 => Self::Share { share, n: if n == 0 { 256 } else { n }, s },
            (_, 0) => Self::Fresh,
            (_, n) => Self::Pool { n, s },
        })
    }

    /// State at the start of a run.
    pub(super) fn start(&self, seed: u64) -> Contents {
        Contents { content: *self, n_fresh: 0, seed, seen: VecDeque::new() }
    }
}

/// A run's items so far.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    content: Content,
    n_fresh: u64,
    /// Two seeds share no bytes: what one run left in a cache is nothing to the next.
    seed: u64,
    /// The last different items, the latest first.
    seen: VecDeque<OfferedItem>,
}

impl Contents {
    /// An item of this shape, or one that was there before with the shape that it had.
    pub(super) fn draw(&mut self, rng: &mut BenchRng, shape: ItemShape) -> OfferedItem {
        match self.content {
            Content::Fresh => self.fresh(shape),
            // The rank is the content; its shape goes by its rank too, so that an item is the same each time.
            Content::Pool { n, s } => {
                let rank = rank(rng, n, s);
                let known = self.seen.iter().find(|i| i.content == self.id(rank)).copied();
                known.unwrap_or_else(|| {
                    let item = OfferedItem { content: self.id(rank), shape };
                    self.seen.push_back(item);
                    item
                })
            }
            Content::Share { share, n, s } => {
                let again = unit(rng) < share;
                match (again, self.seen.len()) {
                    (true, 1..) => {
                        let rank = rank(rng, self.seen.len() as u64, s) as usize;
                        self.seen[rank]
                    }
                    _ => {
                        let item = self.fresh(shape);
                        self.seen.push_front(item);
                        self.seen.truncate(n.min(MAX_POOL) as usize);
                        item
                    }
                }
            }
        }
    }

    /// One that nobody has seen.
    pub(super) fn fresh(&mut self, shape: ItemShape) -> OfferedItem {
        self.n_fresh += 1;
        OfferedItem { content: self.id(MAX_POOL + self.n_fresh), shape }
    }

    fn id(&self, number: u64) -> u64 {
        (crate::seed::mix(self.seed) << 32) ^ number
    }
}

/// A rank from 0 to n − 1, the k-th with weight (k + 1)^-s.
fn rank(rng: &mut BenchRng, n: u64, s: f64) -> u64 {
    let zipf = Zipf::new(n as f64, s).expect("at least one rank, and a finite exponent");
    (zipf.sample(rng) as u64).clamp(1, n) - 1
}

/// The share of `n_items` draws from a Zipf pool whose content was drawn before, in the mean.
pub fn expected_reuse(pool: u64, zipf: f64, n_items: u64) -> f64 {
    let weights = (1..=pool.min(MAX_POOL)).map(|k| (k as f64).powf(-zipf));
    let total: f64 = weights.clone().sum();
    // A content is new once, if it is drawn at all.
    let different: f64 = weights.map(|w| 1.0 - (1.0 - w / total).powf(n_items as f64)).sum();
    if n_items == 0 { 0.0 } else { 1.0 - different / n_items as f64 }
}
