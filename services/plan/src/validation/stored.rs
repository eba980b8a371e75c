//! Stored results of the bench beside the simulation of the same requests, and beside the cluster that a plan recommends.

use super::choice::{MeasurementLength, choose};
use super::report::{DRIFT, LoadComparison, Regret, Validation, candidate, goal, pairs};
use crate::curves::CostCurves;
use crate::planner::inputs::PlanInputs;
use crate::planner::{Budget, Named};
use crate::simulator::{ClusterSpec, simulate};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::error::MeasureError;
use triptych_bench::judge::{JudgedWindow, Run, RunVerdict, judge_runs};
use triptych_bench::result::{RateResult, RunResult, SweepResult};
use triptych_bench::slo::Slo;
use triptych_bench::topology::{NotATopology, Topology};
use triptych_bench::workload::Workload;

/// Load after a window, as in a measurement: there it goes on until the window's requests have ended.
const TAIL: Duration = Duration::from_secs(5);

/// Iterations of the slowness: longer steps hold more sequences, and fuller steps are longer.
const CORRECTIONS: usize = 4;

/// A stored sweep, parsed.
struct StoredSweep<'a> {
    result: &'a SweepResult,
    /// Those of the plan, with the sweep's SLO and requests.
    inputs: PlanInputs,
    topology: Topology,
    /// Simulate the step times that the workers reported.
    as_reported: bool,
}

/// Compares all results, each by its own SLO.
///
/// # Errors
/// [`MeasureError::Setting`] that names a result with another model, or something of it that cannot be read.
pub fn validate(
    inputs: &PlanInputs,
    results: &[SweepResult],
    as_reported: bool,
) -> Result<Validation, MeasureError> {
    let stored =
        results.iter().map(|r| StoredSweep::of(inputs, r, as_reported)).collect::<Result<Vec<_>, _>>()?;
    let mut validation = Validation { facts: facts(inputs, results), ..Validation::default() };
    let mut workloads: BTreeMap<(&str, &str), Vec<(&StoredSweep<'_>, f64)>> = BTreeMap::new();
    let latencies = stored.par_iter().map(StoredSweep::latencies).collect::<Result<Vec<_>, _>>()?;
    for (one, compared) in stored.iter().zip(latencies) {
        let slowness = median(compared.iter().map(|c| c.slowness).collect());
        validation.compared.extend(compared);
        let question = (one.inputs.demand.workload.text(), one.result.setup.slo.as_str());
        workloads.entry(question).or_default().push((one, slowness));
    }
    let workloads: Vec<_> = workloads.into_values().collect();
    let regrets = workloads.par_iter().map(|measured| regret(measured)).collect::<Result<Vec<_>, _>>()?;
    validation.regrets.extend(regrets.into_iter().flatten());
    Ok(validation)
}

/// Of curves in service that differ in their time alone, those that were scaled last before a measurement, or if none was, the
/// first after it: a machine's speed drifts by a third within hours.
fn of_the_time(curves: &[Arc<CostCurves>], measured_s: u64) -> Vec<Arc<CostCurves>> {
    let scaled_s = |curves: &CostCurves| curves.in_service.and_then(|factors| factors.at_s);
    let rank = |scaled_s: u64| (scaled_s > measured_s, scaled_s.abs_diff(measured_s));
    let is_meant = |one: &&Arc<CostCurves>| {
        let others = curves.iter().filter(|other| other.threads == one.threads);
        scaled_s(one).is_none_or(|own| others.filter_map(|o| scaled_s(o)).all(|s| rank(own) <= rank(s)))
    };
    curves.iter().filter(is_meant).cloned().collect()
}

/// The middle one; 1 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(1.0)
}

fn facts(inputs: &PlanInputs, results: &[SweepResult]) -> Vec<(String, String)> {
    let joined = |all: BTreeSet<&str>| all.into_iter().collect::<Vec<_>>().join(", ");
    let slos = results.iter().map(|r| r.setup.slo.as_str()).collect();
    let measured = results.iter().filter_map(|r| r.host.commit.as_deref()).collect();
    let curves = inputs.curves.iter().map(|c| c.measured.commit.as_str()).collect();
    vec![
        ("SLO".into(), joined(slos)),
        ("commits of the measurements".into(), joined(measured)),
        ("commits of the curves".into(), joined(curves)),
    ]
}

