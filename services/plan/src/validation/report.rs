//! Measured beside simulated outcomes of the same requests, and the planned cluster beside the best measured one.

use crate::curves::CostCurves;
use crate::planner::candidate::{Candidate, Shape, WorkerSettings};
use crate::planner::{Interval, ModelError, SearchedCandidate};
use serde::Serialize;
use std::sync::Arc;
use triptych_bench::judge::{JudgedWindow, Run, RunVerdict, judge_runs};
use triptych_bench::outcome::Outcome;
use triptych_bench::slo::Slo;
use triptych_bench::topology::{Topology, Workers};
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Loads, as parts of the capacity, and the largest acceptable relative error at each.
pub const LOADS: [(f64, f64); 2] = [(0.5, 0.1), (0.95, 0.2)];
/// Latencies and percentiles that have a goal.
pub const JUDGED: [&str; 4] = ["TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"];
/// Times of compute of a machine whose speed has drifted, over those of the curves. Factors of calibrations an hour apart differ by as
/// much on a machine of two cores.
pub const DRIFT: [f64; 2] = [0.95, 1.05];
/// The part of the best measured goodput that the plan's choice should reach.
pub const REGRET: f64 = 0.95;

/// A percentile of a latency, measured and simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PercentilePair {
    /// Latency and percentile: `TTFT p50`.
    pub what: String,
    /// Measured, in milliseconds; `None`: infinite, since too many requests failed.
    pub measured_ms: Option<f64>,
    /// Simulated, in milliseconds.
    pub simulated_ms: Option<f64>,
}

impl PercentilePair {
    /// True if it has a goal.
    pub fn is_judged(&self) -> bool {
        JUDGED.contains(&self.what.as_str())
    }

    /// Simulated over measured, less one.
    pub fn error(&self) -> Option<f64> {
        let measured = self.measured_ms?;
        let simulated = self.simulated_ms?;
        (measured > 0.0).then(|| simulated / measured - 1.0)
    }
}

/// Latencies of one load on one topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadComparison {
    /// Workload.
    pub workload: String,
    /// Topology of the cluster.
    pub topology: String,
    /// Part of its capacity.
    pub load: f64,
    /// Requests a second.
    pub rate: f64,
    /// Largest acceptable relative error.
    pub goal: f64,
    /// Factor on the compute times of the curves: 1, or from the step times that the workers reported.
    pub slowness: f64,
    /// p50, p90 and p99 of TTFT, TPOT and E2EL.
    pub pairs: Vec<PercentilePair>,
    /// The same, simulated on a machine whose speed has drifted: one of each of [`DRIFT`], or none.
    pub drifted: Vec<Vec<PercentilePair>>,
}

/// Numbers of judged percentiles by the effect of the machine's drift on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DriftCounts {
    /// Drift changes the simulated value by more than the goal.
    pub changed: usize,
    /// The measured value is within the goal of what is simulated with some drift, or with none.
    pub explained: usize,
    /// All that were simulated with drift.
    pub all: usize,
}

impl LoadComparison {
    /// Simulated values of the `idx`th percentile at the speed of the curves and at each drift, ascending, in milliseconds; `None`
    /// without drift. Where too many requests failed it is infinite.
    pub fn with_drift(&self, idx: usize) -> Option<Vec<f64>> {
        let at = |pairs: &[PercentilePair]| Some(pairs.get(idx)?.simulated_ms.unwrap_or(f64::INFINITY));
        let drifted: Vec<f64> = self.drifted.iter().map(|pairs| at(pairs)).collect::<Option<_>>()?;
        let mut all: Vec<f64> = drifted.into_iter().chain([at(&self.pairs)?]).collect();
        all.sort_by(f64::total_cmp);
        (all.len() > 1).then_some(all)
    }

