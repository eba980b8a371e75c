//! Repetition of a rate that fails for rising trends alone, with as many other seeds.
//!
//! A seed has the same arrivals at every rate of a sweep. A rise that a seed's arrivals make near capacity is therefore found
//! again at lower rates, and a search goes down past what the server can hold. Only other arrivals can tell such a rise from a
//! backlog ([`judge_repeated`](crate::judge::judge_repeated)).

/// Seeds of a sweep, and behind them as many further ones, of the repetition.
pub fn all_seeds(seeds: &[u64]) -> Vec<u64> {
    let highest = seeds.iter().copied().max().unwrap_or(0);
    let further =
        (1..).map(|i| highest.wrapping_add(i)).filter(|seed| !seeds.contains(seed)).take(seeds.len());
    seeds.iter().copied().chain(further).collect()
}

/// Number of runs before those of the repetition, by the seed of each run; 0 if there is none.
pub fn n_first(of_runs: impl IntoIterator<Item = u64>, seeds: &[u64]) -> usize {
    of_runs.into_iter().position(|seed| !seeds.contains(&seed)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{JudgedWindow, Rule, Run, judge_repeated, judge_runs};
    use crate::outcome::{End, ItemCounts, Outcome};
    use crate::seed::{Purpose, rng, unit};
    use std::time::Duration;

    #[test]
    fn a_repetition_has_as_many_seeds_and_none_twice() {
        assert_eq!(all_seeds(&[1, 2, 3]), [1, 2, 3, 4, 5, 6]);
        assert_eq!(all_seeds(&[7]), [7, 8]);
        assert_eq!(all_seeds(&[u64::MAX, 0]), [u64::MAX, 0, 1, 2]);
        assert!(all_seeds(&[]).is_empty());
        assert_eq!(n_first([1, 2, 3, 4], &[1, 2, 3]), 3);
        assert_eq!(n_first([1, 2, 3], &[1, 2, 3]), 0, "not repeated");
    }

    const WARM_UP: u32 = 100;
    const JUDGED: u32 = 1000;

    /// A run of one server that takes a request after the other: 50 ms for most, ten times as long for one of ten.
    fn queue(load: f64, seed: u64) -> (Vec<Outcome>, JudgedWindow) {
        let mut rng = rng(seed, Purpose::Arrivals, 0);
        let mean_s = 0.05 * 0.9 + 0.5 * 0.1;
        let (mut at, mut free) = (0.0f64, 0.0f64);
        let one = |index: u32| {
            at -= (1.0 - unit(&mut rng)).ln() * mean_s / load;
            free = free.max(at) + if unit(&mut rng) < 0.1 { 0.5 } else { 0.05 };
            let [due, ended] = [at, free].map(Duration::from_secs_f64);
            Outcome {
                index: u64::from(index),
                due,
                sent: due,
                tokens: vec![ended],
                ended,
                end: End::Whole,
                items: ItemCounts::default(),
                slo: None,
            }
        };
        let outcomes: Vec<_> = (0..WARM_UP + JUDGED).map(one).collect();
        let window =
            JudgedWindow { from: outcomes[WARM_UP as usize].due, to: outcomes.last().expect("some").due };
        (outcomes, window)
    }

    /// True if three runs of a load rise, and if three others do that repeat them.
    fn rises(load: f64, repeat: u64) -> (bool, bool) {
        let slo = "ttft=1000s".parse().expect("an SLO");
        let runs: Vec<_> = (0..6).map(|seed| queue(load, repeat * 6 + seed)).collect();
        let runs: Vec<_> = runs.iter().map(|(outcomes, window)| Run { outcomes, window: *window }).collect();
        let first = judge_runs(&runs[..3], &slo, &Rule::default());
        let all = judge_repeated(&runs, 3, &slo, &Rule::default());
        assert_eq!(all.n_offered, 2 * first.n_offered, "all requests count");
        let rises = |verdict: &crate::judge::RunVerdict| verdict.concurrency_trend.is_some_and(|t| t.rises);
        (rises(&first), rises(&first) && rises(&all))
    }

    #[test]
    fn a_rise_by_chance_is_seldom_confirmed_and_a_backlog_mostly_is() {
        let count = |load: f64| {
            let found: Vec<_> = (0..100).map(|repeat| rises(load, repeat)).collect();
            let n = |pick: fn(&(bool, bool)) -> bool| found.iter().filter(|one| pick(one)).count();
            (n(|(first, _)| *first), n(|(_, confirmed)| *confirmed))
        };
        let (once, confirmed) = count(0.9);
        assert!(once >= 5 && confirmed <= 4, "{once} and {confirmed} of 100 stable loads");
        let (once, confirmed) = count(1.1);
        assert!(once >= 95 && confirmed >= 90, "{once} and {confirmed} of 100 overloads");
    }
}
