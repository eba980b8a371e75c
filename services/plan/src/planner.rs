//! How many workers of which kind, and with which settings: enumerated, bounded, simulated, compared.
//!
//! Candidates that cannot win are left out by a bound on what their busiest stage can do ([`bound`]); the others are
//! simulated, and the highest rate at which each keeps the promises is searched with the judge of the bench
//! ([`search`]). The best few are tuned and searched again with several seeds, and an interval is drawn around each.
//! Where encoders of their own do not win by more than the interval, the answer is not to have them: fewer parts.

pub mod answer;
pub mod bound;
pub mod budget;
pub mod candidate;
pub mod chart;
pub mod demand;
pub mod fleets;
pub mod interval;
mod markdown;
pub mod search;
mod tuning;
mod whatif;

pub use answer::{Advice, Answer, Bottleneck, Choice, WhatIf};
pub use budget::Budget;
pub use candidate::{Candidate, Settings, Shape};
pub use demand::{Demand, Named, Reused};
pub use interval::Interval;
pub use markdown::markdown;
pub use search::{Effort, Found};

use crate::curves::CostCurves;
use crate::simulator::SpecError;
use crate::simulator::spec::{FrontCores, PromptSpec};
use bound::{Bound, Means};
use std::sync::Arc;
use thiserror::Error;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;

/// What is asked.
pub struct Question<'a> {
    /// What will be offered.
    pub demand: &'a dyn Demand,
    /// What is promised.
    pub slo: Slo,
    /// When a run keeps the promises.
    pub rule: Rule,
    /// What a worker costs, one for each number of threads that a worker may have.
    pub curves: Vec<Arc<CostCurves>>,
    /// What there is.
    pub budget: Budget,
    /// Whose cores proxy, store and clients use.
    pub front: FrontCores,
    /// How the model's prompts are laid out.
    pub prompt: PromptSpec,
    /// How hard to look.
    pub effort: Effort,
}

/// Why there is no plan.
#[derive(Debug, Error)]
pub enum PlanError {
    /// Nothing fits.
    #[error(
        "a budget of {budget} has no room for a worker of {threads} threads, the fewest that were measured"
    )]
    Budget {
        /// As asked.
        budget: Budget,
        /// Of the smallest worker.
        threads: usize,
    },
    /// There is nothing to plan by.
    #[error("no curves are given; measure them with `triptych profile`")]
    NoCurves,
    /// Curves of two models.
    #[error("curves of {first} and of {second}; a plan is for one model")]
    Models {
        /// Of the first file.
        first: String,
        /// Of another.
        second: String,
    },
    /// The demand offers nothing.
    #[error("the workload offers no request")]
    Empty,
    /// A cluster that the simulator does not take.
    #[error("cannot simulate {name}: {source}")]
    Spec {
        /// The candidate.
        name: String,
        /// Why.
        source: SpecError,
    },
}

/// Candidates that are tuned and searched with every seed.
const FINALISTS: usize = 3;

/// Told how many of how many candidates are done.
pub type Progress<'a> = &'a dyn Fn(usize, usize, &str);

/// Finds the best cluster.
///
/// # Errors
/// [`PlanError`]. A demand whose promises no cluster keeps is an answer, not an error.
pub fn plan(question: &Question<'_>, progress: Progress<'_>) -> Result<Answer, PlanError> {
    question.check()?;
    let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
    let (ranked, pruned) = explore(question, &means, progress)?;
    let n_finalists = ranked.len().min(FINALISTS);
    let mut finalists = Vec::new();
    for (i, found) in ranked.iter().take(n_finalists).enumerate() {
        progress(i, n_finalists, &found.candidate.name());
        let tuned = tuning::tune(question, found.clone())?;
        finalists.push(search::settle(question, tuned)?);
    }
    progress(n_finalists, n_finalists, "what if");
    finalists.sort_by(|a, b| b.goodput.mean.total_cmp(&a.goodput.mean));
    let mut answer = Answer::new(question, &means, finalists, &ranked, pruned);
    answer.sensitivity = whatif::all(question, &answer)?;
    Ok(answer)
}

/// What one cluster is expected to serve, by a search with one seed.
///
/// # Errors
/// [`PlanError`].
pub fn expected(question: &Question<'_>, candidate: Candidate) -> Result<Found, PlanError> {
    question.check()?;
    let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
    let bound = bound::of(&candidate, &means);
    search::goodput(question, candidate, bound, question.effort.coarse())
}

/// What each of some clusters is expected to serve, as it is set, with every seed: that which a plan takes of them first,
/// the others after it, best first.
///
/// # Errors
/// [`PlanError`].
pub fn choose(question: &Question<'_>, candidates: Vec<Candidate>) -> Result<Vec<Found>, PlanError> {
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

/// A candidate, and what it cannot pass.
pub(crate) type Bounded = (Candidate, Bound);

/// Every candidate that is not ruled out, best first, by a search with one seed; and those that are, with their bounds.
pub(crate) fn explore(
    question: &Question<'_>,
    means: &Means,
    progress: Progress<'_>,
) -> Result<(Vec<Found>, Vec<Bounded>), PlanError> {
    let mut candidates: Vec<Bounded> = candidate::all(question, means)
        .into_iter()
        .map(|candidate| {
            let bound = bound::of(&candidate, means);
            (candidate, bound)
        })
        .collect();
    candidates.sort_by(|a, b| b.1.rate.total_cmp(&a.1.rate));
    let n = candidates.len();
    let (mut found, mut pruned): (Vec<Found>, Vec<_>) = Default::default();
    for (i, (candidate, bound)) in candidates.into_iter().enumerate() {
        progress(i, n, &candidate.name());
        let best = found.iter().map(|f: &Found| f.rate).fold(0.0, f64::max);
        // The bound is what stages could do without ever waiting: nobody reaches it.
        if bound.rate <= best {
            pruned.push((candidate, bound));
            continue;
        }
        found.push(search::goodput(question, candidate, bound, question.effort.coarse())?);
    }
    found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
    Ok((found, pruned))
}

impl Question<'_> {
    fn check(&self) -> Result<(), PlanError> {
        let first = self.curves.first().ok_or(PlanError::NoCurves)?;
        if let Some(other) = self.curves.iter().find(|c| c.model != first.model) {
            return Err(PlanError::Models { first: first.model.clone(), second: other.model.clone() });
        }
        let threads = self.curves.iter().map(|c| c.threads).min().unwrap_or(1);
        if self.curves.iter().all(|c| self.budget.workers(c.threads) == 0) {
            return Err(PlanError::Budget { budget: self.budget, threads });
        }
        Ok(())
    }
}
