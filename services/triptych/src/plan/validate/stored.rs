//! What `triptych bench` stored beside the simulation of the same requests, and beside what the plan would have chosen.

use super::{Length, budget, choose, shape};
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
use triptych_plan::planner::{Budget, Named};
use triptych_plan::simulator::{ClusterSpec, simulate};
use triptych_plan::validation::{Compared, Regret, Validation, candidate, goal, pairs};

/// Load goes on behind a measured window until its requests have ended; so long it does here.
const TAIL: Duration = Duration::from_secs(5);

/// How often a machine's slowness is corrected by what steps took: steps are longer where more stands in them, and more
/// stands in them where they are longer.
const CORRECTIONS: usize = 4;

/// A stored sweep, understood.
struct Stored<'a> {
    result: &'a SweepResult,
    topology: Topology,
    demand: Named,
    /// Whether the machine is taken to be as slow as the workers told.
    as_told: bool,
}

/// Compares all of them.
///
/// # Errors
/// [`CliError::Setting`] that names the result which is of something else than what is asked.
pub fn validate(asked: &Asked, results: &[SweepResult], as_told: bool) -> Result<Validation, CliError> {
    let stored = results.iter().map(|r| Stored::of(asked, r, as_told)).collect::<Result<Vec<_>, _>>()?;
    let mut validation = Validation { facts: facts(asked, results), ..Validation::default() };
    let mut workloads: BTreeMap<&str, Vec<(&Stored<'_>, f64)>> = BTreeMap::new();
    for one in &stored {
        let compared = one.latencies(asked)?;
        let slowness = median(compared.iter().map(|c| c.slowness).collect());
        validation.compared.extend(compared);
        workloads.entry(one.demand.workload.text()).or_default().push((one, slowness));
    }
    for of_workload in workloads.values() {
        validation.regrets.extend(regret(asked, of_workload)?);
    }
    Ok(validation)
}

/// The middle one; 1 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(1.0)
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
    fn of(asked: &Asked, result: &'a SweepResult, as_told: bool) -> Result<Self, CliError> {
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
        Ok(Self { result, topology, demand: Named { workload, arrivals }, as_told })
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
        let passed = self.result.rates.iter().filter(|rate| rate.rate <= capacity);
        let compared = passed.map(|rate| {
            let load = rate.rate / capacity;
            let (simulated, slowness) = self.simulated(asked, curves, rate)?;
            Ok(Compared {
                workload: self.demand.workload.text().to_owned(),
                topology: self.topology.to_string(),
                load,
                rate: rate.rate,
                goal: goal(load),
                slowness,
                pairs: pairs(&rate.verdict, &simulated),
            })
        });
        compared.collect()
    }

    /// The same requests, judged in the same windows; and how slow the machine was taken to be.
    fn simulated(
        &self,
        asked: &Asked,
        curves: &CostCurves,
        rate: &RateResult,
    ) -> Result<(Verdict, f64), CliError> {
        let question = asked.question(Budget::Cores(self.n_cores()), &self.demand);
        let mut slowness = 1.0;
        let spec = |slowness: f64| {
            let curves = Arc::new(curves.slowed(slowness));
            candidate(shape(&self.topology), &curves, budget(&self.topology)).spec(&question)
        };
        if let Some(told_ms) = told(rate).filter(|_| self.as_told) {
            for _ in 0..CORRECTIONS {
                let (_, step_ms) = self.run(asked, &spec(slowness), rate)?;
                slowness *= if step_ms > 0.0 { told_ms / step_ms } else { 1.0 };
            }
        }
        Ok((self.run(asked, &spec(slowness), rate)?.0, slowness))
    }

    /// One simulation of each of a rate's runs, and the mean time of their engine steps in milliseconds.
    fn run(&self, asked: &Asked, spec: &ClusterSpec, rate: &RateResult) -> Result<(Verdict, f64), CliError> {
        let (mut simulated, mut step_s, mut n_steps) = (Vec::new(), 0.0, 0);
        for run in &rate.runs {
            let window = window(run);
            let offered = self.demand.workload.requests(rate.rate, self.demand.arrivals, run.seed);
            let offered = offered.take_while(|offered| offered.at < window.to + TAIL);
            let simulation = simulate(spec, offered, run.seed);
            let simulation = simulation.map_err(|e| CliError::setting("cannot simulate", &e))?;
            for pool in &simulation.pools {
                step_s += pool.step_s * pool.workers as f64 / pool.cores.max(1) as f64;
                n_steps += pool.n_steps;
            }
            simulated.push((simulation.outcomes, window));
        }
        let runs: Vec<_> =
            simulated.iter().map(|(outcomes, window)| Run { outcomes, window: *window }).collect();
        let verdict = judge_runs(&runs, &asked.slo, &Default::default());
        Ok((verdict, step_s * 1e3 / n_steps.max(1) as f64))
    }
}

/// What the workers told of the mean time of an engine step, in milliseconds: the mean over a rate's runs.
fn told(rate: &RateResult) -> Option<f64> {
    let told: Vec<f64> = rate.runs.iter().filter_map(|run| run.server.as_ref()?.step_ms).collect();
    (!told.is_empty()).then(|| told.iter().sum::<f64>() / told.len() as f64).filter(|ms| *ms > 0.0)
}

fn window(run: &RunResult) -> Window {
    let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
    Window { from: seconds(run.warm_up_s), to: seconds(run.warm_up_s + run.window_s) }
}

/// What the plan takes of the clusters that were measured under a workload, beside the best of them.
fn regret(asked: &Asked, measured: &[(&Stored<'_>, f64)]) -> Result<Option<Regret>, CliError> {
    let Some((first, _)) = measured.first() else { return Ok(None) };
    let with_curves = |(one, slowness): &(&Stored<'_>, f64)| {
        Some((one.topology.clone(), Arc::new(one.curves(asked)?.slowed(*slowness))))
    };
    let setup = &first.result.setup;
    let length = Length {
        n_requests: setup.n_requests,
        longest: Duration::try_from_secs_f64(setup.max_window_s).unwrap_or(Duration::MAX),
    };
    let found = choose(asked, &first.demand, measured.iter().filter_map(with_curves).collect(), length)?;
    let goodput = |(one, _): &(&Stored<'_>, f64)| {
        let goodput = &one.result.goodput;
        (one.topology.to_string(), goodput.rate.unwrap_or(0.0), goodput.fails_at)
    };
    let goodputs = measured.iter().map(goodput).collect();
    Ok(Some(Regret::new(first.demand.workload.text(), goodputs, &found, setup.seeds.len())))
}
