//! What the planner says.

use super::bound::{Bound, Means};
use super::budget::Budget;
use super::candidate::{Candidate, Settings, Shape};
use super::interval::Interval;
use super::search::Found;
use super::whatif::ratio;
use super::{Question, chart};
use serde::Serialize;

/// The answer.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The model.
    pub model: String,
    /// What was asked for.
    pub demand: String,
    /// What a request is, in the mean.
    pub means: Means,
    /// What was promised.
    pub slo: String,
    /// What there was.
    #[serde(serialize_with = "as_text")]
    pub budget: Budget,
    /// Whether to have encoders of their own.
    pub advice: Advice,
    /// Why.
    pub why: String,
    /// The cluster to run.
    pub best: Choice,
    /// The next one, of another shape.
    pub runner_up: Option<Choice>,
    /// Goodput of the best over that of the runner-up.
    pub margin: Option<f64>,
    /// What else was simulated, best first: name and goodput by the coarse search.
    pub others: Vec<(String, f64)>,
    /// What was not, since it cannot do as much as the best: name and bound.
    pub pruned: Vec<(String, f64)>,
    /// Other demands.
    pub sensitivity: Vec<WhatIf>,
}

/// Whether to have encoders of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// Yes.
    Disaggregate,
    /// No.
    DoNotDisaggregate,
    /// Nothing that fits keeps the promises.
    NothingHelps,
}

/// A cluster, and what it does.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// As the bench names it.
    pub topology: String,
    /// Its workers.
    pub shape: Shape,
    /// Encoders for each PD worker, where they are apart.
    pub encoders_per_pd: Option<f64>,
    /// Cores of a worker.
    pub threads_per_worker: usize,
    /// Its settings.
    pub settings: Settings,
    /// Requests a second that keep every promise.
    pub goodput: Interval,
    /// The same of each core.
    pub goodput_per_core: f64,
    /// What it could do if nobody ever waited.
    pub bound: Bound,
    /// Where it is full.
    pub bottleneck: Bottleneck,
    /// Command lines.
    pub commands: Vec<String>,
    /// For the Helm chart.
    pub values: String,
    #[serde(skip)]
    pub(super) found: Found,
}

/// Where a cluster is full.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bottleneck {
    /// The busiest pool.
    pub pool: String,
    /// Part of its cores' time that is used at the goodput.
    pub utilisation: f64,
    /// The part of that which is encoding.
    pub encoding: f64,
    /// Promises that break first above it.
    pub breaks: Vec<String>,
}

/// Another demand.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIf {
    /// What changes.
    pub question: String,
    /// What becomes of the plan.
    pub answer: String,
    /// Of the best cluster then, in requests a second.
    pub goodput: f64,
    /// Its workers.
    pub shape: Option<Shape>,
}

fn as_text<S: serde::Serializer>(budget: &Budget, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(budget)
}

impl Answer {
    /// Of finalists, best first.
    pub(super) fn new(
        question: &Question<'_>,
        means: &Means,
        finalists: Vec<Found>,
        ranked: &[Found],
        pruned: Vec<(Candidate, Bound)>,
    ) -> Self {
        let model = question.curves[0].model.clone();
        let first = decide(&finalists).and_then(|at| finalists.get(at)).or(ranked.first());
        let winner = first.cloned().unwrap_or_else(|| unreachable!("a budget with room has a candidate"));
        let rest = finalists.iter().filter(|f| f.candidate.shape != winner.candidate.shape);
        let runner_up = rest.max_by(|a, b| a.goodput.mean.total_cmp(&b.goodput.mean)).cloned();
        let (advice, why) = advise(means, &winner, runner_up.as_ref(), ranked);
        let margin = runner_up.as_ref().map(|r| winner.goodput.mean / r.goodput.mean.max(f64::MIN_POSITIVE));
        Self {
            demand: question.demand.name(),
            means: *means,
            slo: question.slo.to_string(),
            budget: question.budget,
            advice,
            why,
            runner_up: runner_up.map(|found| Choice::new(&model, found)),
            margin,
            others: ranked.iter().map(|f| (f.candidate.name(), f.rate)).collect(),
            pruned: pruned.into_iter().map(|(c, bound)| (c.name(), bound.rate)).collect(),
            sensitivity: Vec::new(),
            best: Choice::new(&model, winner),
            model,
        }
    }
}

