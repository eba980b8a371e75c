//! Inputs of a plan, read from files and texts.

use super::budget::Budget;
use super::demand::{Demand, Named};
use super::effort::Effort;
use super::model_error::{CurveKind, ModelError, Residuals};
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
        self.residuals.error_for(workload, self.curve_kind())
    }

    /// The kind that all curves are of.
    pub fn curve_kind(&self) -> CurveKind {
        if self.curves.iter().all(|curves| curves.in_service.is_some()) {
            CurveKind::InService
        } else if self.curves.iter().all(|curves| curves.interference.is_some()) {
            CurveKind::UnderLoad
        } else {
            CurveKind::Idle
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::sample::curves;
    use crate::curves::{ApiEncoders, ApiSource};
    use crate::planner::{Budget, plan};
    use triptych_bench::arrivals::Arrivals;
    use triptych_bench::workload::Workload;

    /// Curves of a server that prefills and decodes three times as fast as ours, and encodes as slowly.
    fn fast_pd() -> CostCurves {
        let mut pd = curves();
        for point in &mut pd.step {
            point.p50_us /= 3.0;
            point.p95_us /= 3.0;
        }
        pd.api = Some(ApiSource {
            engine: Some("vLLM 0.32".into()),
            url: "http://gpu:8000".into(),
            encoders: ApiEncoders::Colocated,
            kv_block_tokens: Some(16),
            max_sequences: None,
            unmeasured: Vec::new(),
        });
        pd
    }

    #[test]
    fn a_plan_compares_ours_with_our_encoders_before_vllm_and_vllm_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = |name: &str, curves: &CostCurves| {
            let path = dir.path().join(name);
            std::fs::write(&path, serde_json::to_string(curves).expect("JSON")).expect("a file");
            path
        };
        let (ours, pd) = (file("ours.json", &curves()), file("pd.json", &fast_pd()));
        let ours = read_curves(&[ours], None).expect("curves");
        let all = with_pd_curves(ours.clone(), &[pd]).expect("joined curves");
        let encoders: Vec<_> = all.iter().map(|c| c.api.as_ref().map(|api| api.encoders)).collect();
        assert_eq!(encoders, [None, Some(ApiEncoders::Ours), Some(ApiEncoders::Colocated)]);
        let workload = Workload::parse("epd-short:images=1,text=100,output=20").expect("a workload");
        let inputs = PlanInputs {
            curves: all,
            demand: Named { workload, arrivals: Arrivals::Own },
            slo: "ttft=2s".parse().expect("an SLO"),
            frontend: FrontCores::Own,
            shares_cores: false,
            residuals: read_residuals(None).expect("the residuals of this repository"),
            effort: Effort { requests: 60, seeds: 1, what_if: false, ..Effort::QUICK },
        };
        let found = plan(&inputs.question(Budget::Workers(3), &inputs.demand), &|_| ()).expect("a plan");
        let names: Vec<_> = found
            .simulated
            .iter()
            .map(|one| one.name.as_str())
            .chain(found.pruned.iter().map(|p| p.0.as_str()))
            .collect();
        for name in [
            "2e1pd (1 core each)",
            "2e1pd (1 core each, our encoders before vLLM 0.32)",
            "dp3 (1 core each, vLLM 0.32)",
        ] {
            assert!(names.contains(&name), "{name} is not in {names:?}");
        }
        assert!(
            !names.iter().any(|name| name.starts_with("dp3") && name.contains("our encoders")),
            "{names:?}"
        );
        assert!(
            found.best.commands.iter().any(|line| line.starts_with("vllm serve")),
            "{:?}",
            found.best.commands
        );
        let other = CostCurves { model: "other".into(), ..fast_pd() };
        let refused =
            with_pd_curves(ours, &[file("other.json", &other)]).expect_err("another model").to_string();
        assert!(refused.contains("--pd-curves") && refused.contains("\"other\""), "{refused}");
    }
}
