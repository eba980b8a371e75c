//! Tables of a validation's report.

use super::report::{ClusterGoodput, LoadComparison, PercentilePair, Regret};
use crate::planner::Interval;
use triptych_bench::report::{Cell, Table};

/// Percentiles of one load.
pub(super) fn latencies(compared: &LoadComparison) -> Table {
    let ms = |value: Option<f64>| value.map_or_else(|| "infinite".to_owned(), |ms| format!("{ms:.1}"));
    let row = |(idx, pair): (usize, &PercentilePair)| {
        let error = pair.error().map_or_else(|| "none".to_owned(), |e| format!("{:+.1} %", e * 1e2));
        let range = compared.with_drift(idx).and_then(|all| Some((*all.first()?, *all.last()?)));
        let finite = |value: f64| value.is_finite().then_some(value);
        let drifted = range.map(|(least, most)| format!("{} to {}", ms(finite(least)), ms(finite(most))));
        let is_good = pair.error().is_some_and(|e| e.abs() <= compared.goal);
        let mut cells = vec![pair.what.clone(), ms(pair.measured_ms), ms(pair.simulated_ms)];
        cells.extend(drifted);
        cells.push(error);
        let goal = match (pair.is_judged(), is_good) {
            (false, _) => "",
            (true, true) => "yes",
            (true, false) => "no",
        };
        cells.push(goal.to_owned());
        cells.into_iter().map(Cell::from).collect()
    };
    let slowness = match (compared.slowness - 1.0).abs() < f64::EPSILON {
        true => String::new(),
        false => format!(", on a machine {:.2} times as slow as the curves", compared.slowness),
    };
    let drift = Some("with drift, ms").filter(|_| !compared.drifted.is_empty());
    let columns = ["latency", "measured ms", "simulated ms"].into_iter().chain(drift);
    let columns = columns.chain(["error", "within the goal"]);
    Table {
        caption: format!(
            "{} on {} at {:.0} % of its capacity, {:.2} requests/s{slowness}",
            compared.workload,
            compared.topology,
            compared.load * 1e2,
            compared.rate
        ),
        columns: columns.map(str::to_owned).collect(),
        rows: compared.pairs.iter().enumerate().map(row).collect(),
    }
}

/// Each workload's planned cluster beside its best.
pub(super) fn regrets(all: &[Regret]) -> Table {
    let row = |regret: &Regret| {
        let best = regret.clusters.iter().max_by(|a, b| a.measured.total_cmp(&b.measured));
        let named = |c: &ClusterGoodput| format!("{}: {:.2}", c.topology, c.measured);
        let none = || "none".to_owned();
        vec![
            Cell::from(regret.workload.as_str()),
            Cell::from(regret.of_planned().map_or_else(none, named)),
            Cell::from(best.map_or_else(none, named)),
            Cell::from(regret.ratio().map_or_else(none, |ratio| format!("{ratio:.3}"))),
        ]
    };
    Table {
        caption: "The plan beside an exhaustive sweep, requests/s measured".to_owned(),
        columns: ["workload", "planned", "best", "ratio"].map(str::to_owned).to_vec(),
        rows: all.iter().map(row).collect(),
    }
}

/// Each cluster's goodput, expected and measured.
pub(super) fn expectations(all: &[Regret]) -> Table {
    let row = |(regret, cluster): (&Regret, &ClusterGoodput)| {
        let expected = |i: Interval| format!("{:.2} ({:.2} to {:.2})", i.mean, i.low, i.high);
        let word = |is: bool| if is { "yes" } else { "no" };
        vec![
            Cell::from(regret.workload.as_str()),
            Cell::from(cluster.topology.as_str()),
            Cell::from(cluster.expected.map_or_else(|| "not simulated".to_owned(), expected)),
            Cell::from(format!("{:.2}", cluster.measured)),
            Cell::from(cluster.fails_at.map_or_else(|| "–".to_owned(), |rate| format!("{rate:.2}"))),
            Cell::from(cluster.is_as_expected().map_or("", word)),
        ]
    };
    let clusters = all.iter().flat_map(|regret| regret.clusters.iter().map(move |c| (regret, c)));
    Table {
        caption: "Goodput expected and measured, requests/s".to_owned(),
        columns: ["workload", "cluster", "expected", "passes", "fails", "as expected"]
            .map(str::to_owned)
            .to_vec(),
        rows: clusters.map(row).collect(),
    }
}
