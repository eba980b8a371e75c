//! The highest rate at which a simulated cluster keeps the promises.
//!
//! Rates are tried as the bench tries them, from the bound downwards, and judged by the bench's judge, over every offered
//! request.

use super::bound::Bound;
use super::candidate::Candidate;
use super::interval::Interval;
use super::{PlanError, Question};
use crate::simulator::result::PoolUse;
use crate::simulator::simulate;
use std::time::Duration;
use triptych_bench::judge::{Run, Verdict, Window, judge_runs};
use triptych_bench::search::{self as rates, SearchPlan};

/// How hard to look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Requests of a simulated run.
    pub requests: usize,
    /// Fewer, where those would take longer than this to be offered.
    pub longest: Duration,
    /// Seeds of the finalists.
    pub seeds: u64,
    /// Ratio, less one, of two rates that are not told apart.
    pub tolerance: f64,
    /// Whether settings are tuned.
    pub tunes: bool,
    /// Whether other demands are asked for too.
    pub what_if: bool,
}

impl Effort {
    /// Enough for an answer with a narrow interval.
    pub const FULL: Self = Self {
        requests: 1200,
        longest: Duration::MAX,
        seeds: 5,
        tolerance: 0.02,
        tunes: true,
        what_if: true,
    };
    /// Seconds rather than minutes.
    pub const QUICK: Self =
        Self { requests: 200, longest: Duration::MAX, seeds: 3, tolerance: 0.1, tunes: false, what_if: true };

    /// Requests of a run at a rate.
    fn requests_at(self, rate: f64) -> usize {
        let offered = (rate * self.longest.as_secs_f64()).ceil();
        // Beyond what a count can hold it is the other bound that counts.
        self.requests.min(offered as usize).max(1)
    }

    /// For telling candidates apart.
    pub fn coarse(self) -> Self {
        Self { requests: (self.requests / 2).max(100), tolerance: self.tolerance * 2.0, ..self }
    }
}

/// What the search found of a candidate.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which.
    pub candidate: Candidate,
    /// What it could do at most.
    pub bound: Bound,
    /// The highest rate that passed, in requests a second; 0: none did.
    pub rate: f64,
    /// Over the seeds.
    pub goodput: Interval,
    /// Of each seed.
    pub by_seed: Vec<f64>,
    /// To which part each of them is known.
    pub tolerance: f64,
    /// The run at that rate, or else at the lowest.
    pub at: Option<Evidence>,
    /// What broke first above it.
    pub broken: Option<Verdict>,
}

/// A run, and what the judge said.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Requests a second.
    pub rate: f64,
    /// How busy each pool was.
    pub pools: Vec<PoolUse>,
    /// Whether that was good enough.
    pub verdict: Verdict,
}

/// A rate so far below the bound is none.
const LOWEST: f64 = 1.0 / 512.0;
/// Where a search begins, as a part of the highest rate.
const FIRST: f64 = 0.7;
/// Rates of a search.
const MOST_RATES: u32 = 24;
/// The first part of a run is warm-up.
const WARM_UP: f64 = 0.1;
/// A seed's own search looks so far above and below what all of them found.
const NEAR: f64 = 2.5;

