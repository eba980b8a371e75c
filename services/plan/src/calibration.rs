//! Curves in service: a small cluster near its capacity, its timeline and processor time, and the same load simulated.
//!
//! The ratio of the two is the factor of each kind of work ([`ServiceFactors`]): of the times that forwards and steps of one size
//! take, and of the processor time of client, proxy and network. Neither depends on queues, so requests, SLO and topology of
//! a plan have no part in the factors. Processor time alone would not do for forwards and steps: a thread that waits for
//! another one of its worker uses none.
//!
//! The factors are of a busy cluster, where goodput is decided: steps of a worker with several cores take longer where it is seldom
//! busy. A first load, under which no queue grows if all takes twice as long as the curves say, tells the rate.

use crate::curves::{CostCurves, ServiceFactors};
use crate::planner::inputs::PlanInputs;
use crate::planner::{Budget, Candidate, Named};
use crate::simulator::result::PoolUse;
use crate::simulator::{ClusterSpec, Simulation, simulate};
use crate::validation::candidate;
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

/// Utilisation of the busiest worker by the curves, in the first load.
const FIRST_UTILISATION: f64 = 0.4;
/// Part of the window that the first load lasts.
const FIRST_WINDOW: f64 = 0.5;
/// Rate and requests of the simulation by which the rate is found.
const SLOW: (f64, usize) = (0.5, 100);
/// Rounds in which factors are found; each is several times nearer than the one before.
const ROUNDS: usize = 6;
/// Seed of the requests.
const SEED: u64 = 1;
/// That of the load before.
const WARM_UP_SEED: u64 = 2;

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

    /// Factors of forwards and of steps, on what was simulated with these curves.
    fn compute_factors(&self, simulated: &Simulation, curves: &CostCurves) -> (f64, f64) {
        let sum = |of: fn(&PoolUse) -> f64| simulated.pools.iter().map(of).sum::<f64>();
        let encode = sum(|pool| pool.encode_s) - preprocess_s(simulated);
        let between = sum(|pool| pool.n_steps as f64) * curves.between_steps_us / 1e6;
        let step = sum(|pool| pool.step_s) + between;
        match self.both > 0.0 {
            true => {
                let both = ratio(self.both, encode + step);
                (both, both)
            }
            false => (ratio(self.encode, encode), ratio(self.step, step)),
        }
    }
}

/// Of preprocessing, in seconds.
fn preprocess_s(simulated: &Simulation) -> f64 {
    simulated.pools.iter().map(|pool| pool.preprocess_s).sum()
}

/// Of client, proxy and network, in seconds.
fn front_s(simulated: &Simulation) -> f64 {
    simulated.pools.iter().map(|pool| pool.front_s).sum()
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
    /// Utilisation of the busiest worker, 0 to 1, both excluded.
    pub utilisation: f64,
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

/// Loads a cluster, and compares its timeline and processor time with those of its simulation. `inputs` has the workload; its
/// SLO does not matter.
///
/// # Errors
/// [`MeasureError`] for curves of other workers, if a process dies, if requests fail, and for factors that cannot be.
pub async fn calibrate<S: ClusterStarter>(
    starter: &S,
    topology: &Topology,
    inputs: &PlanInputs,
    settings: &CalibrationSettings,
) -> Result<(Arc<CostCurves>, Calibrated), MeasureError> {
    let curves = curves_of(topology, inputs, settings.n_cores)?;
    let simulated = Simulated::new(topology, inputs, curves);
    let mut cluster = starter.start(topology).await?;
    let measured = loads(&mut cluster, &simulated, settings).await;
    cluster.stop().await;
    let (whole, text) = measured?;
    let factors = simulated.factors(&whole, text.as_ref())?;
    let n_requests = whole.n_requests + text.as_ref().map_or(0, |text| text.n_requests);
    let rate = whole.rate;
    // Checked as part of the curves.
    curves.in_service(factors).check().map_err(|e| {
        let text = format!(
            "--topology {topology}: nothing can be told of {n_requests} requests at {rate:.2} a second"
        );
        MeasureError::failed(text, &e)
    })?;
    Ok((Arc::clone(curves), Calibrated { factors, rate, n_requests }))
}

/// Curves of a topology's workers, which can be scaled.
fn curves_of<'a>(
    topology: &Topology,
    inputs: &'a PlanInputs,
    n_cores: usize,
) -> Result<&'a Arc<CostCurves>, MeasureError> {
    let threads = (n_cores / topology.kinds().len().max(1)).max(1);
    let curves = inputs.curves.iter().find(|curves| curves.threads == threads).ok_or_else(|| {
        MeasureError::Failed(format!(
            "--topology {topology}: its workers have {threads} cores each, and no file of --curves is of such workers"
        ))
    })?;
    if curves.in_service.is_some() {
        let text = "the curves are scaled to service already: give those that `triptych profile` wrote";
        return Err(MeasureError::Failed(text.to_owned()));
    }
    if curves.pipelining.is_some() && topology.kinds().contains(&WorkerKind::Pd) {
        let text = "steps of its PD workers are pipelined on their device, so that a timeline does not tell what they take; \
                    give workers with both halves, as in --topology dp2";
        return Err(MeasureError::Failed(format!("--topology {topology}: {text}")));
    }
    Ok(curves)
}