impl<'a> StoredSweep<'a> {
    fn of(inputs: &PlanInputs, result: &'a SweepResult, as_reported: bool) -> Result<Self, MeasureError> {
        let setup = &result.setup;
        let target = setup.topology.as_deref().unwrap_or(&setup.target);
        let wrong = |what: String| {
            MeasureError::Setting(format!("--results: {} on {target}: {what}", setup.workload))
        };
        let Some(name) = setup.topology.as_deref() else {
            return Err(wrong(
                "only clusters that the bench started, with --topology, can be simulated".into(),
            ));
        };
        let slo: Slo = setup.slo.parse().map_err(|e| wrong(format!("SLO {}: {e}", setup.slo)))?;
        if let Some(other) = inputs.curves.iter().find(|c| c.model != setup.model) {
            return Err(wrong(format!("the model is {}, --curves are of {}", setup.model, other.model)));
        }
        let workload = Workload::parse(&setup.workload).map_err(|e| wrong(e.to_string()))?;
        let arrivals: Arrivals = setup.arrivals.parse().map_err(|e| wrong(format!("arrivals: {e}")))?;
        let topology = name.parse().map_err(|e: NotATopology| wrong(e.to_string()))?;
        let curves = of_the_time(&inputs.curves, result.host.at_unix_s);
        let inputs = PlanInputs { slo, demand: Named { workload, arrivals }, curves, ..inputs.clone() };
        Ok(Self { result, inputs, topology, as_reported })
    }

    /// The SLO, if the PD workers were started with its TPOT.
    fn told(&self) -> Option<&Slo> {
        self.result.setup.pd_tpot_slo_ms.map(|_| &self.inputs.slo)
    }

    fn n_cores(&self) -> usize {
        usize::try_from(self.result.host.cores).unwrap_or(usize::MAX)
    }

    /// Curves of workers with as many cores as each worker of the topology had.
    fn curves(&self) -> Option<&Arc<CostCurves>> {
        let threads = (self.n_cores() / self.topology.kinds().len().max(1)).max(1);
        self.inputs.curves.iter().find(|c| c.threads == threads)
    }

    /// Latencies at every rate that passed.
    fn latencies(&self) -> Result<Vec<LoadComparison>, MeasureError> {
        let (Some(curves), Some(capacity)) = (self.curves(), self.result.goodput.rate) else {
            return Ok(Vec::new());
        };
        let passed = self.result.rates.iter().filter(|rate| rate.offered() <= capacity);
        let compared = passed.map(|rate| {
            let load = rate.offered() / capacity;
            let (simulated, slowness) = self.simulated(curves, rate)?;
            let drifted = DRIFT.iter().map(|times| {
                let (drifted, _) = self.run(&self.spec(curves, slowness * times), rate)?;
                Ok(pairs(&rate.verdict, &drifted))
            });
            let drifted = drifted.collect::<Result<_, MeasureError>>()?;
            Ok(LoadComparison {
                workload: self.inputs.demand.workload.text().to_owned(),
                topology: self.topology.to_string(),
                load,
                rate: rate.offered(),
                goal: goal(load),
                slowness,
                pairs: pairs(&rate.verdict, &simulated),
                drifted,
            })
        });
        compared.collect()
    }

    /// Simulation of the same requests, judged in the same windows, and the slowness that was assumed.
    fn simulated(&self, curves: &CostCurves, rate: &RateResult) -> Result<(RunVerdict, f64), MeasureError> {
        let mut slowness = 1.0;
        if let Some(reported_ms) = reported_step_ms(rate).filter(|_| self.as_reported) {
            for _ in 0..CORRECTIONS {
                let (_, step_ms) = self.run(&self.spec(curves, slowness), rate)?;
                slowness *= if step_ms > 0.0 { reported_ms / step_ms } else { 1.0 };
            }
        }
        Ok((self.run(&self.spec(curves, slowness), rate)?.0, slowness))
    }

    /// The cluster, with times of compute that are so many times those of the curves.
    fn spec(&self, curves: &CostCurves, slowness: f64) -> ClusterSpec {
        let question = self.inputs.question(Budget::Cores(self.n_cores()), &self.inputs.demand);
        candidate(&self.topology, &Arc::new(curves.slowed(slowness)), self.told()).spec(&question)
    }

