//! Search over rates: up from a first one until one fails, or down until one passes, then the middle between the highest
//! that passes and the lowest that fails, until the two are close. Pure: verdicts are arguments.
//!
//! A verdict is about the rate that was offered. In a short window that is another one, by chance, than was asked for:
//! passes and failures are ordered by what was offered, and the next rate is asked for in proportion.

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

/// Share by which another's goodput exceeds what passes here at the least to be tried too: closer ones are level.
const LEVEL: f64 = 0.01;
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

/// A tried rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Requests a second that were asked for, in the mean.
    pub asked: f64,
    /// Requests a second that were offered while the run was judged; above 0.
    pub offered: f64,
    /// True if the rate passed.
    pub passed: bool,
}

/// A search under way.
#[derive(Clone, Debug)]
pub struct Search {
    plan: SearchPlan,
    tried: Vec<Trial>,
}

impl Search {
    /// A search without results.
    pub fn new(plan: SearchPlan) -> Self {
        Self { plan, tried: Vec::new() }
    }

    /// Its parameters.
    pub fn plan(&self) -> &SearchPlan {
        &self.plan
    }

    /// Records the verdict on a rate.
    pub fn record(&mut self, trial: Trial) {
        self.tried.push(trial);
    }

    /// The highest offered rate that passes with every lower one passing, and the lowest that fails.
    pub fn bracket(&self) -> (Option<f64>, Option<f64>) {
        let offered = |passed: bool| self.tried.iter().filter(move |t| t.passed == passed).map(|t| t.offered);
        let fails = offered(false).min_by(f64::total_cmp);
        let passes = offered(true).filter(|rate| fails.is_none_or(|f| *rate < f));
        (passes.max_by(f64::total_cmp), fails)
    }

    /// The trial of the highest offered rate that passes with every lower one passing.
    pub fn goodput(&self) -> Option<Trial> {
        let (passes, _) = self.bracket();
        self.tried.iter().find(|trial| trial.passed && Some(trial.offered) == passes).copied()
    }

    /// True of a rate of another search that was not tried here and lies between what passes and what fails.
    pub fn leaves_open(&self, trial: &Trial) -> bool {
        let (passes, fails) = self.bracket();
        passes.is_none_or(|passes| trial.offered > passes * (1.0 + LEVEL))
            && fails.is_some_and(|fails| trial.offered < fails)
            && !self.tried.iter().any(|tried| tried.asked == trial.asked)
    }

    /// The next step away from the first rate: each squares the one before.
    fn step(&self) -> f64 {
        let doublings = self.tried.len().saturating_sub(1).min(8) as i32;
        self.plan.step.powi(2_i32.pow(doublings as u32)).min(LONGEST)
    }

    /// The next rate to ask for; None when it is over.
    pub fn next_rate(&self) -> Option<f64> {
        self.within(self.bracket())
    }

    /// The next rate to ask for where `fails` is known to fail without a run.
    pub fn next_rate_below(&self, fails: f64) -> Option<f64> {
        let (passes, failed) = self.bracket();
        self.within((passes, failed.or(passes.map(|_| fails))))
    }

    /// The next rate to ask for, between a rate that passes and one that fails.
    fn within(&self, bracket: (Option<f64>, Option<f64>)) -> Option<f64> {
        if self.tried.len() >= self.plan.max_rates as usize {
            return None;
        }
        let target = match bracket {
            (None, None) => return Some(self.plan.first),
            (Some(passes), None) => Some(passes * self.step()).filter(|rate| *rate <= self.plan.highest),
            (None, Some(fails)) => Some(fails / self.step()).filter(|rate| *rate >= self.plan.lowest),
            (Some(passes), Some(fails)) => {
                (fails / passes - 1.0 > self.plan.resolution).then(|| (passes * fails).sqrt())
            }
        };
        let asked = self.between_asked(self.asked_for(target?))?;
        // The same rate offers the same requests again.
        (!self.tried.iter().any(|trial| trial.asked == asked)).then_some(asked)
    }

    /// The rate to ask for if it is in the middle half of those that were asked for where the bracket is, and else their middle;
    /// `None`: they are closer than where a search ends. What a window offers jumps by a request that is just in it or not, and
    /// proportions alone ask for rates beside the same two again and again.
    fn between_asked(&self, asked: f64) -> Option<f64> {
        let (_, fails) = self.bracket();
        let failed = self.tried.iter().find(|trial| !trial.passed && Some(trial.offered) == fails);
        let (Some(passed), Some(failed)) = (self.goodput(), failed) else { return Some(asked) };
        let ratio = failed.asked / passed.asked;
        // By chance more was offered where less was asked for.
        if ratio <= 1.0 {
            return Some(asked);
        }
        let at = |share: f64| rounded(passed.asked * ratio.powf(share));
        let is_between = (at(0.25)..=at(0.75)).contains(&asked);
        (ratio - 1.0 > self.plan.resolution / 2.0).then(|| if is_between { asked } else { at(0.5) })
    }

