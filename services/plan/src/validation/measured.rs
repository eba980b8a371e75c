//! Validation by measurements: each topology is started, its capacity is searched, and it is loaded with parts of that. The
//! same requests are then simulated. For held-out workloads the goodput of the planned topology is compared with the best.

use super::choice::{MeasurementLength, choose};
use super::report::{LOADS, LoadComparison, Regret, Validation, candidate, compare};
use crate::curves::CostCurves;
use crate::planner::inputs::PlanInputs;
use crate::planner::{self, Budget, Named};
use crate::simulator::simulate;
use std::sync::Arc;
use triptych_bench::blocks::{Block, RunKey};
use triptych_bench::cluster::{ClusterStarter, RunningCluster};
use triptych_bench::error::{MeasureError, chain};
use triptych_bench::outcome::Outcome;
use triptych_bench::rates::Rates;
use triptych_bench::result::Goodput;
use triptych_bench::sweep::{Server, Sweep, SweepEvent, SweepSettings, run_sweep};
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;

/// First rate of a search, as a part of the simulated goodput.
const CAUTION: f64 = 0.8;
/// Seed of the requests whose latencies are compared.
const SEED: u64 = 1;

/// Settings of a validation by measurements.
#[derive(Clone, Debug)]
pub struct ValidationSettings {
    /// Settings of every sweep; a search fills in its first rate, a sweep its topology.
    pub sweep: SweepSettings,
    /// Relative difference of two rates at which a search ends.
    pub resolution: f64,
    /// Cores of the workers of each cluster.
    pub n_cores: usize,
    /// Clusters that are measured.
    pub topologies: Vec<Topology>,
}

/// A validation under way.
pub struct MeasuredValidation<'a, S> {
    /// Inputs of the plan.
    pub inputs: &'a PlanInputs,
    /// Starts the clusters.
    pub starter: &'a S,
    /// Settings of the measurements.
    pub settings: &'a ValidationSettings,
    /// Gets lines of progress.
    pub report: &'a (dyn Fn(&str) + Sync),
    /// Stores the comparisons so far.
    pub save: &'a dyn Fn(&Validation) -> Result<(), MeasureError>,
    /// The comparisons so far.
    pub validation: Validation,
}

