//! Rates of a sweep: a search's, all of a list, or those of a list between which goodput lies. Pure: verdicts are arguments.

use crate::search::{Search, SearchPlan, Trial};

/// Rates of a sweep, as it is asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Rates {
    /// Rates that the search picks.
    Search {
        /// First rate; `None`: found by sending a few requests one after the other.
        first: Option<f64>,
        /// Two rates are close enough if they differ by less than this share.
        resolution: f64,
    },
    /// A list of rates.
    Listed(Vec<f64>),
    /// A list of rates, from the middle one up while they pass and down while they fail. Servers that are compared start at the
    /// same rate and take the same steps.
    Bracketed(Vec<f64>),
}

/// The rates to come.
#[derive(Clone, Debug)]
pub enum Steps {
    /// A search's.
    Search(Search),
    /// A list's, and how many of them were tried.
    Listed(Vec<f64>, usize),
    /// A bracket within a list.
    Bracketed(Bracketing),
}

impl Steps {
    /// Steps of `rates`; a search begins at a rate that is near the expected goodput, or else at `safe`.
    pub fn new(rates: &Rates, safe: f64) -> Self {
        match rates {
            Rates::Listed(rates) => Self::Listed(rates.clone(), 0),
            Rates::Bracketed(rates) => Self::Bracketed(Bracketing::new(rates)),
            Rates::Search { first, resolution } => Self::Search(Search::new(match first {
                Some(first) => SearchPlan::near(*first, *resolution),
                None => SearchPlan::from(safe, *resolution),
            })),
        }
    }

    /// The next rate, in requests/s; `None` when all were tried.
    pub fn next(&self) -> Option<f64> {
        match self {
            Self::Search(search) => search.next_rate(),
            Self::Listed(rates, n_tried) => rates.get(*n_tried).copied(),
            Self::Bracketed(bracketing) => bracketing.next(),
        }
    }

    /// The search, where rates are searched.
    pub fn search(&self) -> Option<&Search> {
        match self {
            Self::Search(search) => Some(search),
            Self::Listed(..) | Self::Bracketed(_) => None,
        }
    }

    /// Records the verdict on a rate.
    pub fn record(&mut self, trial: Trial) {
        match self {
            Self::Search(search) => search.record(trial),
            Self::Listed(_, n_tried) => *n_tried += 1,
            Self::Bracketed(bracketing) => bracketing.record(trial),
        }
    }
}

/// The way through a list of rates to a rate that passes below one that fails.
#[derive(Clone, Debug, PartialEq)]
pub struct Bracketing {
    /// Rates, ascending, each with its verdict.
    rates: Vec<(f64, Option<bool>)>,
}

impl Bracketing {
    /// A way through `rates`, which are in any order.
    pub fn new(rates: &[f64]) -> Self {
        let mut rates = rates.to_vec();
        rates.sort_by(f64::total_cmp);
        rates.dedup();
        Self { rates: rates.into_iter().map(|rate| (rate, None)).collect() }
    }

    /// All rates of the list, ascending.
    pub fn rates(&self) -> impl Iterator<Item = f64> {
        self.rates.iter().map(|(rate, _)| *rate)
    }

    /// The next rate: above all that pass, or else below the lowest that fails; `None` when both are known or the list ends.
    pub fn next(&self) -> Option<f64> {
        let passes = self.rates.iter().rposition(|(_, passed)| *passed == Some(true));
        let fails = self.rates.iter().position(|(_, passed)| *passed == Some(false));
        let next = match (passes, fails) {
            (None, None) => self.rates.len() / 2,
            (_, Some(fails)) => fails.checked_sub(1)?,
            (Some(passes), None) => passes + 1,
        };
        self.rates.get(next).filter(|(_, passed)| passed.is_none()).map(|(rate, _)| *rate)
    }

    /// Records the verdict on a rate of the list; of another there is nothing to record.
    pub fn record(&mut self, trial: Trial) {
        for (rate, passed) in &mut self.rates {
            if *rate == trial.asked {
                *passed = Some(trial.passed);
            }
        }
    }

    /// True if `tried` leave no rate to be tried.
    pub fn is_over(mut self, tried: impl IntoIterator<Item = Trial>) -> bool {
        for trial in tried {
            self.record(trial);
        }
        self.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: [f64; 7] = [8.0, 5.0, 6.0, 7.0, 9.0, 10.0, 4.0];

    /// Rates that are tried where each up to `goodput` passes.
    fn tried(rates: &[f64], goodput: f64) -> Vec<f64> {
        let mut steps = Steps::new(&Rates::Bracketed(rates.to_vec()), 1.0);
        let mut tried = Vec::new();
        while let Some(rate) = steps.next() {
            steps.record(Trial { asked: rate, offered: rate * 1.1, passed: rate <= goodput });
            tried.push(rate);
        }
        tried
    }

    #[test]
    fn a_bracket_begins_at_the_middle_and_ends_behind_a_change() {
        assert_eq!(tried(&LIST, 7.5), [7.0, 8.0]);
        assert_eq!(tried(&LIST, 9.0), [7.0, 8.0, 9.0, 10.0]);
        assert_eq!(tried(&LIST, 6.0), [7.0, 6.0]);
        assert_eq!(tried(&LIST, 1.0), [7.0, 6.0, 5.0, 4.0], "none passes");
        assert_eq!(tried(&LIST, 11.0), [7.0, 8.0, 9.0, 10.0], "all pass");
        assert_eq!(tried(&[3.0], 1.0), [3.0]);
        assert!(tried(&[], 1.0).is_empty());
    }

    #[test]
    fn what_was_tried_before_may_be_enough() {
        let trial = |asked: f64, passed: bool| Trial { asked, offered: asked, passed };
        let is_over = |tried: &[Trial]| Bracketing::new(&LIST).is_over(tried.iter().copied());
        assert!(is_over(&[trial(7.0, false), trial(6.0, true)]));
        assert!(!is_over(&[trial(7.0, false)]) && !is_over(&[trial(7.0, true)]) && !is_over(&[]));
        assert!(!is_over(&[trial(7.2, false), trial(6.2, true)]), "rates of another list");
        assert!(is_over(&LIST.map(|rate| trial(rate, rate < 5.5))), "all of the list");
    }
}
