//! Simulation of the clusters of a publication under its loads.

use super::file::{Figure, Metric, PaperCluster, ReadPaper, ServerSettings};
use crate::curves::CostCurves;
use crate::simulator::spec::{EncoderSpec, PdSpec, PoolRole, PoolSpec};
use crate::simulator::{ClusterSpec, simulate};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::error::MeasureError;
use triptych_bench::judge::{JudgedWindow, Rule, judge};
use triptych_bench::outcome::Outcome;
use triptych_bench::workload::Workload;
use triptych_encoder::BatchLimits;
use triptych_encoder::order::JobOrder;
use triptych_engine::scheduler::AdmissionOrder;
use triptych_pd::EngineSettings;

/// Longer than any run: the servers that were measured refuse nothing, and wait.
const PATIENCE: Duration = Duration::from_secs(3600);
/// More than any run has in flight.
const UNLIMITED: usize = 1 << 20;

/// Figures of a publication, as simulated.
#[derive(Clone, Debug)]
pub struct SimulatedPaper {
    /// The publication.
    pub read: ReadPaper,
    /// Of each load, for each of its figures, a value by the name of the cluster.
    pub values: Vec<Vec<BTreeMap<String, f64>>>,
}

/// A cluster under a load.
struct Case<'a> {
    read: &'a ReadPaper,
    spec: ClusterSpec,
    workload: &'a Workload,
    /// Runs by their index in the rates' order, each at most once.
    runs: BTreeMap<u64, Vec<Outcome>>,
}

/// Simulates every figure; `step` is told what is simulated.
///
/// # Errors
/// [`MeasureError`] for a cluster that cannot run.
pub fn simulated(read: ReadPaper, step: &dyn Fn(&str)) -> Result<SimulatedPaper, MeasureError> {
    let mut values = Vec::new();
    for (load, workload) in read.paper.workloads.iter().zip(&read.workloads) {
        let mut found = vec![BTreeMap::new(); load.figures.len()];
        for (cluster, curves) in read.paper.clusters.iter().zip(&read.curves) {
            step(&format!("{}, {}", load.workload, cluster.name));
            let spec = spec(cluster, curves, read.paper.server)?;
            let mut case = Case { read: &read, spec, workload, runs: BTreeMap::new() };
            for (figure, found) in load.figures.iter().zip(&mut found) {
                found.insert(cluster.name.clone(), case.value(figure)?);
            }
        }
        values.push(found);
    }
    Ok(SimulatedPaper { read, values })
}

/// A cluster for the simulator, with the settings of the servers.
fn spec(
    cluster: &PaperCluster,
    [encoder_curves, pd_curves]: &[Arc<CostCurves>; 2],
    server: ServerSettings,
) -> Result<ClusterSpec, MeasureError> {
    let engine = EngineSettings {
        self_kv_bytes: Some(server.kv_gib << 30),
        token_budget: server.token_budget,
        decode_share: server.decode_share,
        max_sequences: server.max_sequences,
        max_waiting: UNLIMITED,
        max_requests: UNLIMITED,
        // A message for each token.
        stream_interval: Duration::ZERO,
        ..EngineSettings::default()
    };
    let pd = PdSpec { engine, order: AdmissionOrder::Arrival, ..PdSpec::default() };
    let batch =
        BatchLimits { max_tokens: server.batch_tokens, order: JobOrder::Arrival, ..BatchLimits::default() };
    let encoder = EncoderSpec { batch, max_jobs: UNLIMITED, ..EncoderSpec::default() };
    let budget = cluster.encoder_budget().map_err(MeasureError::Setting)?;
    let pool = |name: &str, workers, role, curves: &Arc<CostCurves>| PoolSpec {
        name: name.to_owned(),
        workers,
        role,
        curves: Arc::clone(curves),
        lent: None,
    };
    let pools = match cluster.workers() {
        (0, n) => vec![pool("both", n, PoolRole::Both { pd, encoder, encoder_budget: budget }, pd_curves)],
        (n_encoders, n_pds) => vec![
            pool("encoder", n_encoders, PoolRole::Encoder(encoder), encoder_curves),
            pool("pd", n_pds, PoolRole::Pd(pd), pd_curves),
        ],
    };
    let mut spec = ClusterSpec::new(pools);
    spec.prompt = pd_curves.prompt;
    spec.proxy.roles = cluster.roles();
    spec.proxy.max_in_flight = UNLIMITED;
    spec.proxy.encodes.attempt_time = PATIENCE;
    spec.proxy.encodes.max_time = PATIENCE;
    spec.request_time = PATIENCE;
    spec.patience = PATIENCE;
    Ok(spec)
}

impl Case<'_> {
    fn value(&mut self, figure: &Figure) -> Result<f64, MeasureError> {
        match figure.rate {
            Some(rate) => Ok(measured(figure.metric, self.run(rate)?)),
            None => self.goodput(),
        }
    }

    fn run(&mut self, rate: f64) -> Result<&[Outcome], MeasureError> {
        let key = rate.to_bits();
        if !self.runs.contains_key(&key) {
            let offered = self.workload.requests(rate, Arrivals::Own, 1).take(self.read.paper.n_requests);
            let run = simulate(&self.spec, offered, 1);
            let run = run.map_err(|e| MeasureError::setting("the cluster cannot be simulated", &e))?;
            self.runs.insert(key, run.outcomes);
        }
        Ok(self.runs.get(&key).map_or(&[], Vec::as_slice))
    }

    /// The highest of the rates that is within the SLO, by halving: latencies grow with the rate. 0: none is.
    fn goodput(&mut self) -> Result<f64, MeasureError> {
        let rates = self.read.paper.rates.clone();
        let (mut low, mut high) = (0, rates.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let slo = self.read.slo;
            let outcomes = self.run(rates[middle])?;
            let last = outcomes.iter().map(|o| o.due).max().unwrap_or_default();
            let window = JudgedWindow { from: Duration::ZERO, to: last + Duration::from_nanos(1) };
            // The percentiles alone are what was published.
            match judge(outcomes, window, &slo, &Rule::default()).percentiles_passed {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(low.checked_sub(1).map_or(0.0, |i| rates[i]))
    }
}

/// A quantity of a run, over all of its requests. Infinite if it has none.
fn measured(metric: Metric, outcomes: &[Outcome]) -> f64 {
    let ms = |of: fn(&Outcome) -> Option<Duration>| {
        let mut values: Vec<f64> = outcomes.iter().filter_map(of).map(|t| t.as_secs_f64() * 1e3).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    match metric {
        Metric::TtftP99Ms => p99(&ms(Outcome::ttft)),
        Metric::TpotP99Ms => p99(&ms(Outcome::tpot)),
        Metric::TtftMeanMs => mean(&ms(Outcome::ttft)),
        Metric::TpotMeanMs => mean(&ms(Outcome::tpot)),
        Metric::Throughput | Metric::Goodput => {
            let last = outcomes.iter().map(|o| o.ended).max().unwrap_or_default();
            let first = outcomes.iter().map(|o| o.due).min().unwrap_or_default();
            let n = outcomes.iter().filter(|o| o.is_whole()).count();
            n as f64 / last.saturating_sub(first).as_secs_f64().max(f64::MIN_POSITIVE)
        }
    }
}

fn p99(sorted: &[f64]) -> f64 {
    let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::INFINITY)
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { f64::INFINITY } else { values.iter().sum::<f64>() / values.len() as f64 }
}
