//! The bars that a plan has to pass, and where a validation stands with each.

use super::report::{ClusterGoodput, REGRET, Regret, Validation};
use crate::planner::inputs::PlanInputs;
use crate::planner::{Residual, Residuals};
use serde::Serialize;
use triptych_bench::report::{Cell, Section, Table};

/// Allowed median of expected over measured goodput.
const MEDIAN: (f64, f64) = (0.9, 1.1);
/// Allowed range of nine in ten of these ratios.
const NINE_IN_TEN: (f64, f64) = (0.8, 1.25);
/// Share of clusters inside their interval.
const INSIDE: f64 = 37.0 / 39.0;
/// Share of workloads whose regret is small.
const SMALL_REGRET: f64 = 12.0 / 13.0;
/// Rounding of shares that are quotients of counts.
const ROUNDING: f64 = 1e-9;

/// A bar.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// Its subject.
    pub what: String,
    /// The allowed values.
    pub allowed: String,
    /// The value that was found.
    pub found: String,
    /// True if it is passed; `None`: nothing was measured.
    pub passed: Option<bool>,
}

impl Bar {
    fn new(what: &str, allowed: String, found: Option<(String, bool)>) -> Self {
        let passed = found.as_ref().map(|(_, passed)| *passed);
        let found = found.map_or_else(|| "not measured".to_owned(), |(found, _)| found);
        Self { what: what.to_owned(), allowed, found, passed }
    }
}

impl Validation {
    /// Every bar.
    pub fn bars(&self) -> Vec<Bar> {
        let ratios = self.ratios();
        let (low, high) = NINE_IN_TEN;
        let inside = ratios.iter().filter(|ratio| (low..=high).contains(*ratio)).count();
        vec![
            median_bar(&ratios),
            share_bar(
                "clusters whose expected goodput is near the measured one",
                (0.9, format!("{low} to {high} times, in 9 of 10")),
                (inside, ratios.len()),
            ),
            self.interval_bar(),
            self.latency_bar(),
            self.regret_bar(),
        ]
    }

    /// Residuals of what was measured, for the intervals of later plans by such curves.
    pub fn residuals(&self, inputs: &PlanInputs) -> Residuals {
        let cells = self.regrets.iter().flat_map(|regret| regret.clusters.iter().map(move |c| (regret, c)));
        let cell = |(regret, cluster): (&Regret, &ClusterGoodput)| {
            Some(Residual {
                curves: inputs.curve_kind(),
                workload: regret.workload.clone(),
                topology: cluster.topology.clone(),
                expected: cluster.expected?.mean,
                passes: cluster.measured,
                fails_at: cluster.fails_at,
            })
        };
        let facts: Vec<String> = self.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        Residuals { source: facts.join("; "), cells: cells.filter_map(cell).collect() }
    }

    /// Expected over measured goodput of each cluster that serves something.
    fn ratios(&self) -> Vec<f64> {
        let clusters = self.regrets.iter().flat_map(|regret| &regret.clusters);
        clusters.filter_map(|c| (c.measured > 0.0).then_some(c.expected?.mean / c.measured)).collect()
    }

    fn interval_bar(&self) -> Bar {
        let clusters = self.regrets.iter().flat_map(|regret| &regret.clusters);
        let known: Vec<bool> = clusters.filter_map(|cluster| cluster.is_as_expected()).collect();
        let n = known.iter().filter(|is| **is).count();
        share_bar(
            "clusters inside their interval",
            (INSIDE, "37 of 39, or as large a share".into()),
            (n, known.len()),
        )
    }

    fn latency_bar(&self) -> Bar {
        let (misses, all) = self.misses();
        share_bar(
            "TTFT and TPOT, p50 and p90, within 10 % at half load and 20 % near capacity",
            (1.0, "all".into()),
            (all - misses, all),
        )
    }

