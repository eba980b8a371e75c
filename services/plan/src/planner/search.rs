//! The highest rate at which a simulated cluster meets the SLO.
//!
//! Rates are searched as the bench searches them, from the bound downwards, and judged by the bench's judge, over every offered
//! request. As there, a rate is what was offered in the judged window.

use super::bound::Bound;
use super::candidate::Candidate;
use super::effort::Effort;
use super::interval::Interval;
use super::question::{PlanError, Question};
use super::run_length::{N_ALONE, RATE_ALONE, RunLength, answer_s};
use crate::simulator::result::{PoolUse, Simulation};
use crate::simulator::simulate;
use rayon::prelude::*;
use std::time::Duration;
use triptych_bench::judge::{JudgedWindow, Run, RunVerdict, judge_runs, offered_rate};
use triptych_bench::search::{self as rates, SearchPlan, Trial};

/// Result of a candidate's search.
#[derive(Clone, Debug)]
pub struct SearchedCandidate {
    /// The cluster.
    pub candidate: Candidate,
    /// Upper bound.
    pub bound: Bound,
    /// The highest rate that passed, in requests a second; 0: none did.
    pub rate: f64,
    /// Goodput over all seeds.
    pub goodput: Interval,
    /// Goodput of each seed.
    pub by_seed: Vec<f64>,
    /// Relative resolution of each of them.
    pub tolerance: f64,
    /// The run at that rate, or else at the lowest rate tried.
    pub at: Option<Evidence>,
    /// RunVerdict on the lowest rate that failed.
    pub broken: Option<RunVerdict>,
}

/// A simulated run and its verdict.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Requests a second that were asked for.
    pub asked: f64,
    /// Requests a second that were offered in the judged window.
    pub rate: f64,
    /// Utilisation of each pool.
    pub pools: Vec<PoolUse>,
    /// The verdict.
    pub verdict: RunVerdict,
}

/// Lowest rate that is tried, as a part of the bound.
const LOWEST: f64 = 1.0 / 512.0;
/// First rate of a search, as a part of the highest.
const FIRST: f64 = 0.7;
/// Most rates of a search.
const MOST_RATES: u32 = 24;
/// Factor above and below the first result within which other seeds are searched.
const NEAR: f64 = 2.5;

/// Searches with one seed.
pub fn goodput(
    question: &Question<'_>,
    candidate: Candidate,
    bound: Bound,
    effort: Effort,
) -> Result<SearchedCandidate, PlanError> {
    let (range, first) = full_range(&bound);
    let searched = RateSearch { question, candidate: &candidate, effort, seed: 0 }.between(range, first)?;
    let Searched { rate, at, broken } = searched;
    Ok(SearchedCandidate {
        goodput: Interval::of(&[rate], effort.tolerance),
        by_seed: vec![rate],
        tolerance: effort.tolerance,
        candidate,
        bound,
        rate,
        at,
        broken,
    })
}

/// Searches again with every seed: near what was found, or everywhere if the one seed of before passed nowhere, which may
/// be one bad moment of it.
pub fn settle(question: &Question<'_>, found: SearchedCandidate) -> Result<SearchedCandidate, PlanError> {
    settle_with(question, found, &mut |_| {})
}

/// As [`settle`]; `began` is called with each seed.
pub(super) fn settle_with(
    question: &Question<'_>,
    found: SearchedCandidate,
    began: &mut dyn FnMut(u64),
) -> Result<SearchedCandidate, PlanError> {
    let effort = question.effort;
    let (range, first) = if found.rate > 0.0 {
        ((found.rate / NEAR, (found.rate * NEAR).min(found.bound.rate)), found.rate)
    } else {
        full_range(&found.bound)
    };
    let seeds: Vec<u64> = (0..effort.seeds.max(1)).map(|nth| effort.first_seed.saturating_add(nth)).collect();
    let search =
        |seed| RateSearch { question, candidate: &found.candidate, effort, seed }.between(range, first);
    let mut searched = Vec::new();
    // As many at a time as there are threads, so that the progress reported is right.
    for some in seeds.chunks(rayon::current_num_threads().max(1)) {
        some.iter().for_each(|seed| began(*seed));
        let of_some = some.par_iter().map(|seed| search(*seed));
        searched.extend(of_some.collect::<Result<Vec<_>, _>>()?);
    }
    let by_seed: Vec<f64> = searched.iter().map(|searched| searched.rate).collect();
    let first = searched.into_iter().next();
    let (at, broken) = first.map_or((None, None), |first| (first.at, first.broken));
    let (at, broken) = (at.or(found.at), broken.or(found.broken));
    let goodput = Interval::of(&by_seed, effort.tolerance);
    Ok(SearchedCandidate {
        rate: goodput.mean,
        goodput,
        by_seed,
        tolerance: effort.tolerance,
        at,
        broken,
        ..found
    })
}

/// The range of rates that a bound allows, and the first rate to try.
fn full_range(bound: &Bound) -> ((f64, f64), f64) {
    let top = bound.rate.min(f64::from(u16::MAX));
    ((top * LOWEST, top), top * FIRST)
}