impl<S: ClusterStarter> MeasuredValidation<'_, S> {
    fn sweep_settings(&self, topology: &Topology, first: Option<f64>) -> SweepSettings {
        SweepSettings {
            rates: Rates::Search { first, resolution: self.settings.resolution },
            topology: Some(topology.to_string()),
            ..self.settings.sweep.clone()
        }
    }

    /// Goodput of a topology, searched from what is expected of it.
    async fn capacity(
        &mut self,
        server: &Server,
        topology: &Topology,
        w: &Workload,
    ) -> Result<Goodput, MeasureError> {
        let first = self.expected(topology, w).await?;
        let settings = self.sweep_settings(topology, first);
        let listener = |event: SweepEvent<'_>| {
            if let SweepEvent::Rate(rate) = event {
                let word = if rate.verdict.passed { "passes" } else { "fails" };
                (self.report)(&format!("{topology} {}: {} {word}", w.text(), rate.rate_text()));
            }
        };
        let found = run_sweep(server, w, &self.inputs.slo, &settings, &listener).await;
        let found = found.map_err(|e| MeasureError::Failed(format!("{topology}: {}", chain(&e))))?;
        Ok(found.goodput)
    }

    /// Compares latencies of every topology at parts of its capacity.
    ///
    /// # Errors
    /// [`MeasureError`] if a cluster cannot start or dies: its measurements are void.
    pub async fn latencies(&mut self) -> Result<(), MeasureError> {
        let workload = self.inputs.demand.workload.clone();
        for topology in self.settings.topologies.clone() {
            let Some(curves) = self.curves_of(&topology) else { continue };
            let mut cluster = self.starter.start(&topology).await?;
            let server = cluster.server()?;
            let capacity = self.capacity(&server, &topology, &workload).await?.rate.unwrap_or(0.0);
            if capacity == 0.0 {
                let none = format!(
                    "{topology} meets the SLO at no rate of {}; nothing is compared",
                    workload.text()
                );
                self.validation.warnings.push(none);
                cluster.stop().await;
                continue;
            }
            let settings = self.sweep_settings(&topology, None);
            let sweep = Sweep::begin(&server, &workload, &self.inputs.slo, &settings).await;
            let sweep = sweep.map_err(|e| MeasureError::Failed(format!("{topology}: {}", chain(&e))))?;
            for (load, goal) in LOADS {
                let rate = capacity * load;
                let measured = sweep.run(RunKey { rate, seed: SEED, block: Block::WHOLE }, &|_| ()).await;
                let simulated = self.simulate(&topology, &curves, rate, measured.outcomes.len()).await?;
                let pairs = compare(&measured.outcomes, &simulated, measured.window, &self.inputs.slo);
                let workload = workload.text().to_owned();
                let topology = topology.to_string();
                self.validation.compared.push(LoadComparison {
                    workload,
                    topology,
                    load,
                    rate,
                    goal,
                    slowness: 1.0,
                    pairs,
                    drifted: Vec::new(),
                });
                (self.save)(&self.validation)?;
            }
            let died = cluster.dead();
            cluster.stop().await;
            if let Some(died) = died {
                return Err(MeasureError::Failed(format!("{topology}: {died}\nits measurements are void")));
            }
        }
        Ok(())
    }

    /// Curves for as many cores as a worker of the topology has.
    fn curves_of(&mut self, topology: &Topology) -> Option<Arc<CostCurves>> {
        let each = self.settings.n_cores / topology.kinds().len().max(1);
        let found = self.inputs.curves.iter().find(|c| c.threads == each.max(1)).map(Arc::clone);
        if found.is_none() {
            let missing = format!(
                "{topology} is not simulated: its workers have {each} cores each, and no file of --curves is of such workers"
            );
            if !self.validation.warnings.contains(&missing) {
                self.validation.warnings.push(missing);
            }
        }
        found
    }

    async fn simulate(
        &self,
        topology: &Topology,
        curves: &Arc<CostCurves>,
        rate: f64,
        n: usize,
    ) -> Result<Vec<Outcome>, MeasureError> {
        let candidate = candidate(topology, curves, Some(&self.inputs.slo));
        let demand = self.inputs.demand.clone();
        let question = self.inputs.question(Budget::Workers(topology.kinds().len()), &self.inputs.demand);
        let spec = candidate.spec(&question);
        let arrivals = self.inputs.demand.arrivals;
        blocking(move || {
            let offered = demand.workload.requests(rate, arrivals, SEED).take(n);
            let run =
                simulate(&spec, offered, SEED).map_err(|e| MeasureError::setting("cannot simulate", &e))?;
            Ok(run.outcomes)
        })
        .await
    }

    /// Compares the cluster that a plan recommends for a workload with the measured goodput of every topology.
    ///
    /// # Errors
    /// [`MeasureError`] if a cluster cannot start.
    pub async fn regret(&mut self, workload: &Workload) -> Result<(), MeasureError> {
        let mut candidates = Vec::new();
        for topology in self.settings.topologies.clone() {
            let told = Some(self.inputs.slo);
            candidates.extend(self.curves_of(&topology).map(|curves| (topology, curves, told)));
        }
        let inputs = self.inputs.clone();
        let demand = Named { workload: workload.clone(), arrivals: inputs.demand.arrivals };
        let sweep = &self.settings.sweep;
        let n_seeds = sweep.seeds.len();
        let length = MeasurementLength { n_requests: sweep.n_requests, longest: sweep.max_window };
        let found = blocking(move || choose(&inputs, &demand, candidates, length)).await?;
        let mut measured = Vec::new();
        for topology in self.settings.topologies.clone() {
            let cluster = self.starter.start(&topology).await?;
            let server = cluster.server()?;
            let goodput = self.capacity(&server, &topology, workload).await?;
            cluster.stop().await;
            measured.push((topology.to_string(), goodput.rate.unwrap_or(0.0), goodput.fails_at));
        }
        let error = self.inputs.error_for(workload.text());
        self.validation.regrets.push(Regret::new(workload.text(), measured, &found, (n_seeds, error)));
        (self.save)(&self.validation)
    }

    /// First rate of a search: a little below the simulated goodput, if the topology can be simulated.
    async fn expected(&mut self, topology: &Topology, w: &Workload) -> Result<Option<f64>, MeasureError> {
        let Some(curves) = self.curves_of(topology) else { return Ok(None) };
        let candidate = candidate(topology, &curves, Some(&self.inputs.slo));
        let n = topology.kinds().len();
        let inputs = self.inputs.clone();
        let demand = Named { workload: w.clone(), arrivals: inputs.demand.arrivals };
        let rate = blocking(move || {
            let found = planner::expected(&inputs.question(Budget::Workers(n), &demand), candidate);
            found.map(|found| found.rate).map_err(|e| MeasureError::setting("cannot simulate", &e))
        });
        Ok(Some(rate.await? * CAUTION).filter(|rate| *rate > 0.0))
    }
}

/// Runs a simulation off the async workers.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MeasureError> + Send + 'static,
) -> Result<T, MeasureError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| MeasureError::failed("planning ended early", &e))?
}
