//! Inputs of a plan, read from files and texts.

use super::budget::Budget;
use super::demand::{Demand, Named};
use super::effort::Effort;
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
    /// Size of the search.
    pub effort: Effort,
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
            prompt: self.curves.first().map(|curves| curves.prompt).unwrap_or_default(),
            effort: self.effort,
        }
    }
}

/// Reads files of curves; with `threads`, keeps those of workers with so many threads.
///
/// # Errors
/// [`MeasureError::Setting`] that names the file, or the numbers of threads that there are.
pub fn read_curves(files: &[PathBuf], threads: Option<usize>) -> Result<Vec<Arc<CostCurves>>, MeasureError> {
    let read = |path: &PathBuf| read_file("--curves", path).map(Arc::new);
    let mut curves = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
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

/// The curves, each with another engine's PD workers of its size too, and those workers alone.
///
/// # Errors
/// [`MeasureError::Setting`] that names a file which fits none of the curves.
pub fn with_pd_curves(
    mut curves: Vec<Arc<CostCurves>>,
    files: &[PathBuf],
) -> Result<Vec<Arc<CostCurves>>, MeasureError> {
    let ours = curves.clone();
    for path in files {
        let pd = read_file("--pd-curves", path)?;
        let mut refused = None;
        let n_before = curves.len();
        for encoders in &ours {
            match encoders.joined_to(&pd) {
                Ok(joined) => curves.push(Arc::new(joined)),
                Err(e) => refused = Some(e),
            }
        }
        if let Some(e) = refused.filter(|_| curves.len() == n_before) {
            return Err(MeasureError::setting(format!("--pd-curves {}", path.display()), &e));
        }
        curves.push(Arc::new(pd));
    }
    Ok(curves)
}

fn read_file(flag: &str, path: &Path) -> Result<CostCurves, MeasureError> {
    let wrong = |e: &dyn std::error::Error| MeasureError::setting(format!("{flag} {}", path.display()), e);
    let text = std::fs::read_to_string(path).map_err(|e| wrong(&e))?;
    CostCurves::read(&text).map_err(|e| wrong(&e))
}