/// A load at the utilisation that is asked for, and if its workload has requests without items beside others, one of such requests
/// alone: what an item costs client and proxy is the difference.
async fn loads<C: RunningCluster>(
    cluster: &mut C,
    simulated: &Simulated<'_>,
    settings: &CalibrationSettings,
) -> Result<(Load, Option<Load>), MeasureError> {
    let window = settings.window.mul_f64(FIRST_WINDOW);
    let first = load(cluster, simulated, simulated.rate(FIRST_UTILISATION)?, window, settings).await?;
    let scaled = simulated.with(simulated.candidate.curves.in_service(simulated.factors(&first, None)?));
    let busy = async |cluster: &mut C, scaled: &Simulated<'_>| {
        load(cluster, scaled, scaled.rate(settings.utilisation)?, settings.window, settings).await
    };
    let whole = busy(cluster, &scaled).await?;
    let text = match scaled.without_items() {
        Some(scaled) => Some(busy(cluster, &scaled).await?),
        None => None,
    };
    Ok((whole, text))
}

/// Simulations of one cluster under one workload.
struct Simulated<'a> {
    topology: &'a Topology,
    inputs: &'a PlanInputs,
    demand: Named,
    candidate: Candidate,
}

impl<'a> Simulated<'a> {
    fn new(topology: &'a Topology, inputs: &'a PlanInputs, curves: &Arc<CostCurves>) -> Self {
        let candidate = candidate(topology, curves, None);
        Self { topology, inputs, demand: inputs.demand.clone(), candidate }
    }

    /// The same cluster under the workload without items.
    fn without_items(&self) -> Option<Self> {
        let workload = self.demand.workload.without_items()?;
        let demand = Named { workload, ..self.demand.clone() };
        Some(Self { demand, candidate: self.candidate.clone(), ..*self })
    }

    /// The same cluster with other curves.
    fn with(&self, curves: CostCurves) -> Self {
        let candidate = Candidate { curves: Arc::new(curves), ..self.candidate.clone() };
        Self { demand: self.demand.clone(), candidate, ..*self }
    }

    /// Factors with which simulated times are those that were measured. Work that waits for the same cores slows other work, and
    /// tokens of fast steps share messages, so that they are found in rounds.
    fn factors(&self, load: &Load, text: Option<&Load>) -> Result<ServiceFactors, MeasureError> {
        let curves = &self.candidate.curves;
        let first = self.run(load)?;
        let (encode, step) = load.seconds.compute_factors(&first, curves);
        let other_s = load.seconds.other - preprocess_s(&first) * encode;
        let item = text.map(|_| 1.0);
        let mut factors =
            ServiceFactors { encode, step, between_us: None, prefill: None, front: 1.0, item, at_s: None }
                .bounded();
        for _ in 0..ROUNDS {
            let scaled = curves.in_service(factors);
            let scaled_between_us = scaled.between_steps_us;
            let run = self.with(scaled.clone()).run(load)?;
            let simulated = WallTimes::of(&run.spans);
            let error = |work| load.times.over(&simulated, work).unwrap_or(1.0);
            match text.zip(self.without_items()) {
                Some((text, of_text)) => {
                    let error = ratio(text.seconds.other, front_s(&of_text.with(scaled.clone()).run(text)?));
                    let mut free_items = scaled;
                    (free_items.front.item_us, free_items.front.item_byte_us) = (0.0, 0.0);
                    let without_s = front_s(&self.with(free_items).run(load)?);
                    let item_error = ratio((other_s - without_s * error).max(0.0), front_s(&run) - without_s);
                    factors.front *= error;
                    factors.item = Some(factors.items() * item_error);
                }
                None => factors.front *= ratio(other_s.max(0.0), front_s(&run)),
            }
            factors.encode *= error(Work::Encode);
            factors.prefill = Some(factors.prefill_steps() * error(Work::Prefill));
            let more_us = load.times.less_us(&simulated, Work::Between).unwrap_or(0.0);
            factors.between_us = Some((scaled_between_us + more_us).max(0.0));
            factors.step *= error(Work::Decode);
            // Of work that another's time hides no round comes nearer.
            factors = factors.bounded();
        }
        Ok(factors)
    }

