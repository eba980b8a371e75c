//! Offered requests at any rate.

use std::collections::VecDeque;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::offered::Offered;
use triptych_bench::workload::Workload;

/// Requests without an end, in the order in which they are due.
pub type Requests<'a> = Box<dyn Iterator<Item = Offered> + Send + 'a>;

/// A source of requests. The same rate and seed give the same requests.
pub trait Demand: Sync {
    /// Name for the plan.
    fn name(&self) -> String;

    /// Requests at a mean rate, a second.
    fn requests(&self, rate: f64, seed: u64) -> Requests<'_>;
}

/// A workload of the bench.
#[derive(Clone, Debug)]
pub struct Named {
    /// The workload.
    pub workload: Workload,
    /// Arrival process.
    pub arrivals: Arrivals,
}

impl Demand for Named {
    fn name(&self) -> String {
        format!("{}, {} arrivals", self.workload.text(), self.arrivals)
    }

    fn requests(&self, rate: f64, seed: u64) -> Requests<'_> {
        Box::new(self.workload.requests(rate, self.arrivals, seed))
    }
}

/// Another demand with a share of repeated items.
pub struct Reused<'a> {
    /// The demand that it changes.
    pub demand: &'a dyn Demand,
    /// Share of repeated items, from 0 to 1.
    pub share: f64,
}

/// Items that may be repeated.
const CACHE_ITEMS: usize = 256;

impl Demand for Reused<'_> {
    fn name(&self) -> String {
        format!("{}, with {:.0} % of its items repeated", self.demand.name(), self.share * 1e2)
    }

    fn requests(&self, rate: f64, seed: u64) -> Requests<'_> {
        let mut draws = Draws::new(seed);
        let mut seen: VecDeque<triptych_bench::offered::OfferedItem> = VecDeque::new();
        let share = self.share;
        Box::new(self.demand.requests(rate, seed).map(move |mut offered| {
            for item in &mut offered.items {
                // Only what has the same shape costs the same.
                let alike: Vec<_> = seen.iter().filter(|old| old.shape == item.shape).collect();
                if !alike.is_empty() && draws.unit() < share {
                    *item = *alike[draws.below(alike.len())];
                } else {
                    if seen.len() == CACHE_ITEMS {
                        seen.pop_front();
                    }
                    seen.push_back(*item);
                }
            }
            offered
        }))
    }
}

/// Numbers from a seed (SplitMix64, Steele and others 2014): few, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// Numbers from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// An integer in 0..`n`; 0 for an empty range.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f64) as usize).min(n.saturating_sub(1))
    }
}