    /// One simulation of each of a rate's runs, and the mean time of their engine steps in milliseconds.
    fn run(&self, spec: &ClusterSpec, rate: &RateResult) -> Result<(RunVerdict, f64), MeasureError> {
        let mut simulated = Vec::new();
        let mut step_s = 0.0;
        let mut n_steps = 0;
        for run in &rate.runs {
            let window = window(run);
            let offered =
                self.inputs.demand.workload.requests(rate.rate, self.inputs.demand.arrivals, run.seed);
            let offered = offered.take_while(|offered| offered.at < window.to + TAIL);
            let simulation = simulate(spec, offered, run.seed);
            let simulation = simulation.map_err(|e| MeasureError::setting("cannot simulate", &e))?;
            for pool in &simulation.pools {
                step_s += pool.step_s * pool.workers as f64 / pool.cores.max(1) as f64;
                n_steps += pool.n_steps;
            }
            simulated.push((simulation.outcomes, window));
        }
        let runs: Vec<_> =
            simulated.iter().map(|(outcomes, window)| Run { outcomes, window: *window }).collect();
        let verdict = judge_runs(&runs, &self.inputs.slo, &Default::default());
        Ok((verdict, step_s * 1e3 / n_steps.max(1) as f64))
    }
}

/// Mean time of an engine step as the workers reported it, in milliseconds: the mean over a rate's runs.
fn reported_step_ms(rate: &RateResult) -> Option<f64> {
    let reported: Vec<f64> = rate.runs.iter().filter_map(|run| run.server.as_ref()?.step_ms).collect();
    (!reported.is_empty())
        .then(|| reported.iter().sum::<f64>() / reported.len() as f64)
        .filter(|ms| *ms > 0.0)
}

fn window(run: &RunResult) -> JudgedWindow {
    let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
    JudgedWindow { from: seconds(run.warm_up_s), to: seconds(run.warm_up_s + run.window_s) }
}

/// The cluster that a plan recommends beside the best measured one, under one workload.
fn regret(measured: &[(&StoredSweep<'_>, f64)]) -> Result<Option<Regret>, MeasureError> {
    let Some((first, _)) = measured.first() else { return Ok(None) };
    let inputs = &first.inputs;
    let with_curves = |(one, slowness): &(&StoredSweep<'_>, f64)| {
        Some((one.topology.clone(), Arc::new(one.curves()?.slowed(*slowness)), one.told().copied()))
    };
    let setup = &first.result.setup;
    let length = MeasurementLength {
        n_requests: setup.n_requests,
        longest: Duration::try_from_secs_f64(setup.max_window_s).unwrap_or(Duration::MAX),
    };
    let found =
        choose(inputs, &first.inputs.demand, measured.iter().filter_map(with_curves).collect(), length)?;
    let goodput = |(one, _): &(&StoredSweep<'_>, f64)| {
        let goodput = &one.result.goodput;
        (one.topology.to_string(), goodput.rate.unwrap_or(0.0), goodput.fails_at)
    };
    let goodputs = measured.iter().map(goodput).collect();
    let workload = first.inputs.demand.workload.text();
    let error = inputs.error_for(workload);
    Ok(Some(Regret::new(workload, goodputs, &found, (setup.seeds.len(), error))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::ServiceFactors;
    use crate::curves::sample::curves;

    #[test]
    fn a_result_is_simulated_with_the_curves_of_its_time() {
        let scaled = |threads: usize, at_s: Option<u64>| {
            let factors = ServiceFactors {
                encode: 1.0,
                step: 1.0,
                between_us: None,
                prefill: None,
                front: 1.0,
                item: None,
                at_s,
            };
            Arc::new(CostCurves { threads, ..curves().in_service(factors) })
        };
        let all = [(1, Some(100)), (2, Some(100)), (1, Some(300)), (2, Some(310)), (4, None)];
        let all = all.map(|(threads, at_s)| scaled(threads, at_s));
        let chosen = |measured_s: u64| {
            let time = |c: &Arc<CostCurves>| (c.threads, c.in_service.and_then(|f| f.at_s));
            of_the_time(&all, measured_s).iter().map(time).collect::<Vec<_>>()
        };
        assert_eq!(chosen(305), [(2, Some(100)), (1, Some(300)), (4, None)]);
        assert_eq!(chosen(299), [(1, Some(100)), (2, Some(100)), (4, None)]);
        assert_eq!(chosen(5000), [(1, Some(300)), (2, Some(310)), (4, None)]);
        assert_eq!(chosen(50), [(1, Some(100)), (2, Some(100)), (4, None)], "all are later");
    }
}
