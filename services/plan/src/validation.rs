//! How far the simulation is from a machine, and the plan from the best that was measured: pure comparison of outcomes
//! that were measured with outcomes that were simulated for the same requests.

use crate::curves::CostCurves;
use crate::planner::candidate::{Candidate, Settings, Shape};
use serde::Serialize;
use std::sync::Arc;
use triptych_bench::judge::{Run, Verdict, Window, judge_runs};
use triptych_bench::outcome::Outcome;
use triptych_bench::report::{Cell, Report, Section, Table};
use triptych_bench::slo::Slo;
use triptych_runtime::turnstile::EncoderBudget;

/// Loads, as parts of the capacity, and the largest relative error that is good at each.
pub const LOADS: [(f64, f64); 3] = [(0.5, 0.05), (0.85, 0.05), (0.95, 0.15)];
/// The part of the best measured goodput that the plan's choice should reach.
pub const REGRET: f64 = 0.95;

/// A percentile of a latency, measured and simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Of what: `TTFT p50`.
    pub what: String,
    /// In milliseconds; `None`: so many failed that it is infinite.
    pub measured_ms: Option<f64>,
    /// The same.
    pub simulated_ms: Option<f64>,
}

impl Pair {
    /// Simulated over measured, less one.
    pub fn error(&self) -> Option<f64> {
        let (measured, simulated) = (self.measured_ms?, self.simulated_ms?);
        (measured > 0.0).then(|| simulated / measured - 1.0)
    }
}

/// A load on a topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// What was offered.
    pub workload: String,
    /// Which cluster.
    pub topology: String,
    /// Part of its capacity.
    pub load: f64,
    /// Requests a second.
    pub rate: f64,
    /// The largest relative error that is good.
    pub goal: f64,
    /// p50, p90 and p99 of TTFT, TPOT and E2EL.
    pub pairs: Vec<Pair>,
}

/// A workload that was planned for, and measured on every topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regret {
    /// Which.
    pub workload: String,
    /// What the plan chose.
    pub planned: String,
    /// Goodput that it was to have, its interval.
    pub expected: (f64, f64, f64),
    /// Measured goodput of each topology.
    pub measured: Vec<(String, f64)>,
}

impl Regret {
    /// Measured goodput of what was planned over the best measured; `None` if nothing served anything.
    pub fn ratio(&self) -> Option<f64> {
        let best = self.measured.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        (best > 0.0).then_some(self.of_planned()? / best)
    }

    /// Measured goodput of what was planned; `None` if it was not measured.
    pub fn of_planned(&self) -> Option<f64> {
        self.measured.iter().find(|(name, _)| *name == self.planned).map(|(_, rate)| *rate)
    }

    /// Whether that lies where the plan said that it would.
    pub fn is_as_expected(&self) -> bool {
        let (_, low, high) = self.expected;
        self.of_planned().is_some_and(|rate| (low..=high).contains(&rate))
    }
}

/// Everything that was compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Validation {
    /// Simulated beside measured.
    pub compared: Vec<Compared>,
    /// The plan beside the best.
    pub regrets: Vec<Regret>,
    /// Host, commit, flags: names and values.
    pub facts: Vec<(String, String)>,
    /// What somebody must know who believes it.
    pub warnings: Vec<String>,
}

/// The largest relative error that is good at a part of the capacity.
pub fn goal(load: f64) -> f64 {
    let nearest = LOADS.iter().min_by(|a, b| (a.0 - load).abs().total_cmp(&(b.0 - load).abs()));
    nearest.map_or(0.0, |(_, goal)| *goal)
}

/// Outcomes of the same requests, measured and simulated, judged in the same window.
pub fn compare(measured: &[Outcome], simulated: &[Outcome], window: Window, slo: &Slo) -> Vec<Pair> {
    let judge = |outcomes: &[Outcome]| judge_runs(&[Run { outcomes, window }], slo, &Default::default());
    pairs(&judge(measured), &judge(simulated))
}

/// Percentiles beside each other.
pub fn pairs(measured: &Verdict, simulated: &Verdict) -> Vec<Pair> {
    let latencies = |v: &Verdict| [("TTFT", v.ttft_ms), ("TPOT", v.tpot_ms), ("E2EL", v.e2el_ms)];
    let mut pairs = Vec::new();
    for ((name, m), (_, s)) in latencies(measured).into_iter().zip(latencies(simulated)) {
        for (at, measured_ms, simulated_ms) in
            [("p50", m.p50, s.p50), ("p90", m.p90, s.p90), ("p99", m.p99, s.p99)]
        {
            pairs.push(Pair { what: format!("{name} {at}"), measured_ms, simulated_ms });
        }
    }
    pairs
}

/// As the planner has a topology, of workers that were measured.
pub fn candidate(shape: Shape, curves: &Arc<CostCurves>, encoder_budget: EncoderBudget) -> Candidate {
    let settings = Settings { encoder_budget, ..Settings::default() };
    Candidate { shape, curves: Arc::clone(curves), settings }
}

