//! The recommendation of a plan.

use super::bound::Bound;
use super::budget::Budget;
use super::candidate::{Candidate, Shape, WorkerSettings};
use super::chart;
use super::finalists::Finalist;
use super::interval::Interval;
use super::means::Means;
use super::model_error::ModelError;
use super::question::Question;
use super::search::SearchedCandidate;
use serde::Serialize;
use triptych_proxy::Roles;

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
    /// All simulated clusters, best first: those that were settled, then the others.
    pub simulated: Vec<SimulatedCluster>,
    /// Seeds of each goodput; a first search has one.
    pub seeds: u64,
    /// The model's own error.
    pub error: ModelError,
    /// Clusters that were not simulated, since their bound is below the best: name and bound.
    pub pruned: Vec<(String, f64)>,
    /// Plans for other demands.
    pub sensitivity: Vec<WhatIf>,
}

/// A simulated cluster.
#[derive(Clone, Debug, Serialize)]
pub struct SimulatedCluster {
    /// Its name.
    pub name: String,
    /// True of the recommended one.
    pub is_best: bool,
    /// Goodput over all seeds, which decides; `None`: the first search left it behind.
    pub goodput: Option<Interval>,
    /// Goodput by the first search: one seed, shorter runs, default settings.
    pub first_search: f64,
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
    /// Goodput, in requests a second, with the chance in arrivals and lengths.
    pub goodput: Interval,
    /// The same with the model's own error: where 95 of 100 measurements lie.
    pub measurable: Interval,
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
    /// A recommendation from finalists, best first, and the clusters of the first search.
    pub(super) fn new(
        question: &Question<'_>,
        means: &Means,
        finalists: Vec<Finalist>,
        ranked: Vec<SearchedCandidate>,
        pruned: Vec<(Candidate, Bound)>,
    ) -> Self {
        let model = question.curves[0].model.clone();
        let settled: Vec<SearchedCandidate> = finalists.iter().map(|f| f.found.clone()).collect();
        let best_idx = decide(&settled);
        let first = best_idx.and_then(|at| settled.get(at)).or(ranked.first());
        let winner = first.cloned().unwrap_or_else(|| unreachable!("a budget with room has a candidate"));
        let rest = settled.iter().filter(|f| f.candidate.shape != winner.candidate.shape);
        let runner_up = rest.max_by(|a, b| a.goodput.mean.total_cmp(&b.goodput.mean)).cloned();
        let (advice, why) = advise(means, &winner, &settled, &ranked);
        let margin = runner_up.as_ref().map(|r| winner.goodput.mean / r.goodput.mean.max(f64::MIN_POSITIVE));
        Self {
            demand: question.demand.name(),
            means: *means,
            slo: question.slo.to_string(),
            budget: question.budget,
            advice,
            why,
            runner_up: runner_up.map(|found| RecommendedCluster::new(question, found)),
            margin,
            simulated: simulated(&finalists, best_idx, &ranked),
            seeds: question.effort.seeds.max(1),
            pruned: pruned.into_iter().map(|(c, bound)| (c.name(), bound.rate)).collect(),
            sensitivity: Vec::new(),
            best: RecommendedCluster::new(question, winner),
            error: question.error,
            model,
        }
    }
}

/// The table of a plan: finalists by what decides, then the others by the first search.
fn simulated(
    finalists: &[Finalist],
    best_idx: Option<usize>,
    ranked: &[SearchedCandidate],
) -> Vec<SimulatedCluster> {
    let settled = finalists.iter().enumerate().map(|(i, finalist)| SimulatedCluster {
        name: finalist.found.candidate.name(),
        is_best: Some(i) == best_idx,
        goodput: Some(finalist.found.goodput),
        first_search: ranked[finalist.ranked_idx].rate,
    });
    let is_settled = |i: usize| finalists.iter().any(|finalist| finalist.ranked_idx == i);
    let others =
        ranked.iter().enumerate().filter(|(i, _)| !is_settled(*i)).map(|(_, found)| SimulatedCluster {
            name: found.candidate.name(),
            is_best: false,
            goodput: None,
            first_search: found.rate,
        });
    settled.chain(others).collect()
}

/// Index of the recommended cluster in a sorted list: a colocated one, unless a disaggregated one is better beyond the
/// interval; of those one whose encoder workers have all towers, unless one with workers for each is. Of clusters of equally
/// many kinds that are level within the interval one with elastic roles: it is as simple, and follows a mix that changes.
pub(super) fn decide(sorted: &[SearchedCandidate]) -> Option<usize> {
    let best = sorted.first()?;
    let is_as_good = |f: &SearchedCandidate| !best.goodput.is_above(&f.goodput);
    // Of equals the first, which is the best.
    let as_good = sorted.iter().enumerate().filter(|(_, f)| is_as_good(f));
    let is_fixed = |f: &SearchedCandidate| f.candidate.shape.roles() == Roles::Fixed;
    let simplest = as_good.min_by_key(|(_, f)| (f.candidate.shape.n_kinds(), is_fixed(f)));
    Some(simplest.map_or(0, |(i, _)| i))
}