    fn regret_bar(&self) -> Bar {
        let ratios: Vec<f64> = self.regrets.iter().filter_map(|regret| regret.ratio()).collect();
        let n = ratios.iter().filter(|ratio| **ratio >= REGRET).count();
        share_bar(
            "workloads whose planned cluster is within 5 % of the best",
            (SMALL_REGRET, "12 of 13, or as large a share".into()),
            (n, ratios.len()),
        )
    }
}

fn median_bar(ratios: &[f64]) -> Bar {
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = MEDIAN;
    let found = sorted.get(sorted.len().saturating_sub(1) / 2);
    let found = found.map(|median| (format!("{median:.2}"), (low..=high).contains(median)));
    Bar::new("expected over measured goodput, median", format!("{low} to {high}"), found)
}

/// A bar of the share of `n` in `all`.
fn share_bar(what: &str, (least, allowed): (f64, String), (n, all): (usize, usize)) -> Bar {
    let share = n as f64 / all.max(1) as f64;
    let found = (all > 0).then(|| (format!("{n} of {all}"), share + ROUNDING >= least));
    Bar::new(what, allowed, found)
}

/// The bars as a section of the report.
pub(super) fn section(validation: &Validation) -> Section {
    let row = |bar: &Bar| {
        let word = match bar.passed {
            None => "",
            Some(true) => "passed",
            Some(false) => "missed",
        };
        [&bar.what, &bar.allowed, &bar.found, word].map(|text: &str| Cell::from(text)).to_vec()
    };
    Section {
        heading: "Bars".to_owned(),
        text: "Measured is the highest rate that passed.".to_owned(),
        tables: vec![Table {
            caption: "Bars of the plan".to_owned(),
            columns: ["bar", "allowed", "found", ""].map(str::to_owned).to_vec(),
            rows: validation.bars().iter().map(row).collect(),
        }],
        charts: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{LoadComparison, PercentilePair};
    use super::*;
    use crate::planner::Interval;

    fn cluster(topology: &str, expected: f64, measured: f64) -> ClusterGoodput {
        let expected = Interval { mean: expected, low: expected * 0.9, high: expected * 1.1 };
        ClusterGoodput {
            topology: topology.into(),
            measured,
            fails_at: Some(measured * 1.05),
            expected: Some(expected),
        }
    }

    fn passed(validation: &Validation) -> Vec<Option<bool>> {
        validation.bars().iter().map(|bar| bar.passed).collect()
    }

    #[test]
    fn bars_are_passed_or_missed_and_without_measurements_neither() {
        assert_eq!(passed(&Validation::default()), [None; 5]);
        let regret = |clusters| Regret { workload: "w".into(), planned: Some("dp2".into()), clusters };
        let pair = |what: &str, simulated_ms| PercentilePair {
            what: what.into(),
            measured_ms: Some(100.0),
            simulated_ms: Some(simulated_ms),
        };
        let mut validation = Validation {
            regrets: vec![regret(vec![cluster("dp2", 10.0, 10.0), cluster("1e1pd", 9.0, 9.5)])],
            compared: vec![LoadComparison {
                workload: "w".into(),
                topology: "dp2".into(),
                load: 0.5,
                rate: 5.0,
                goal: 0.1,
                slowness: 1.0,
                // The 99th percentile has no goal.
                pairs: vec![pair("TTFT p50", 109.0), pair("TPOT p90", 91.0), pair("TTFT p99", 10.0)],
                drifted: Vec::new(),
            }],
            ..Validation::default()
        };
        assert_eq!(passed(&validation), [Some(true); 5]);
        validation.compared[0].pairs.push(pair("TTFT p90", 111.0));
        // Twice what is expected, of clusters of which another one is the best.
        validation.regrets.push(regret(vec![cluster("dp2", 20.0, 10.0), cluster("1e1pd", 22.0, 11.0)]));
        validation.regrets.push(regret(vec![cluster("dp2", 20.0, 10.0)]));
        assert_eq!(passed(&validation), [Some(false); 5]);
        let found: Vec<String> = validation.bars().into_iter().map(|bar| bar.found).collect();
        assert_eq!(found, ["2.00", "2 of 5", "2 of 5", "2 of 3", "2 of 3"]);
    }
}
