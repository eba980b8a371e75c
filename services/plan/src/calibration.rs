//! Curves in service: a small cluster under a moderate load, its timeline and processor time, and the same load simulated.
//!
//! The ratio of the two is the factor of each kind of work ([`ServiceFactors`]): of the times that forwards and steps of one size
//! take, and of the processor time of client, proxy and network. Neither depends on queues, so requests, SLO and topology of
//! a plan have no part in the factors. Processor time alone would not do for forwards and steps: a thread that waits for
//! another one of its worker uses none.

use crate::curves::{CostCurves, ServiceFactors};
use crate::planner::inputs::PlanInputs;
use crate::planner::{Budget, Candidate};
use crate::simulator::result::PoolUse;
use crate::simulator::{ClusterSpec, Simulation, simulate};
use crate::validation::{candidate, encoder_budget, shape};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use triptych_bench::blocks::{Block, RunKey};
use triptych_bench::cluster::{ClusterStarter, ProcessTime, RunningCluster};
use triptych_bench::cpu_time::CpuTime;
use triptych_bench::error::{MeasureError, chain};
use triptych_bench::sweep::{Sweep, SweepSettings};
use triptych_bench::topology::{Topology, WorkerKind};
use wall_times::{WallTimes, Work};

/// Utilisation of the busiest worker by the curves: enough for steps of several sequences, and no queue that grows if work
/// takes twice as long.
const UTILISATION: f64 = 0.4;
/// Rate and requests of the simulation by which the rate is found.
const SLOW: (f64, usize) = (0.5, 100);
/// Rounds in which factors are found; each is several times nearer than the one before.
const ROUNDS: usize = 6;
/// Seed of the requests.
const SEED: u64 = 1;

/// Processor time of a load, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seconds {
    encode: f64,
    step: f64,
    /// Of workers that do both: it cannot be told apart, as they compute with the same threads.
    both: f64,
    /// Of all else: client, proxy, store, and the workers' other threads.
    other: f64,
}

impl Seconds {
    /// Of a cluster and its client.
    fn measured(cluster: &[(ProcessTime, ProcessTime)], client: CpuTime) -> Self {
        let mut seconds = Self { other: client.all.as_secs_f64(), ..Self::default() };
        for (before, after) in cluster {
            let used = after.time.since(before.time);
            let compute = used.compute.as_secs_f64();
            seconds.other += used.other().as_secs_f64();
            match after.worker {
                Some(WorkerKind::Encoder) => seconds.encode += compute,
                Some(WorkerKind::Pd) => seconds.step += compute,
                Some(WorkerKind::Both) => seconds.both += compute,
                None => seconds.other += compute,
            }
        }
        seconds
    }

    /// Factors on what was simulated with these curves.
    fn over(&self, simulated: &Simulation, curves: &CostCurves) -> ServiceFactors {
        let sum = |of: fn(&PoolUse) -> f64| simulated.pools.iter().map(of).sum::<f64>();
        let preprocess = sum(|pool| pool.preprocess_s);
        let encode = sum(|pool| pool.encode_s) - preprocess;
        let between = sum(|pool| pool.n_steps as f64) * curves.between_steps_us / 1e6;
        let step = sum(|pool| pool.step_s) + between;
        let (encode, step) = match self.both > 0.0 {
            true => {
                let both = ratio(self.both, encode + step);
                (both, both)
            }
            false => (ratio(self.encode, encode), ratio(self.step, step)),
        };
        let front = ratio((self.other - preprocess * encode).max(0.0), sum(|pool| pool.front_s));
        ServiceFactors { encode, step, prefill: None, front, at_s: None }
    }
}

/// One over the other; 1 where nothing was simulated.
fn ratio(measured: f64, simulated: f64) -> f64 {
    if simulated > 0.0 { measured / simulated } else { 1.0 }
}

/// Settings of a calibration.
#[derive(Clone, Debug)]
pub struct CalibrationSettings {
    /// Cores of the workers.
    pub n_cores: usize,
    /// Length of the load.
    pub window: Duration,
    /// Load before it.
    pub warm_up: Duration,
    /// Number that the content depends on: the same number gives the same bytes.
    pub salt: u64,
    /// File to which the workers write their timelines.
    pub timeline: PathBuf,
}

/// Factors of a topology's workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibrated {
    /// The factors.
    pub factors: ServiceFactors,
    /// Requests a second of the load.
    pub rate: f64,
    /// Requests.
    pub n_requests: usize,
}

/// Loads a cluster, and compares its timeline and processor time with those of its simulation. `inputs` has the workload; its SLO does not
/// matter.
///
/// # Errors
/// [`MeasureError`] for curves of other workers, if a process dies, if requests fail, and for factors that cannot be.
pub async fn calibrate<S: ClusterStarter>(
    starter: &S,
    topology: &Topology,
    inputs: &PlanInputs,
    settings: &CalibrationSettings,
) -> Result<(Arc<CostCurves>, Calibrated), MeasureError> {
    let threads = (settings.n_cores / topology.kinds().len().max(1)).max(1);
    let curves = inputs.curves.iter().find(|curves| curves.threads == threads).ok_or_else(|| {
        MeasureError::Failed(format!(
            "--topology {topology}: its workers have {threads} cores each, and no file of --curves is of such workers"
        ))
    })?;
    if curves.in_service.is_some() {
        let text = "the curves are scaled to service already: give those that `triptych profile` wrote";
        return Err(MeasureError::Failed(text.to_owned()));
    }
    let simulation =
        Simulated { inputs, candidate: candidate(shape(topology), curves, encoder_budget(topology)) };
    let rate = simulation.rate(topology)?;
    let measured = load(starter, topology, inputs, (settings, rate)).await?;
    let n_requests = measured.n_requests;
    let factors = simulation.factors(topology, rate, &measured)?;
    // Checked as part of the curves.
    curves.in_service(factors).check().map_err(|e| {
        let text = format!(
            "--topology {topology}: nothing can be told of {n_requests} requests at {rate:.2} a second"
        );
        MeasureError::failed(text, &e)
    })?;
    Ok((Arc::clone(curves), Calibrated { factors, rate, n_requests }))
}

