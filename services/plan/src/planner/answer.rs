//! The recommendation of a plan.

use super::bound::Bound;
use super::budget::Budget;
use super::candidate::{Candidate, Shape, WorkerSettings};
use super::chart;
use super::interval::Interval;
use super::means::Means;
use super::question::Question;
use super::search::SearchedCandidate;
use serde::Serialize;

/// The recommendation.
#[derive(Clone, Debug, Serialize)]
pub struct Recommendation {
    /// Model name.
    pub model: String,
    /// Name of the demand.
    pub demand: String,
    /// Mean request.
    pub means: Means,
    /// Latency limits.
    pub slo: String,
    /// Cores or workers.
    #[serde(serialize_with = "as_text")]
    pub budget: Budget,
    /// Advice on disaggregation.
    pub advice: Advice,
    /// Reason for the advice.
    pub why: String,
    /// The cluster to run.
    pub best: RecommendedCluster,
    /// The best cluster of another shape.
    pub runner_up: Option<RecommendedCluster>,
    /// Goodput of the best over that of the runner-up.
    pub margin: Option<f64>,
    /// All simulated clusters, best first: name and goodput by the coarse search.
    pub others: Vec<(String, f64)>,
    /// Clusters that were not simulated, since their bound is below the best: name and bound.
    pub pruned: Vec<(String, f64)>,
    /// Plans for other demands.
    pub sensitivity: Vec<WhatIf>,
}

/// Advice on disaggregated encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// Encoders as separate workers serve more.
    Disaggregate,
    /// Colocated workers serve as much or more.
    DoNotDisaggregate,
    /// No cluster of the budget meets the SLO.
    NothingHelps,
}

/// A cluster and its expected performance.
#[derive(Clone, Debug, Serialize)]
pub struct RecommendedCluster {
    /// The bench's name of the topology.
    pub topology: String,
    /// Its workers.
    pub shape: Shape,
    /// Encoders for each PD worker, if encoders are separate workers.
    pub encoders_per_pd: Option<f64>,
    /// Cores of a worker.
    pub threads_per_worker: usize,
    /// Its settings.
    pub settings: WorkerSettings,
    /// Goodput, in requests a second.
    pub goodput: Interval,
    /// Goodput of each core.
    pub goodput_per_core: f64,
    /// Upper bound.
    pub bound: Bound,
    /// The bottleneck at the goodput.
    pub bottleneck: Bottleneck,
    /// Command lines.
    pub commands: Vec<String>,
    /// Values of the Helm chart.
    pub values: String,
    #[serde(skip)]
    pub(super) found: SearchedCandidate,
}

/// The bottleneck of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bottleneck {
    /// The busiest pool.
    pub pool: String,
    /// Part of its cores' time that is used at the goodput.
    pub utilisation: f64,
    /// Share of encoding in that time.
    pub encoding: f64,
    /// SLO rules that break first above the goodput.
    pub breaks: Vec<String>,
}

/// The plan for another demand.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIf {
    /// The change of the demand.
    pub question: String,
    /// Its effect on the plan.
    pub answer: String,
    /// Goodput of the best cluster for it, in requests a second.
    pub goodput: f64,
    /// Its workers.
    pub shape: Option<Shape>,
}

fn as_text<S: serde::Serializer>(budget: &Budget, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(budget)
}

impl Recommendation {
    /// A recommendation from finalists, best first.
    pub(super) fn new(
        question: &Question<'_>,
        means: &Means,
        finalists: Vec<SearchedCandidate>,
        ranked: &[SearchedCandidate],
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
            runner_up: runner_up.map(|found| RecommendedCluster::new(&model, found)),
            margin,
            others: ranked.iter().map(|f| (f.candidate.name(), f.rate)).collect(),
            pruned: pruned.into_iter().map(|(c, bound)| (c.name(), bound.rate)).collect(),
            sensitivity: Vec::new(),
            best: RecommendedCluster::new(&model, winner),
            model,
        }
    }
}

/// Index of the recommended cluster in a sorted list: a colocated one, unless a disaggregated one is better beyond the
/// interval.
pub(super) fn decide(sorted: &[SearchedCandidate]) -> Option<usize> {
    let best = sorted.first()?;
    let simpler = |f: &SearchedCandidate| !f.candidate.shape.is_split() && !best.goodput.is_above(&f.goodput);
    let simpler = if best.candidate.shape.is_split() { sorted.iter().position(simpler) } else { None };
    Some(simpler.unwrap_or(0))
}

fn advise(
    means: &Means,
    winner: &SearchedCandidate,
    other: Option<&SearchedCandidate>,
    ranked: &[SearchedCandidate],
) -> (Advice, String) {
    let rates =
        |f: &SearchedCandidate| format!("{} with {:.2} requests/s", f.candidate.name(), f.goodput.mean);
    if winner.goodput.mean == 0.0 {
        let shown = winner.broken.as_ref().or(winner.at.as_ref().map(|at| &at.verdict));
        let failed = shown.map_or(String::new(), |v| breaks(v).join("; "));
        return (
            Advice::NothingHelps,
            format!("no cluster of this budget meets the SLO at any rate: {failed}"),
        );
    }
    if winner.candidate.shape.is_split() {
        let simple = ranked.iter().find(|f| !f.candidate.shape.is_split()).or(other);
        let beside = simple.map_or(String::new(), |f| format!(", against {}", rates(f)));
        return (
            Advice::Disaggregate,
            format!("disaggregated encoders serve more: {}{beside}", rates(winner)),
        );
    }
    if means.items == 0.0 {
        return (Advice::DoNotDisaggregate, "there are no items, so encoders would be idle".to_owned());
    }
    let split = other.filter(|f| f.candidate.shape.is_split());
    let split = split.or_else(|| ranked.iter().find(|f| f.candidate.shape.is_split()));
    let why = match split {
        Some(f) if f.goodput.mean >= winner.goodput.mean => {
            format!(
                "disaggregated encoders gain nothing beyond the interval: {}, {}",
                rates(f),
                rates(winner)
            )
        }
        Some(f) => format!("colocated workers serve more: {}, against {}", rates(winner), rates(f)),
        None => "no disaggregated cluster can serve as much".to_owned(),
    };
    (Advice::DoNotDisaggregate, why)
}

fn breaks(verdict: &triptych_bench::judge::RunVerdict) -> Vec<String> {
    verdict.findings.iter().filter(|f| !f.passed).map(|f| format!("{} is {}", f.rule, f.found)).collect()
}

impl RecommendedCluster {
    pub(super) fn new(model: &str, found: SearchedCandidate) -> Self {
        let Candidate { shape, settings, curves } = &found.candidate;
        let cores = found.candidate.n_workers() * curves.threads;
        Self {
            topology: shape.name(),
            shape: *shape,
            encoders_per_pd: shape.encoders_per_pd(),
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
    fn of(found: &SearchedCandidate) -> Self {
        let breaks = found.broken.as_ref().map(breaks).unwrap_or_default();
        let pools = found.at.as_ref().map_or(&[][..], |at| &at.pools);
        let busiest = pools.iter().max_by(|a, b| a.utilisation.total_cmp(&b.utilisation));
        let Some(pool) = busiest else { return Self { breaks, ..Self::default() } };
        let work = pool.encode_s + pool.step_s;
        let encoding = if work > 0.0 { pool.encode_s / work } else { 0.0 };
        Self { pool: pool.name.clone(), utilisation: pool.utilisation, encoding, breaks }
    }
}
