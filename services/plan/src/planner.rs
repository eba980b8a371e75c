//! The planner: candidates are enumerated, bounded, simulated and compared.
//!
//! Candidates that cannot win are pruned by an upper bound of their busiest stage ([`bound`]); the others are
//! simulated, and the highest rate at which each meets the SLO is searched with the judge of the bench
//! ([`search`]). The best few, and the best of each kind, are tuned and searched again with several seeds, and an interval is
//! drawn around each: these numbers decide, and are what a plan reports. If disaggregated encoders do not win by more than the interval, the recommendation is colocated workers: fewer parts. Of these, elastic
//! roles are recommended where fixed ones do not win by more than the interval.

mod answer;
pub mod bound;
pub mod budget;
pub mod candidate;
pub mod chart;
pub mod demand;
mod effort;
mod enumerate;
mod explore;
mod finalists;
pub mod fleets;
pub mod inputs;
pub mod interval;
mod markdown;
pub mod means;
pub mod model_error;
mod progress;
mod question;
mod run_length;
pub mod search;
pub mod towers;
mod tuning;
mod whatif;

pub use answer::{Advice, Bottleneck, Recommendation, RecommendedCluster, SimulatedCluster, WhatIf};
pub use budget::Budget;
pub use candidate::{Candidate, Shape, WorkerSettings};
pub use demand::{Demand, Named, Reused};
pub use effort::Effort;
pub use interval::Interval;
pub use markdown::markdown;
pub use model_error::{CurveKind, ModelError, Residual, Residuals};
pub use progress::{Phase, Progress, Step};
pub use question::{PlanError, Question};
pub use search::SearchedCandidate;
pub use towers::TowerWorkers;

use explore::explore;
use means::Means;

/// Recommends a cluster.
///
/// # Errors
/// [`PlanError`]. A demand whose SLO no cluster meets is an answer, not an error.
pub fn plan(question: &Question<'_>, progress: Progress<'_>) -> Result<Recommendation, PlanError> {
    question.check()?;
    let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
    let (ranked, pruned) = explore(question, &means, progress)?;
    let finalists = finalists::settle_all(question, &ranked, progress)?;
    let mut answer = Recommendation::new(question, &means, finalists, ranked, pruned);
    answer.sensitivity = whatif::all(question, &answer, progress)?;
    Ok(answer)
}

/// Expected goodput of one cluster, by a search with one seed.
///
/// # Errors
/// [`PlanError`].
pub fn expected(question: &Question<'_>, candidate: Candidate) -> Result<SearchedCandidate, PlanError> {
    question.check()?;
    let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
    let bound = bound::of(&candidate, &means);
    search::goodput(question, candidate, bound, question.effort.coarse())
}

/// Expected goodput of each cluster as it is set, with every seed: first the one that a plan recommends, then the others,
/// best first.
///
/// # Errors
/// [`PlanError`].
pub fn choose(
    question: &Question<'_>,
    candidates: Vec<Candidate>,
) -> Result<Vec<SearchedCandidate>, PlanError> {
    question.check()?;
    let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
    let settled = candidates.into_iter().map(|candidate| {
        let bound = bound::of(&candidate, &means);
        search::settle(question, search::goodput(question, candidate, bound, question.effort.coarse())?)
    });
    let mut found = settled.collect::<Result<Vec<_>, _>>()?;
    found.sort_by(|a, b| b.goodput.mean.total_cmp(&a.goodput.mean));
    if let Some(chosen) = answer::decide(&found) {
        found[..=chosen].rotate_right(1);
    }
    Ok(found)
}