    /// The load as it is simulated.
    fn run(&self, load: &Load) -> Result<Simulation, MeasureError> {
        self.simulate(load.rate, load.n_requests)
    }

    fn simulate(&self, rate: f64, n: usize) -> Result<Simulation, MeasureError> {
        let demand = &self.demand;
        let question = self.inputs.question(Budget::Workers(self.topology.kinds().len()), demand);
        let offered = demand.workload.requests(rate, demand.arrivals, SEED).take(n);
        let spec = ClusterSpec { records_spans: true, ..self.candidate.spec(&question) };
        simulate(&spec, offered, SEED).map_err(|e| MeasureError::setting("cannot simulate", &e))
    }

    /// Requests a second at which the busiest worker has a utilisation by the curves.
    fn rate(&self, utilisation: f64) -> Result<f64, MeasureError> {
        let (slow, n) = SLOW;
        let busiest = self.simulate(slow, n)?.pools.iter().map(|pool| pool.utilisation).fold(0.0, f64::max);
        Ok(slow * utilisation / busiest.max(1e-4))
    }
}

/// A load as it was measured.
struct Load {
    seconds: Seconds,
    times: WallTimes,
    /// Requests a second.
    rate: f64,
    n_requests: usize,
}

/// Puts a load on a cluster.
async fn load<C: RunningCluster>(
    cluster: &mut C,
    simulated: &Simulated<'_>,
    rate: f64,
    window: Duration,
    settings: &CalibrationSettings,
) -> Result<Load, MeasureError> {
    let Simulated { topology, inputs, demand, .. } = simulated;
    let sweep_settings = SweepSettings {
        arrivals: demand.arrivals,
        seeds: vec![SEED],
        n_requests: u64::MAX,
        max_window: window,
        warm_up: Some(Duration::ZERO),
        salt: settings.salt,
        topology: Some(topology.to_string()),
        ..SweepSettings::default()
    };
    let server = cluster.server()?;
    let begin = async |settings: &SweepSettings| {
        let sweep = Sweep::begin(&server, &demand.workload, &inputs.slo, settings).await;
        sweep.map_err(|e| MeasureError::Failed(format!("{topology}: {}", chain(&e))))
    };
    // A run of its own, not the beginning of the measured one: a heap that grows takes processor time once.
    let warm_up = SweepSettings {
        max_window: settings.warm_up,
        warm_up: Some(Duration::ZERO),
        ..sweep_settings.clone()
    };
    begin(&warm_up).await?.run(RunKey { rate, seed: WARM_UP_SEED, block: Block::WHOLE }, &|_| ()).await;
    let sweep = begin(&sweep_settings).await?;
    let client = || CpuTime::of_self().map_err(|e| MeasureError::failed("cannot tell the client's time", &e));
    let (before, client_before, began) = (cluster.cpu_times()?, client()?, SystemTime::now());
    let run = sweep.run(RunKey { rate, seed: SEED, block: Block::WHOLE }, &|_| ()).await;
    let (after, client_after, ended) = (cluster.cpu_times()?, client()?, SystemTime::now());
    if let Some(died) = cluster.dead() {
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
        rate,
        n_requests: run.outcomes.len(),
    })
}

mod wall_times;

#[cfg(test)]
mod tests;
