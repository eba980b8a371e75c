//! Search over rates: up from a first one until one fails, or down until one passes, then the middle between the highest
//! that passes and the lowest that fails, until the two are close. Pure: verdicts are arguments.

use serde::{Deserialize, Serialize};

/// Parameters of a search.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SearchPlan {
    /// The first rate.
    pub first: f64,
    /// No rate below.
    pub lowest: f64,
    /// No rate above.
    pub highest: f64,
    /// Relative difference of the two rates at which the search ends.
    pub resolution: f64,
    /// The most rates.
    pub max_rates: u32,
    /// The first step up or down, as a factor; those after it grow up to a factor of 2.
    pub step: f64,
}

/// The longest step of a search.
const LONGEST: f64 = 2.0;

impl SearchPlan {
    /// A search from an arbitrary first rate, over three orders of magnitude to both sides.
    pub fn from(first: f64, resolution: f64) -> Self {
        let lowest = first / 1024.0;
        let highest = first * 1024.0;
        Self { first, lowest, highest, resolution, max_rates: 24, step: LONGEST }
    }

    /// A search from a first rate near the expected goodput.
    pub fn near(first: f64, resolution: f64) -> Self {
        Self { step: 1.25, ..Self::from(first, resolution) }
    }

    /// Number of rates if goodput is within a factor of 4 of the first, for estimates.
    pub fn likely_rates(&self) -> u32 {
        let halvings = (1.0 / self.resolution.clamp(1e-3, 1.0)).log2().ceil();
        (3 + halvings as u32).min(self.max_rates)
    }
}

/// A search under way.
#[derive(Clone, Debug)]
pub struct Search {
    plan: SearchPlan,
    tried: Vec<(f64, bool)>,
}

impl Search {
    /// A search without results.
    pub fn new(plan: SearchPlan) -> Self {
        Self { plan, tried: Vec::new() }
    }

    /// Records the verdict on a rate.
    pub fn record(&mut self, rate: f64, passed: bool) {
        self.tried.push((rate, passed));
    }

    /// The highest rate that passes with every lower one passing, and the lowest that fails.
    pub fn bracket(&self) -> (Option<f64>, Option<f64>) {
        let fails = self.tried.iter().filter(|(_, passed)| !passed).map(|(rate, _)| *rate);
        let fails = fails.min_by(f64::total_cmp);
        let passes = self.tried.iter().filter(|(rate, passed)| *passed && fails.is_none_or(|f| *rate < f));
        (passes.map(|(rate, _)| *rate).max_by(f64::total_cmp), fails)
    }

    /// The next step away from the first rate: each squares the one before.
    fn step(&self) -> f64 {
        let doublings = self.tried.len().saturating_sub(1).min(8) as i32;
        self.plan.step.powi(2_i32.pow(doublings as u32)).min(LONGEST)
    }

    /// The next rate to try; None when it is over.
    pub fn next_rate(&self) -> Option<f64> {
        if self.tried.len() >= self.plan.max_rates as usize {
            return None;
        }
        match self.bracket() {
            (None, None) => Some(self.plan.first),
            (Some(passes), None) => {
                Some(rounded(passes * self.step())).filter(|rate| *rate <= self.plan.highest)
            }
            (None, Some(fails)) => {
                Some(rounded(fails / self.step())).filter(|rate| *rate >= self.plan.lowest)
            }
            (Some(passes), Some(fails)) => {
                (fails / passes - 1.0 > self.plan.resolution).then(|| rounded((passes * fails).sqrt()))
            }
        }
    }
}

/// Rounds to four digits, so that the shown rate is the tried one.
fn rounded(rate: f64) -> f64 {
    let scale = 10f64.powf(3.0 - rate.log10().floor());
    (rate * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches where every rate up to `goodput` passes.
    fn search(first: f64, goodput: f64) -> (Vec<f64>, (Option<f64>, Option<f64>)) {
        let mut search = Search::new(SearchPlan::from(first, 0.05));
        let mut tried = Vec::new();
        while let Some(rate) = search.next_rate() {
            search.record(rate, rate <= goodput);
            tried.push(rate);
        }
        (tried, search.bracket())
    }

    #[test]
    fn it_finds_the_edge_from_both_sides() {
        for first in [0.1, 1.0, 5.0, 80.0] {
            let (tried, bracket) = search(first, 7.3);
            let (Some(passes), Some(fails)) = bracket else { panic!("{first}: {bracket:?}") };
            assert!(passes <= 7.3 && 7.3 < fails && fails / passes < 1.051, "{first}: {tried:?}");
            assert!(tried.len() <= 14, "{tried:?}");
        }
    }

    #[test]
    fn near_a_known_rate_it_takes_fewer() {
        let rates = |first: f64, plan: fn(f64, f64) -> SearchPlan| {
            let mut search = Search::new(plan(first, 0.15));
            let mut n = 0;
            while let Some(rate) = search.next_rate() {
                search.record(rate, rate <= 7.3);
                n += 1;
            }
            let (Some(passes), Some(fails)) = search.bracket() else { panic!("{:?}", search.bracket()) };
            assert!(passes <= 7.3 && 7.3 < fails && fails / passes < 1.151, "{:?}", search.tried);
            n
        };
        for first in [6.0, 7.0, 8.0, 9.0] {
            assert!(rates(first, SearchPlan::near) < rates(first, SearchPlan::from), "{first}");
        }
        assert!(rates(0.1, SearchPlan::near) <= rates(0.1, SearchPlan::from) + 3);
    }

    #[test]
    fn it_ends_where_nothing_passes_and_where_everything_does() {
        assert_eq!(search(1.0, 0.0).1.0, None);
        assert_eq!(search(1.0, f64::INFINITY).1.1, None);
        assert!(search(1.0, 0.0).0.len() <= 11 && search(1.0, f64::INFINITY).0.len() <= 11);
    }

    #[test]
    fn a_rate_that_passes_above_one_that_fails_does_not_count() {
        let mut search = Search::new(SearchPlan::from(1.0, 0.05));
        for (rate, passed) in [(1.0, true), (2.0, false), (3.0, true)] {
            search.record(rate, passed);
        }
        assert_eq!(search.bracket(), (Some(1.0), Some(2.0)));
        assert_eq!(search.next_rate(), Some(1.414));
    }
}