/// Searches with one seed.
pub fn goodput(
    question: &Question<'_>,
    candidate: Candidate,
    bound: Bound,
    effort: Effort,
) -> Result<Found, PlanError> {
    let (range, first) = everywhere(&bound);
    let searched = Search { question, candidate: &candidate, effort, seed: 0 }.between(range, first)?;
    let Searched { rate, at, broken } = searched;
    Ok(Found {
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
pub fn settle(question: &Question<'_>, found: Found) -> Result<Found, PlanError> {
    let effort = question.effort;
    let (range, first) = if found.rate > 0.0 {
        ((found.rate / NEAR, (found.rate * NEAR).min(found.bound.rate)), found.rate)
    } else {
        everywhere(&found.bound)
    };
    let mut by_seed = Vec::new();
    let (mut at, mut broken) = (found.at.clone(), found.broken.clone());
    for seed in 1..=effort.seeds.max(1) {
        let searched =
            Search { question, candidate: &found.candidate, effort, seed }.between(range, first)?;
        by_seed.push(searched.rate);
        if seed == 1 {
            (at, broken) = (searched.at.or(at), searched.broken.or(broken));
        }
    }
    let goodput = Interval::of(&by_seed, effort.tolerance);
    Ok(Found { rate: goodput.mean, goodput, by_seed, tolerance: effort.tolerance, at, broken, ..found })
}

/// All rates that a bound allows, and the first to try.
fn everywhere(bound: &Bound) -> ((f64, f64), f64) {
    let top = bound.rate.min(f64::from(u16::MAX));
    ((top * LOWEST, top), top * FIRST)
}

/// Makes another seed of one that a search has.
const OTHER_SEED: u64 = 1 << 32;

/// One run at a rate.
pub fn run(
    question: &Question<'_>,
    candidate: &Candidate,
    (rate, seed, n): (f64, u64, usize),
) -> Result<Evidence, PlanError> {
    let spec = candidate.spec(question);
    let offered = question.demand.requests(rate, seed).take(n);
    let simulation = simulate(&spec, offered, seed)
        .map_err(|source| PlanError::Spec { name: candidate.name(), source })?;
    let outcomes = &simulation.outcomes;
    let last = outcomes.iter().map(|o| o.due).max().unwrap_or_default();
    let window = Window { from: last.mul_f64(WARM_UP), to: last + Duration::from_nanos(1) };
    let verdict = judge_runs(&[Run { outcomes, window }], &question.slo, &question.rule);
    Ok(Evidence { rate, pools: simulation.pools, verdict })
}

struct Search<'a> {
    question: &'a Question<'a>,
    candidate: &'a Candidate,
    effort: Effort,
    seed: u64,
}

struct Searched {
    rate: f64,
    at: Option<Evidence>,
    broken: Option<Verdict>,
}

impl Search<'_> {
    /// One run at a rate. One in some hundred runs rises by chance, a search is many runs, and a low rate that fails ends
    /// it: where nothing else is broken a second run has to rise too.
    fn tried(&self, rate: f64) -> Result<Evidence, PlanError> {
        let n = self.effort.requests_at(rate);
        let first = run(self.question, self.candidate, (rate, self.seed, n))?;
        if !first.verdict.only_rises() {
            return Ok(first);
        }
        let second = run(self.question, self.candidate, (rate, self.seed ^ OTHER_SEED, n))?;
        Ok(if second.verdict.passed { second } else { first })
    }

    /// Between two rates, of which the upper one is known to fail, from a first one.
    fn between(&self, (low, high): (f64, f64), first: f64) -> Result<Searched, PlanError> {
        let resolution = self.effort.tolerance;
        let plan = SearchPlan {
            lowest: low,
            highest: high,
            max_rates: MOST_RATES,
            ..SearchPlan::from(first, resolution)
        };
        let mut search = rates::Search::new(plan);
        let (mut best, mut lowest): (Option<Evidence>, Option<Evidence>) = (None, None);
        let mut next = Some(first);
        while let Some(rate) = next {
            let evidence = self.tried(rate)?;
            search.record(rate, evidence.verdict.passed);
            if !evidence.verdict.passed {
                lowest = Some(evidence);
            } else if search.bracket().0 == Some(rate) {
                best = Some(evidence);
            }
            next = match search.bracket() {
                // Nobody passes the upper end, so it need not be tried.
                (Some(passed), None) => (high / passed > 1.0 + resolution).then(|| (passed * high).sqrt()),
                _ => search.next_rate(),
            };
        }
        let rate = best.as_ref().map_or(0.0, |e| e.rate);
        let broken = lowest.as_ref().map(|e| e.verdict.clone());
        Ok(Searched { rate, at: best.or(lowest), broken })
    }
}