    /// The rate to ask for so that about `target` is offered: in the proportion of the nearest rate that was tried.
    fn asked_for(&self, target: f64) -> f64 {
        let distance = |trial: &&Trial| (trial.offered / target).ln().abs();
        let nearest = self.tried.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        rounded(nearest.map_or(target, |trial| target * trial.asked / trial.offered))
    }
}

/// Rounds to four digits, so that the shown rate is the tried one.
pub fn rounded(rate: f64) -> f64 {
    let scale = 10f64.powf(3.0 - rate.log10().floor());
    (rate * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rate that was offered as it was asked for.
    fn exact(rate: f64, passed: bool) -> Trial {
        Trial { asked: rate, offered: rate, passed }
    }

    /// Searches where every rate up to `goodput` passes.
    fn search(first: f64, goodput: f64) -> (Vec<f64>, (Option<f64>, Option<f64>)) {
        let mut search = Search::new(SearchPlan::from(first, 0.05));
        let mut tried = Vec::new();
        while let Some(rate) = search.next_rate() {
            search.record(exact(rate, rate <= goodput));
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
                search.record(exact(rate, rate <= 7.3));
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
            search.record(exact(rate, passed));
        }
        assert_eq!(search.bracket(), (Some(1.0), Some(2.0)));
        assert_eq!(search.next_rate(), Some(1.414));
    }

    #[test]
    fn a_rate_of_another_is_open_between_what_passes_and_what_fails() {
        let mut search = Search::new(SearchPlan::from(1.0, 0.05));
        assert!(!search.leaves_open(&exact(2.0, true)), "nothing fails yet");
        for (rate, passed) in [(4.0, true), (2.0, true), (5.0, false), (6.0, true)] {
            search.record(exact(rate, passed));
        }
        assert_eq!(search.goodput(), Some(exact(4.0, true)));
        let open: Vec<_> = [3.0, 4.0, 4.03, 4.05, 4.9, 5.0, 6.0]
            .into_iter()
            .filter(|rate| search.leaves_open(&exact(*rate, true)))
            .collect();
        assert_eq!(open, [4.05, 4.9]);
        assert!(!search.leaves_open(&Trial { asked: 5.0, offered: 4.5, passed: true }), "asked for already");
    }

    #[test]
    fn what_is_offered_decides_and_not_what_was_asked_for() {
        // Every window offers a sixth less, so 8 a second are asked for where 6.6 are served.
        let mut search = Search::new(SearchPlan::from(8.0, 0.05));
        while let Some(asked) = search.next_rate() {
            let offered = asked * 5.0 / 6.0;
            search.record(Trial { asked, offered, passed: offered <= 7.3 });
        }
        let (Some(passes), Some(fails)) = search.bracket() else { panic!("{:?}", search.tried) };
        assert!(passes <= 7.3 && 7.3 < fails && fails / passes < 1.051, "{:?}", search.tried);
        assert!(search.tried.len() <= 14, "{:?}", search.tried);
    }

    #[test]
    fn windows_that_offer_what_chance_gives_end_the_search_too() {
        // Off by up to a fifth, by a fixed draw of each rate.
        let chance = |asked: f64| asked * (1.0 + 0.2 * (asked * 1e4).sin());
        let mut search = Search::new(SearchPlan::from(3.0, 0.05));
        while let Some(asked) = search.next_rate() {
            assert!(
                search.tried.iter().all(|trial| trial.asked != asked),
                "{asked} again: {:?}",
                search.tried
            );
            let offered = chance(asked);
            search.record(Trial { asked, offered, passed: offered <= 7.3 });
        }
        let (passes, fails) = search.bracket();
        assert!(passes.is_some_and(|p| p <= 7.3) && fails.is_some_and(|f| f > 7.3), "{:?}", search.tried);
    }

    #[test]
    fn a_search_ends_where_what_is_offered_jumps() {
        for edge in [12.6, 13.0, 13.4] {
            let mut search = Search::new(SearchPlan::near(12.0, 0.06));
            while let Some(asked) = search.next_rate() {
                let offered = asked * if asked < edge { 0.86 } else { 0.93 };
                search.record(Trial { asked, offered, passed: asked < edge });
            }
            assert!(search.tried.len() <= 8, "{:?}", search.tried);
            let near = |trial: &&Trial| (trial.asked / edge - 1.0).abs() < 0.04;
            assert!(search.tried.iter().filter(near).count() >= 2, "{edge}: {:?}", search.tried);
        }
    }

    #[test]
    fn a_rate_that_is_known_to_fail_is_not_tried() {
        let mut search = Search::new(SearchPlan::from(3.0, 0.1));
        while let Some(asked) = search.next_rate_below(5.0) {
            assert!(asked < 5.0, "{:?}", search.tried);
            search.record(exact(asked, true));
        }
        assert!(search.bracket().0.is_some_and(|passes| 5.0 / passes <= 1.1), "{:?}", search.tried);
    }
}