    fn count_drift(&self, counts: &mut DriftCounts) {
        for (idx, pair) in self.pairs.iter().enumerate().filter(|(_, pair)| pair.is_judged()) {
            let Some(simulated) = self.with_drift(idx) else { continue };
            let (Some(&least), Some(&most)) = (simulated.first(), simulated.last()) else { continue };
            let [usual, measured] =
                [pair.simulated_ms, pair.measured_ms].map(|ms| ms.unwrap_or(f64::INFINITY));
            counts.all += 1;
            let is_near = |ms: f64| ms == usual || (ms / usual - 1.0).abs() <= self.goal;
            counts.changed += usize::from(!(is_near(least) && is_near(most)));
            let (low, high) = (measured * (1.0 - self.goal), measured * (1.0 + self.goal));
            counts.explained += usize::from(least <= high && most >= low);
        }
    }
}

/// Expected and measured goodput of every topology under one workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regret {
    /// Workload.
    pub workload: String,
    /// Topology that the plan recommends; `None`: none could be simulated.
    pub planned: Option<String>,
    /// Each topology.
    pub clusters: Vec<ClusterGoodput>,
}

/// Goodput of a topology, in requests a second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClusterGoodput {
    /// Topology.
    pub topology: String,
    /// The highest rate that passed, 0 if none did.
    pub measured: f64,
    /// The lowest that failed; `None` if none did.
    pub fails_at: Option<f64>,
    /// Goodput that a measurement of that length is expected to find; `None` without curves.
    pub expected: Option<Interval>,
}

impl Regret {
    /// From measured clusters and what [`crate::planner::choose`] found for those that can be simulated, in whose names
    /// each is known by its topology. The measurement has `n_seeds`, the model its `error`.
    pub fn new(
        workload: &str,
        measured: Vec<MeasuredGoodput>,
        found: &[(String, SearchedCandidate)],
        (n_seeds, error): (usize, ModelError),
    ) -> Self {
        let expected = |topology: &str| {
            let (_, found) = found.iter().find(|(name, _)| name == topology)?;
            Some(error.interval(&found.by_seed, n_seeds, found.tolerance))
        };
        let cluster = |(topology, measured, fails_at): MeasuredGoodput| ClusterGoodput {
            expected: expected(&topology),
            topology,
            measured,
            fails_at,
        };
        Self {
            workload: workload.to_owned(),
            planned: found.first().map(|(name, _)| name.clone()),
            clusters: measured.into_iter().map(cluster).collect(),
        }
    }

    /// Measured goodput of what was planned over the best measured; `None` if nothing served anything.
    pub fn ratio(&self) -> Option<f64> {
        let best = self.clusters.iter().map(|c| c.measured).fold(0.0, f64::max);
        (best > 0.0).then_some(self.of_planned()?.measured / best)
    }

    /// The planned cluster; `None` if it was not measured.
    pub fn of_planned(&self) -> Option<&ClusterGoodput> {
        self.clusters.iter().find(|c| Some(&c.topology) == self.planned.as_ref())
    }
}

impl ClusterGoodput {
    /// True if goodput, which is between the rate that passed and the one that failed, may lie where it was
    /// expected; `None` if nothing was expected.
    pub fn is_as_expected(&self) -> Option<bool> {
        let expected = self.expected?;
        let highest = self.fails_at.unwrap_or(f64::INFINITY);
        Some(expected.low <= highest && self.measured <= expected.high)
    }
}

/// A topology, the highest rate that passed on it, and the lowest that failed.
pub type MeasuredGoodput = (String, f64, Option<f64>);

/// All comparisons.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Validation {
    /// Simulated beside measured latencies.
    pub compared: Vec<LoadComparison>,
    /// The planned beside the best cluster.
    pub regrets: Vec<Regret>,
    /// Host, commit, flags: names and values.
    pub facts: Vec<(String, String)>,
    /// Reasons to doubt the result.
    pub warnings: Vec<String>,
}

/// Largest acceptable relative error at a part of the capacity.
pub fn goal(load: f64) -> f64 {
    let nearest = LOADS.iter().min_by(|a, b| (a.0 - load).abs().total_cmp(&(b.0 - load).abs()));
    nearest.map_or(0.0, |(_, goal)| *goal)
}