impl Validation {
    /// As a page.
    pub fn report(&self) -> Report {
        let mut report = Report {
            title: "Simulated beside measured".to_owned(),
            lead: "The same requests, offered to a cluster on this machine and to its simulation; and the cluster that the \
                   plan chose beside the best of all that were measured."
                .to_owned(),
            facts: self.facts.clone(),
            warnings: self.warnings.clone(),
            ..Report::default()
        };
        if !self.compared.is_empty() {
            report.sections.push(Section {
                heading: "Latencies".to_owned(),
                text: "Relative error is simulated over measured, less one. The goal is 5 % at half load and at 85 %, and \
                       15 % at 95 %."
                    .to_owned(),
                tables: self.compared.iter().map(Compared::table).collect(),
                charts: Vec::new(),
            });
        }
        if !self.regrets.is_empty() {
            report.sections.push(Section {
                heading: "What the plan costs".to_owned(),
                text: format!(
                    "Measured goodput of the planned cluster over that of the best measured one; the goal is {REGRET} and \
                     more. No workload here was used to tune the planner or the simulator."
                ),
                tables: vec![regrets(&self.regrets)],
                charts: Vec::new(),
            });
        }
        report
    }

    /// Comparisons that miss their goal: how many, and of how many.
    pub fn misses(&self) -> (usize, usize) {
        let all = self.compared.iter().flat_map(|c| c.pairs.iter().map(move |p| (p.error(), c.goal)));
        let within = |(error, goal): &(Option<f64>, f64)| error.is_some_and(|e| e.abs() <= *goal);
        let n = all.clone().count();
        (n - all.filter(within).count(), n)
    }
}

impl Compared {
    fn table(&self) -> Table {
        let row = |pair: &Pair| {
            let ms = |value: Option<f64>| value.map_or_else(|| "no end".to_owned(), |ms| format!("{ms:.1}"));
            let error = pair.error().map_or_else(|| "none".to_owned(), |e| format!("{:+.1} %", e * 1e2));
            let is_good = pair.error().is_some_and(|e| e.abs() <= self.goal);
            vec![
                Cell::from(pair.what.as_str()),
                Cell::from(ms(pair.measured_ms)),
                Cell::from(ms(pair.simulated_ms)),
                Cell::from(error),
                Cell::from(if is_good { "yes" } else { "no" }),
            ]
        };
        Table {
            caption: format!(
                "{} on {} at {:.0} % of its capacity, {:.2} requests/s",
                self.workload,
                self.topology,
                self.load * 1e2,
                self.rate
            ),
            columns: ["latency", "measured ms", "simulated ms", "error", "within the goal"]
                .map(str::to_owned)
                .to_vec(),
            rows: self.pairs.iter().map(row).collect(),
        }
    }
}

fn regrets(all: &[Regret]) -> Table {
    let row = |regret: &Regret| {
        let best = regret.measured.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let (mean, low, high) = regret.expected;
        vec![
            Cell::from(regret.workload.as_str()),
            Cell::from(regret.planned.as_str()),
            Cell::from(format!("{mean:.2} ({low:.2} to {high:.2})")),
            Cell::from(regret.of_planned().map_or_else(|| "not measured".to_owned(), |r| format!("{r:.2}"))),
            Cell::from(if regret.is_as_expected() { "yes" } else { "no" }),
            Cell::from(best.map_or_else(String::new, |(name, rate)| format!("{name}: {rate:.2}"))),
            Cell::from(regret.ratio().map_or_else(|| "none".to_owned(), |ratio| format!("{ratio:.3}"))),
        ]
    };
    Table {
        caption: "The plan beside an exhaustive sweep".to_owned(),
        columns: [
            "workload",
            "planned",
            "expected requests/s",
            "measured",
            "as expected",
            "best measured",
            "ratio",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: all.iter().map(row).collect(),
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
        }
    }

    #[test]
    fn errors_are_relative_to_what_was_measured() {
        let run = |ttft: u64| (0..100).map(|i| outcome(i, ttft)).collect::<Vec<_>>();
        let window = Window { from: Duration::ZERO, to: Duration::from_secs(10) };
        let pairs = compare(&run(100), &run(110), window, &"ttft=1s".parse().unwrap());
        assert_eq!(pairs.len(), 9);
        assert_eq!(pairs[0].what, "TTFT p50");
        assert!((pairs[0].error().unwrap() - 0.1).abs() < 1e-6);
        assert!(pairs[3].error().unwrap().abs() < 1e-6, "{:?}", pairs[3]);
        let compared = Compared {
            workload: "w".into(),
            topology: "dp2".into(),
            load: 0.5,
            rate: 10.0,
            goal: 0.05,
            pairs,
        };
        let validation = Validation { compared: vec![compared], ..Validation::default() };
        // TTFT by 10 %, E2EL by 8 %, three percentiles each.
        assert_eq!(validation.misses(), (6, 9));
        let page = validation.report().to_markdown();
        assert!(page.contains("+10.0 %") && page.contains("dp2 at 50 %"), "{page}");
    }

    #[test]
    fn a_load_is_held_to_the_goal_of_the_nearest_one() {
        assert_eq!([0.3, 0.6, 0.8, 0.94, 1.0].map(goal), [0.05, 0.05, 0.05, 0.15, 0.15]);
    }

    #[test]
    fn regret_is_the_planned_cluster_over_the_best() {
        let regret = |planned: &str| Regret {
            workload: "w".into(),
            planned: planned.into(),
            expected: (1.0, 0.9, 1.1),
            measured: vec![("1e1pd".into(), 4.0), ("dp2".into(), 5.0)],
        };
        assert_eq!((regret("1e1pd").ratio(), regret("dp2").ratio()), (Some(0.8), Some(1.0)));
        assert_eq!(regret("colocated").ratio(), None);
        assert!(!regret("1e1pd").is_as_expected() && !regret("colocated").is_as_expected());
        assert!(Regret { expected: (4.5, 3.9, 5.0), ..regret("1e1pd") }.is_as_expected());
    }
}