/// Simulations of one cluster.
struct Simulated<'a> {
    inputs: &'a PlanInputs,
    candidate: Candidate,
}

impl Simulated<'_> {
    /// Factors with which simulated times are those that were measured. Work that waits for the same cores slows other work, so
    /// that they are found in rounds.
    fn factors(&self, topology: &Topology, rate: f64, load: &Load) -> Result<ServiceFactors, MeasureError> {
        let curves = Arc::clone(&self.candidate.curves);
        let by_cpu = |run: &Simulation, curves: &CostCurves| load.seconds.over(run, curves);
        let mut factors = by_cpu(&self.run(topology, rate, load.n_requests)?, &curves);
        for _ in 0..ROUNDS {
            let scaled = Arc::new(curves.in_service(factors));
            let candidate = Candidate { curves: scaled, ..self.candidate.clone() };
            let run = Self { inputs: self.inputs, candidate }.run(topology, rate, load.n_requests)?;
            let simulated = WallTimes::of(&run.spans);
            let error = |work| load.times.over(&simulated, work).unwrap_or(1.0);
            factors.encode *= error(Work::Encode);
            factors.prefill = Some(factors.prefill_steps() * error(Work::Prefill));
            factors.step *= error(Work::Decode);
        }
        Ok(factors)
    }

    fn run(&self, topology: &Topology, rate: f64, n: usize) -> Result<Simulation, MeasureError> {
        let demand = &self.inputs.demand;
        let question = self.inputs.question(Budget::Workers(topology.kinds().len()), demand);
        let offered = demand.workload.requests(rate, demand.arrivals, SEED).take(n);
        let spec = ClusterSpec { records_spans: true, ..self.candidate.spec(&question) };
        simulate(&spec, offered, SEED).map_err(|e| MeasureError::setting("cannot simulate", &e))
    }

    /// Requests a second of the load.
    fn rate(&self, topology: &Topology) -> Result<f64, MeasureError> {
        let (slow, n) = SLOW;
        let busiest =
            self.run(topology, slow, n)?.pools.iter().map(|pool| pool.utilisation).fold(0.0, f64::max);
        Ok(slow * UTILISATION / busiest.max(1e-4))
    }
}

/// A load as it was measured.
struct Load {
    seconds: Seconds,
    times: WallTimes,
    n_requests: usize,
}

/// Puts a load on a cluster that is started for it.
async fn load<S: ClusterStarter>(
    starter: &S,
    topology: &Topology,
    inputs: &PlanInputs,
    (settings, rate): (&CalibrationSettings, f64),
) -> Result<Load, MeasureError> {
    let mut cluster = starter.start(topology).await?;
    let sweep_settings = SweepSettings {
        arrivals: inputs.demand.arrivals,
        seeds: vec![SEED],
        n_requests: u64::MAX,
        max_window: settings.window,
        warm_up: Some(settings.warm_up),
        salt: settings.salt,
        topology: Some(topology.to_string()),
        ..SweepSettings::default()
    };
    let server = cluster.server()?;
    let sweep = Sweep::begin(&server, &inputs.demand.workload, &inputs.slo, &sweep_settings).await;
    let sweep = sweep.map_err(|e| MeasureError::Failed(format!("{topology}: {}", chain(&e))))?;
    let client = || CpuTime::of_self().map_err(|e| MeasureError::failed("cannot tell the client's time", &e));
    let (before, client_before, began) = (cluster.cpu_times()?, client()?, SystemTime::now());
    let run = sweep.run(RunKey { rate, seed: SEED, block: Block::WHOLE }, &|_| ()).await;
    let (after, client_after, ended) = (cluster.cpu_times()?, client()?, SystemTime::now());
    let died = cluster.dead();
    cluster.stop().await;
    if let Some(died) = died {
        return Err(MeasureError::Failed(format!("{topology}: {died}\nits measurements are void")));
    }
    let judged = run.outcomes.iter().filter(|o| run.window.has(o.due));
    let failed = judged.filter(|o| !o.is_whole()).count();
    if failed > 0 {
        let text = format!(
            "{topology}: {failed} requests failed at {rate:.2} requests/s; its measurements are void"
        );
        return Err(MeasureError::Failed(text));
    }
    let both: Vec<_> = before.into_iter().zip(after).collect();
    let text = std::fs::read_to_string(&settings.timeline)
        .map_err(|e| MeasureError::failed(format!("cannot read {}", settings.timeline.display()), &e))?;
    let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let spans = wall_times::spans(&text, since_1970(began)..since_1970(ended));
    Ok(Load {
        seconds: Seconds::measured(&both, client_after.since(client_before)),
        times: WallTimes::of(&spans),
        n_requests: run.outcomes.len(),
    })
}

mod wall_times;

#[cfg(test)]
mod tests;