/// Judges measured and simulated outcomes of the same requests in the same window.
pub fn compare(
    measured: &[Outcome],
    simulated: &[Outcome],
    window: JudgedWindow,
    slo: &Slo,
) -> Vec<PercentilePair> {
    let judge = |outcomes: &[Outcome]| judge_runs(&[Run { outcomes, window }], slo, &Default::default());
    pairs(&judge(measured), &judge(simulated))
}

/// Percentiles of both verdicts.
pub fn pairs(measured: &RunVerdict, simulated: &RunVerdict) -> Vec<PercentilePair> {
    let latencies = |v: &RunVerdict| [("TTFT", v.ttft_ms), ("TPOT", v.tpot_ms), ("E2EL", v.e2el_ms)];
    let mut pairs = Vec::new();
    for ((name, m), (_, s)) in latencies(measured).into_iter().zip(latencies(simulated)) {
        for (at, measured_ms, simulated_ms) in
            [("p50", m.p50, s.p50), ("p90", m.p90, s.p90), ("p99", m.p99, s.p99)]
        {
            pairs.push(PercentilePair { what: format!("{name} {at}"), measured_ms, simulated_ms });
        }
    }
    pairs
}

/// The planner's candidate for a topology of workers that are measured; `told`: the SLO that they are told.
pub fn candidate(topology: &Topology, curves: &Arc<CostCurves>, told: Option<&Slo>) -> Candidate {
    let settings = told.map_or_else(WorkerSettings::default, |slo| WorkerSettings::with_slo(slo, curves));
    let settings = WorkerSettings { encoder_budget: encoder_budget(topology), ..settings };
    Candidate { shape: shape(topology), curves: Arc::clone(curves), settings }
}

/// The planner's shape of a topology.
pub fn shape(topology: &Topology) -> Shape {
    match topology.workers {
        Workers::Disaggregated { n_encoders, n_pds } => Shape::Split { encoders: n_encoders, pds: n_pds },
        Workers::Colocated { n: 1 } => Shape::Colocated,
        Workers::Colocated { n } => Shape::Replicated { workers: n },
        Workers::Elastic { n } => Shape::Elastic { workers: n },
    }
}

/// The encoder token budget of a topology's workers.
pub fn encoder_budget(topology: &Topology) -> EncoderBudget {
    topology.budget.as_ref().and_then(|b| b.parse().ok()).unwrap_or_default()
}

impl Validation {
    /// Number of judged percentiles that miss their goal, and of all judged ones.
    pub fn misses(&self) -> (usize, usize) {
        let all = self
            .compared
            .iter()
            .flat_map(|c| c.pairs.iter().filter(|p| p.is_judged()).map(move |p| (p.error(), c.goal)));
        let within = |(error, goal): &(Option<f64>, f64)| error.is_some_and(|e| e.abs() <= *goal);
        let n = all.clone().count();
        (n - all.filter(within).count(), n)
    }