/// The advice and its reason, in the numbers that decide; where there is none, in those of the first search.
fn advise(
    means: &Means,
    winner: &SearchedCandidate,
    settled: &[SearchedCandidate],
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
    // The best of a kind that was settled, or else simulated.
    let best_of = |split: bool| {
        let is_of = |f: &&SearchedCandidate| f.candidate.shape.is_split() == split;
        let first = || ranked.iter().find(is_of).map(|f| format!("{} in the first search", rates(f)));
        settled.iter().find(is_of).map(rates).or_else(first)
    };
    if winner.candidate.shape.is_split() {
        let beside = best_of(false).map_or(String::new(), |other| format!(", against {other}"));
        return (
            Advice::Disaggregate,
            format!("disaggregated encoders serve more: {}{beside}{}", rates(winner), of_towers(winner)),
        );
    }
    if means.items == 0.0 {
        return (Advice::DoNotDisaggregate, "there are no items, so encoders would be idle".to_owned());
    }
    let is_better =
        |f: &SearchedCandidate| f.candidate.shape.is_split() && f.goodput.mean >= winner.goodput.mean;
    let why = match (settled.iter().find(|f| is_better(f)), best_of(true)) {
        (Some(better), _) => format!(
            "disaggregated encoders gain nothing beyond the interval: {}, {}",
            rates(better),
            rates(winner)
        ),
        (None, Some(other)) => format!("colocated workers serve more: {}, against {other}", rates(winner)),
        (None, None) => "no disaggregated cluster can serve as much".to_owned(),
    };
    (Advice::DoNotDisaggregate, why)
}

/// The towers of each encoder worker, for a model in which several read the same item.
fn of_towers(winner: &SearchedCandidate) -> String {
    let Candidate { shape, curves, .. } = &winner.candidate;
    let names: Vec<_> = curves.encoders().map(|encoder| encoder.name).collect();
    match shape {
        Shape::Towers { encoders, .. } => {
            let each = encoders.counts().iter().zip(names).map(|(n, name)| format!("{n} for {name}"));
            format!("; each encoder worker holds one tower: {}", each.collect::<Vec<_>>().join(", "))
        }
        _ if curves.has_towers() => format!("; each encoder worker holds the towers {}", names.join(" and ")),
        _ => String::new(),
    }
}

fn breaks(verdict: &triptych_bench::judge::RunVerdict) -> Vec<String> {
    verdict.findings.iter().filter(|f| !f.passed).map(|f| format!("{} is {}", f.rule, f.found)).collect()
}

impl RecommendedCluster {
    pub(super) fn new(question: &Question<'_>, found: SearchedCandidate) -> Self {
        let Candidate { shape, settings, curves } = &found.candidate;
        let model = &curves.model;
        let cores = found.candidate.n_workers() * curves.threads;
        Self {
            topology: shape.name(),
            shape: *shape,
            encoders_per_pd: shape.encoders_per_pd(),
            threads_per_worker: curves.threads,
            settings: *settings,
            goodput: found.goodput,
            measurable: question.error.interval(&found.by_seed, found.by_seed.len(), found.tolerance),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::sample::curves;
    use std::sync::Arc;

    fn found(shape: Shape, mean: f64) -> SearchedCandidate {
        let settings = WorkerSettings::default();
        SearchedCandidate {
            candidate: Candidate { shape, curves: Arc::new(curves()), settings },
            bound: Bound { rate: mean, encode_s: 0.0, decode_s: 0.0 },
            rate: mean,
            goodput: Interval { mean, low: mean - 0.5, high: mean + 0.5 },
            by_seed: vec![mean],
            tolerance: 0.0,
            at: None,
            broken: None,
        }
    }

    #[test]
    fn of_clusters_that_are_level_the_simplest_is_recommended_and_of_these_one_with_elastic_roles() {
        let split = |mean| found(Shape::Split { encoders: 1, pds: 1 }, mean);
        let fixed = |mean| found(Shape::Replicated { workers: 2 }, mean);
        let elastic = |mean| found(Shape::Elastic { workers: 2 }, mean);
        let decided = |sorted: &[SearchedCandidate]| {
            decide(sorted).map(|at| sorted[at].candidate.shape.name()).unwrap_or_default()
        };
        assert_eq!(decided(&[split(10.0), fixed(9.8), elastic(9.6)]), "elastic2");
        assert_eq!(decided(&[split(10.0), elastic(8.9), fixed(8.8)]), "1e1pd", "beyond the interval");
        assert_eq!(decided(&[fixed(10.0), elastic(8.9)]), "dp2", "beyond the interval");
        assert_eq!(decided(&[elastic(10.0), split(9.9), fixed(9.9)]), "elastic2");
        assert_eq!(
            decided(&[found(Shape::Colocated, 10.0), fixed(10.0)]),
            "colocated",
            "the first of equals"
        );
        assert_eq!(decide(&[]), None);
    }
}
