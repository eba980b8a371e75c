//! The sizes of a sweep by the rule, and what a shorter one lacks.

use crate::result::RateResult;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Judged requests of a run, by the rule.
pub const RULE_REQUESTS: u64 = 1000;
/// Or this long a window.
pub const RULE_WINDOW: Duration = Duration::from_secs(600);
/// Seeds, by the rule.
pub const RULE_SEEDS: usize = 3;

/// Requests and seconds of each run; blocks of a run are added up.
fn run_sizes(rates: &[RateResult]) -> Vec<(u64, f64)> {
    let mut sizes = Vec::new();
    for rate in rates {
        let mut by_seed: BTreeMap<u64, (u64, f64)> = BTreeMap::new();
        for run in &rate.runs {
            let size = by_seed.entry(run.seed).or_default();
            *size = (size.0 + run.verdict.n_offered, size.1 + run.window_s);
        }
        sizes.extend(by_seed.into_values());
    }
    sizes
}

/// The requirements of the rule that a sweep does not meet, as a sentence. `n_requests`: those asked for of a run; `n_seeds`: seeds of
/// each rate, at the least.
pub(super) fn shorter(rates: &[RateResult], n_requests: u64, n_seeds: usize) -> Option<String> {
    // Windows of blocks add up to the whole but for what their lengths are rounded by.
    let is_short =
        |(n, seconds): &(u64, f64)| *n < RULE_REQUESTS && *seconds < RULE_WINDOW.as_secs_f64() - 1e-3;
    let short = run_sizes(rates).into_iter().filter(is_short).map(|(n, _)| n).min();
    if short.is_none() && n_seeds >= RULE_SEEDS {
        return None;
    }
    Some(format!(
        "shorter than the rule: {} requests in the shortest run, {n_seeds} seeds, where {RULE_REQUESTS} requests or {} s, and \
         {RULE_SEEDS} seeds are asked for",
        short.unwrap_or(n_requests),
        RULE_WINDOW.as_secs(),
    ))
}

/// Fewest seeds that a rate was run with.
pub(super) fn least_seeds(rates: &[RateResult]) -> usize {
    let n_seeds = |rate: &RateResult| rate.runs.iter().map(|run| run.seed).collect::<BTreeSet<_>>().len();
    rates.iter().map(n_seeds).min().unwrap_or(0)
}
