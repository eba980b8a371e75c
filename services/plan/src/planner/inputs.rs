//! Inputs of a plan, read from files and texts.

use super::budget::Budget;
use super::demand::{Demand, Named};
use super::effort::Effort;
use super::model_error::{ModelError, Residuals};
use super::question::Question;
use crate::curves::CostCurves;
use crate::simulator::spec::FrontCores;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_bench::error::MeasureError;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;

/// Inputs of a plan, except for the budget.
#[derive(Clone)]
pub struct PlanInputs {
    /// Cost curves, one for each number of threads of a worker.
    pub curves: Vec<Arc<CostCurves>>,
    /// Offered requests.
    pub demand: Named,
    /// Latency limits.
    pub slo: Slo,
    /// Cores of proxy, store and clients.
    pub frontend: FrontCores,
    /// True if the workers of a host lend each other their cores.
    pub shares_cores: bool,
    /// Size of the search.
    pub effort: Effort,
    /// Measured clusters, for the model's own error.
    pub residuals: Arc<Residuals>,
}

impl PlanInputs {
    /// The question for a budget and a demand.
    pub fn question<'a>(&self, budget: Budget, demand: &'a dyn Demand) -> Question<'a> {
        Question {
            demand,
            slo: self.slo,
            rule: Rule::default(),
            curves: self.curves.clone(),
            budget,
            front: self.frontend,
            shares_cores: self.shares_cores,
            prompt: self.curves.first().map(|curves| curves.prompt).unwrap_or_default(),
            effort: self.effort,
            error: self.error_for(self.demand.workload.text()),
        }
    }

    /// The model's error in a plan for a workload.
    pub fn error_for(&self, workload: &str) -> ModelError {
        self.residuals.error_for(workload, self.is_under_load())
    }

    /// True if all curves have times beside neighbours.
    pub fn is_under_load(&self) -> bool {
        self.curves.iter().all(|curves| curves.interference.is_some())
    }
}

/// Reads a file of residuals; without one, those of this repository.
///
/// # Errors
/// [`MeasureError::Setting`] that names the file.
pub fn read_residuals(file: Option<&Path>) -> Result<Arc<Residuals>, MeasureError> {
    let Some(path) = file else { return Ok(Arc::new(Residuals::stored())) };
    let wrong =
        |e: &dyn std::error::Error| MeasureError::setting(format!("--residuals {}", path.display()), e);
    let text = std::fs::read_to_string(path).map_err(|e| wrong(&e))?;
    Ok(Arc::new(Residuals::read(&text).map_err(|e| wrong(&e))?))
}

/// Reads files of curves; with `threads`, keeps those of workers with so many threads.
///
/// # Errors
/// [`MeasureError::Setting`] that names the file, or the numbers of threads that there are.
pub fn read_curves(files: &[PathBuf], threads: Option<usize>) -> Result<Vec<Arc<CostCurves>>, MeasureError> {
    let mut curves = Vec::new();
    for path in files {
        let wrong =
            |e: &dyn std::error::Error| MeasureError::setting(format!("--curves {}", path.display()), e);
        let text = std::fs::read_to_string(path).map_err(|e| wrong(&e))?;
        curves.push(Arc::new(CostCurves::read(&text).map_err(|e| wrong(&e))?));
    }
    let Some(threads) = threads else { return Ok(curves) };
    let found: Vec<String> = curves.iter().map(|c| c.threads.to_string()).collect();
    curves.retain(|c| c.threads == threads);
    if curves.is_empty() {
        return Err(MeasureError::Setting(format!(
            "--threads-per-worker {threads}: the curves are of workers with {} threads",
            found.join(", ")
        )));
    }
    Ok(curves)
}