/// Makes another seed of one that a search has.
const OTHER_SEED: u64 = 1 << 32;

/// Parameters of a simulated run.
#[derive(Clone, Copy, Debug)]
pub struct RunSpec {
    /// Requests a second that are asked for.
    pub rate: f64,
    /// Seed of demand and simulation.
    pub seed: u64,
    /// Requests of the run.
    pub n_requests: usize,
}

/// One run at a rate, longer than was asked for where requests take long.
pub fn run(question: &Question<'_>, candidate: &Candidate, spec: RunSpec) -> Result<Evidence, PlanError> {
    let alone = simulated(question, candidate, RunSpec { rate: RATE_ALONE, n_requests: N_ALONE, ..spec })?;
    let length = RunLength::of(spec.n_requests, spec.rate, answer_s(&alone.outcomes));
    judged(question, candidate, spec, length)
}

/// One run as long as was asked for. Where requests take long its verdict is one of a cluster that fills up: it tells clusters
/// apart that are all too small, not one that is large enough.
pub fn run_as_asked(
    question: &Question<'_>,
    candidate: &Candidate,
    spec: RunSpec,
) -> Result<Evidence, PlanError> {
    judged(question, candidate, spec, RunLength::of(spec.n_requests, spec.rate, 0.0))
}

fn simulated(
    question: &Question<'_>,
    candidate: &Candidate,
    RunSpec { rate, seed, n_requests }: RunSpec,
) -> Result<Simulation, PlanError> {
    let offered = question.demand.requests(rate, seed).take(n_requests);
    simulate(&candidate.spec(question), offered, seed)
        .map_err(|source| PlanError::Spec { name: candidate.name(), source })
}

fn judged(
    question: &Question<'_>,
    candidate: &Candidate,
    spec: RunSpec,
    length: RunLength,
) -> Result<Evidence, PlanError> {
    let rate = spec.rate;
    let simulation = simulated(question, candidate, RunSpec { n_requests: length.n_requests, ..spec })?;
    let outcomes = &simulation.outcomes;
    let last = outcomes.iter().map(|o| o.due).max().unwrap_or_default();
    let window = JudgedWindow { from: last.mul_f64(length.warm_up), to: last + Duration::from_nanos(1) };
    let runs = [Run { outcomes, window }];
    let verdict = judge_runs(&runs, &question.slo, &question.rule);
    let offered = offered_rate(&runs).unwrap_or(rate);
    Ok(Evidence { asked: rate, rate: offered, pools: simulation.pools, verdict })
}

struct RateSearch<'a> {
    question: &'a Question<'a>,
    candidate: &'a Candidate,
    effort: Effort,
    seed: u64,
}

struct Searched {
    rate: f64,
    at: Option<Evidence>,
    broken: Option<RunVerdict>,
}

impl RateSearch<'_> {
    /// One run at a rate. One in some hundred runs rises by chance, a search is many runs, and a low rate that fails ends
    /// it: where nothing else is broken a second run has to rise too.
    fn tried(&self, rate: f64) -> Result<Evidence, PlanError> {
        let n_requests = self.effort.requests_at(rate);
        let first = run(self.question, self.candidate, RunSpec { rate, seed: self.seed, n_requests })?;
        if !first.verdict.only_rises() {
            return Ok(first);
        }
        let second =
            run(self.question, self.candidate, RunSpec { rate, seed: self.seed ^ OTHER_SEED, n_requests })?;
        Ok(if second.verdict.passed { second } else { first })
    }

    /// Searches between two rates, of which the upper one is known to fail, from a first one.
    fn between(&self, (low, high): (f64, f64), first: f64) -> Result<Searched, PlanError> {
        let resolution = self.effort.tolerance;
        let plan = SearchPlan {
            lowest: low,
            highest: high,
            max_rates: MOST_RATES,
            ..SearchPlan::from(first, resolution)
        };
        let mut search = rates::Search::new(plan);
        let (mut passed, mut lowest): (Vec<Evidence>, Option<Evidence>) = (Vec::new(), None);
        let mut next = Some(first);
        while let Some(asked) = next {
            let evidence = self.tried(asked)?;
            search.record(Trial { asked, offered: evidence.rate, passed: evidence.verdict.passed });
            if evidence.verdict.passed {
                passed.push(evidence);
            } else if lowest.as_ref().is_none_or(|lowest| evidence.rate < lowest.rate) {
                lowest = Some(evidence);
            }
            next = search.next_rate_below(high);
        }
        let best = passed.into_iter().find(|evidence| Some(evidence.rate) == search.bracket().0);
        // What a short run offered above the bound is chance.
        let rate = best.as_ref().map_or(0.0, |evidence| evidence.rate.min(high));
        let broken = lowest.as_ref().map(|evidence| evidence.verdict.clone());
        Ok(Searched { rate, at: best.or(lowest), broken })
    }
}
