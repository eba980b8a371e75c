//! What `triptych bench` stored beside the simulation of the same requests, and beside what the plan would have chosen.

use super::{budget, shape};
use crate::error::CliError;
use crate::plan::Asked;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::judge::{Run, Verdict, Window, judge_runs};
use triptych_bench::result::{RateResult, RunResult, SweepResult};
use triptych_bench::slo::Slo;
use triptych_bench::topology::{NotATopology, Topology};
use triptych_bench::workload::Workload;
use triptych_plan::curves::CostCurves;
use triptych_plan::planner::{self, Budget, Named};
use triptych_plan::simulator::{ClusterSpec, simulate};
use triptych_plan::validation::{Compared, Regret, Validation, candidate, goal, pairs};

/// Load goes on behind a measured window until its requests have ended; so long it does here.
const TAIL: Duration = Duration::from_secs(5);

/// A stored sweep, understood.
struct Stored<'a> {
    result: &'a SweepResult,
    topology: Topology,
    demand: Named,
}

/// Compares all of them.
///
/// # Errors
/// [`CliError::Setting`] that names the result which is of something else than what is asked.
pub fn validate(asked: &Asked, results: &[SweepResult]) -> Result<Validation, CliError> {
    let stored = results.iter().map(|r| Stored::of(asked, r)).collect::<Result<Vec<_>, _>>()?;
    let mut validation = Validation { facts: facts(asked, results), ..Validation::default() };
    let mut workloads: BTreeMap<&str, Vec<&Stored<'_>>> = BTreeMap::new();
    for one in &stored {
        validation.compared.extend(one.latencies(asked)?);
        workloads.entry(one.demand.workload.text()).or_default().push(one);
    }
    for of_workload in workloads.values() {
        validation.regrets.extend(regret(asked, of_workload)?);
    }
    Ok(validation)
}

fn facts(asked: &Asked, results: &[SweepResult]) -> Vec<(String, String)> {
    let joined = |all: BTreeSet<&str>| all.into_iter().collect::<Vec<_>>().join(", ");
    let measured = results.iter().filter_map(|r| r.host.commit.as_deref()).collect();
    let curves = asked.curves.iter().map(|c| c.measured.commit.as_str()).collect();
    vec![
        ("promises".into(), asked.slo.to_string()),
        ("commits of the measurements".into(), joined(measured)),
        ("commits of the curves".into(), joined(curves)),
    ]
}

impl<'a> Stored<'a> {
    fn of(asked: &Asked, result: &'a SweepResult) -> Result<Self, CliError> {
        let setup = &result.setup;
        let place = setup.topology.as_deref().unwrap_or(&setup.target);
        let wrong =
            |what: String| CliError::Setting(format!("--results: {} on {place}: {what}", setup.workload));
        let Some(name) = setup.topology.as_deref() else {
            return Err(wrong(
                "only clusters that the bench started, with --topology, can be simulated".into(),
            ));
        };
        if setup.slo.parse::<Slo>().ok() != Some(asked.slo) {
            return Err(wrong(format!("promises are {}, --slo is {}", setup.slo, asked.slo)));
        }
        if let Some(other) = asked.curves.iter().find(|c| c.model != setup.model) {
            return Err(wrong(format!("the model is {}, --curves are of {}", setup.model, other.model)));
        }
        let workload = Workload::parse(&setup.workload).map_err(|e| wrong(e.to_string()))?;
        let arrivals: Arrivals = setup.arrivals.parse().map_err(|e| wrong(format!("arrivals: {e}")))?;
        let topology = name.parse().map_err(|e: NotATopology| wrong(e.to_string()))?;
        Ok(Self { result, topology, demand: Named { workload, arrivals } })
    }

    fn n_cores(&self) -> usize {
        usize::try_from(self.result.host.cores).unwrap_or(usize::MAX)
    }

    /// Curves of workers with as many cores as each of its workers had.
    fn curves<'b>(&self, asked: &'b Asked) -> Option<&'b Arc<CostCurves>> {
        let threads = self.n_cores() / self.topology.kinds().len().max(1);
        asked.curves.iter().find(|c| c.threads == threads)
    }

    /// At every rate that passed.
    fn latencies(&self, asked: &Asked) -> Result<Vec<Compared>, CliError> {
        let (Some(curves), Some(capacity)) = (self.curves(asked), self.result.goodput.rate) else {
            return Ok(Vec::new());
        };
        let question = asked.question(Budget::Cores(self.n_cores()), &self.demand);
        let spec = candidate(shape(&self.topology), curves, budget(&self.topology)).spec(&question);
        let passed = self.result.rates.iter().filter(|rate| rate.rate <= capacity);
        let compared = passed.map(|rate| {
            let load = rate.rate / capacity;
            Ok(Compared {
                workload: self.demand.workload.text().to_owned(),
                topology: self.topology.to_string(),
                load,
                rate: rate.rate,
                goal: goal(load),
                pairs: pairs(&rate.verdict, &self.simulated(asked, &spec, rate)?),
            })
        });
        compared.collect()
    }

    /// The same requests, judged in the same windows.
    fn simulated(&self, asked: &Asked, spec: &ClusterSpec, rate: &RateResult) -> Result<Verdict, CliError> {
        let mut simulated = Vec::new();
        for run in &rate.runs {
            let window = window(run);
            let offered = self.demand.workload.requests(rate.rate, self.demand.arrivals, run.seed);
            let offered = offered.take_while(|offered| offered.at < window.to + TAIL);
            let simulation = simulate(spec, offered, run.seed);
            let simulation = simulation.map_err(|e| CliError::setting("cannot simulate", &e))?;
            simulated.push((simulation.outcomes, window));
        }
        let runs: Vec<_> =
            simulated.iter().map(|(outcomes, window)| Run { outcomes, window: *window }).collect();
        Ok(judge_runs(&runs, &asked.slo, &Default::default()))
    }
}

fn window(run: &RunResult) -> Window {
    let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
    Window { from: seconds(run.warm_up_s), to: seconds(run.warm_up_s + run.window_s) }
}

/// The plan for a workload beside every cluster that was measured under it.
fn regret(asked: &Asked, measured: &[&Stored<'_>]) -> Result<Option<Regret>, CliError> {
    let Some(first) = measured.first() else { return Ok(None) };
    let question = asked.question(Budget::Cores(first.n_cores()), &first.demand);
    let answer = planner::plan(&question, &|_, _, _| {}).map_err(|e| CliError::setting("no plan", &e))?;
    let goodput = answer.best.goodput;
    let rate = |one: &&Stored<'_>| (one.topology.to_string(), one.result.goodput.rate.unwrap_or(0.0));
    Ok(Some(Regret {
        workload: first.demand.workload.text().to_owned(),
        planned: answer.best.topology,
        expected: (goodput.mean, goodput.low, goodput.high),
        measured: measured.iter().map(rate).collect(),
    }))
}