/// Where the best is, of some that are sorted; but one with fewer parts, if it is not told apart from the best.
pub(super) fn decide(sorted: &[Found]) -> Option<usize> {
    let best = sorted.first()?;
    let simpler = |f: &Found| !f.candidate.shape.is_split() && !best.goodput.is_above(&f.goodput);
    let simpler = if best.candidate.shape.is_split() { sorted.iter().position(simpler) } else { None };
    Some(simpler.unwrap_or(0))
}

fn advise(means: &Means, winner: &Found, other: Option<&Found>, ranked: &[Found]) -> (Advice, String) {
    let rates = |f: &Found| format!("{} with {:.2} requests/s", f.candidate.name(), f.goodput.mean);
    if winner.goodput.mean == 0.0 {
        let shown = winner.broken.as_ref().or(winner.at.as_ref().map(|at| &at.verdict));
        let failed = shown.map_or(String::new(), |v| breaks(v).join("; "));
        return (
            Advice::NothingHelps,
            format!("no cluster of this budget keeps the promises at any rate: {failed}"),
        );
    }
    if winner.candidate.shape.is_split() {
        let simple = ranked.iter().find(|f| !f.candidate.shape.is_split()).or(other);
        let beside = simple.map_or(String::new(), |f| format!(", against {}", rates(f)));
        return (
            Advice::Disaggregate,
            format!("encoders of their own serve more: {}{beside}", rates(winner)),
        );
    }
    if means.items == 0.0 {
        return (
            Advice::DoNotDisaggregate,
            "there are no items, so encoders would have nothing to do".to_owned(),
        );
    }
    let split = other.filter(|f| f.candidate.shape.is_split());
    let split = split.or_else(|| ranked.iter().find(|f| f.candidate.shape.is_split()));
    let why = match split {
        Some(f) if f.goodput.mean >= winner.goodput.mean => {
            format!("encoders of their own gain nothing beyond the interval: {}, {}", rates(f), rates(winner))
        }
        Some(f) => format!("workers with both serve more: {}, against {}", rates(winner), rates(f)),
        None => "no cluster with encoders of their own can serve as much".to_owned(),
    };
    (Advice::DoNotDisaggregate, why)
}

fn breaks(verdict: &triptych_bench::judge::Verdict) -> Vec<String> {
    verdict.findings.iter().filter(|f| !f.passed).map(|f| format!("{} is {}", f.rule, f.found)).collect()
}

impl Choice {
    pub(super) fn new(model: &str, found: Found) -> Self {
        let Candidate { shape, settings, curves } = &found.candidate;
        let cores = found.candidate.n_workers() * curves.threads;
        Self {
            topology: shape.name(),
            shape: *shape,
            encoders_per_pd: ratio(*shape),
            threads_per_worker: curves.threads,
            settings: *settings,
            goodput: found.goodput,
            goodput_per_core: found.goodput.mean / cores.max(1) as f64,
            bound: found.bound,
            bottleneck: Bottleneck::of(&found),
            commands: chart::commands(model, &found.candidate),
            values: chart::values(model, &found.candidate),
            found,
        }
    }
}

impl Bottleneck {
    fn of(found: &Found) -> Self {
        let breaks = found.broken.as_ref().map(breaks).unwrap_or_default();
        let pools = found.at.as_ref().map_or(&[][..], |at| &at.pools);
        let busiest = pools.iter().max_by(|a, b| a.utilisation.total_cmp(&b.utilisation));
        let Some(pool) = busiest else { return Self { breaks, ..Self::default() } };
        let work = pool.encode_s + pool.step_s;
        let encoding = if work > 0.0 { pool.encode_s / work } else { 0.0 };
        Self { pool: pool.name.clone(), utilisation: pool.utilisation, encoding, breaks }
    }
}