    /// Effect of the machine's drift on judged percentiles.
    pub fn drift(&self) -> DriftCounts {
        let mut counts = DriftCounts::default();
        self.compared.iter().for_each(|compared| compared.count_drift(&mut counts));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use triptych_bench::outcome::{End, ItemCounts};

    fn outcome(index: u64, ttft_ms: u64) -> Outcome {
        let due = Duration::from_millis(index * 100);
        let at = |ms| due + Duration::from_millis(ms);
        Outcome {
            index,
            due,
            sent: due,
            tokens: vec![at(ttft_ms), at(ttft_ms + 20)],
            ended: at(ttft_ms + 20),
            end: End::Whole,
            items: ItemCounts::default(),
            slo: None,
        }
    }

    #[test]
    fn errors_are_relative_to_what_was_measured() {
        let run = |ttft: u64| (0..100).map(|i| outcome(i, ttft)).collect::<Vec<_>>();
        let window = JudgedWindow { from: Duration::ZERO, to: Duration::from_secs(10) };
        let pairs = compare(&run(100), &run(110), window, &"ttft=1s".parse().unwrap());
        assert_eq!(pairs.len(), 9);
        assert_eq!(pairs[0].what, "TTFT p50");
        assert!((pairs[0].error().unwrap() - 0.1).abs() < 1e-6);
        assert!(pairs[3].error().unwrap().abs() < 1e-6, "{:?}", pairs[3]);
        let compared = LoadComparison {
            workload: "w".into(),
            topology: "dp2".into(),
            load: 0.5,
            rate: 10.0,
            goal: 0.05,
            slowness: 1.0,
            pairs,
            drifted: Vec::new(),
        };
        let mut validation = Validation { compared: vec![compared], ..Validation::default() };
        // TTFT by 10 %, TPOT by nothing, two percentiles each.
        assert_eq!(validation.misses(), (2, 4));
        let page = validation.report().to_markdown();
        assert!(page.contains("+10.0 %") && page.contains("dp2 at 50 %"), "{page}");
        assert!(!page.contains("drift"), "{page}");
        assert_eq!(validation.drift(), DriftCounts::default());
        // Twice the TTFT where times are 1.1 times as long, and a little less where they are 0.9 times.
        let drifted = |ttft: u64| compare(&run(100), &run(ttft), window, &"ttft=1s".parse().unwrap());
        validation.compared[0].drifted = vec![drifted(108), drifted(220)];
        assert_eq!(validation.compared[0].with_drift(0).map(|ms| ms.len()), Some(3));
        assert_eq!(validation.drift(), DriftCounts { changed: 2, explained: 2, all: 4 });
        validation.compared[0].drifted[0] = drifted(104);
        assert_eq!(validation.drift(), DriftCounts { changed: 2, explained: 4, all: 4 });
        let page = validation.report().to_markdown();
        assert!(page.contains("2 of 4") && page.contains("104.0 to 220.0"), "{page}");
    }

    #[test]
    fn a_load_is_held_to_the_goal_of_the_nearest_one() {
        assert_eq!([0.3, 0.6, 0.7, 0.8, 0.94, 1.0].map(goal), [0.1, 0.1, 0.1, 0.2, 0.2, 0.2]);
    }

    #[test]
    fn regret_is_the_planned_cluster_over_the_best() {
        let cluster = |name: &str, measured| ClusterGoodput {
            topology: name.into(),
            measured,
            fails_at: Some(measured + 1.0),
            expected: None,
        };
        let clusters = vec![cluster("1e1pd", 4.0), cluster("dp2", 5.0)];
        let of = |planned: &str| Regret {
            workload: "w".into(),
            planned: Some(planned.into()),
            clusters: clusters.clone(),
        };
        assert_eq!((of("1e1pd").ratio(), of("dp2").ratio()), (Some(0.8), Some(1.0)));
        assert_eq!(of("colocated").ratio(), None);
    }

    #[test]
    fn goodput_is_between_the_rate_that_passed_and_the_one_that_failed() {
        let with = |low, high, fails_at| ClusterGoodput {
            topology: "dp2".into(),
            measured: 4.0,
            fails_at,
            expected: Some(Interval { mean: (low + high) / 2.0, low, high }),
        };
        for (low, high, fails_at, is) in [
            (3.0, 4.1, Some(5.0), true),
            (4.5, 4.8, Some(5.0), true),
            (5.1, 6.0, Some(5.0), false),
            (5.1, 6.0, None, true),
            (3.0, 3.9, Some(5.0), false),
        ] {
            assert_eq!(with(low, high, fails_at).is_as_expected(), Some(is), "{low} {high} {fails_at:?}");
        }
        let unknown = ClusterGoodput { expected: None, ..with(1.0, 2.0, None) };
        assert_eq!(unknown.is_as_expected(), None);
    }
}
