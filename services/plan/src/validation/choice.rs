//! The cluster that a plan recommends among measured ones.

use super::report::{candidate, encoder_budget, shape};
use crate::curves::CostCurves;
use crate::planner::inputs::PlanInputs;
use crate::planner::{self, Budget, Effort, Named, Question, SearchedCandidate, Shape};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::error::MeasureError;
use triptych_bench::slo::Slo;
use triptych_bench::topology::Topology;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Seeds of the expected spread of one measurement.
const MANY_SEEDS: u64 = 12;

/// Length of the runs of a measurement.
#[derive(Clone, Copy)]
pub struct MeasurementLength {
    /// Judged requests of a run.
    pub n_requests: u64,
    /// Longest judged window.
    pub longest: Duration,
}

/// Expected results of measured clusters in runs of that length, of each with the SLO that its PD workers were told, if any; the one
/// that a plan recommends is first.
///
/// # Errors
/// [`MeasureError::Setting`] if a cluster cannot be simulated.
pub fn choose(
    inputs: &PlanInputs,
    demand: &Named,
    clusters: Vec<(Topology, Arc<CostCurves>, Option<Slo>)>,
    length: MeasurementLength,
) -> Result<Vec<(String, SearchedCandidate)>, MeasureError> {
    let (names, candidates): (Vec<_>, Vec<_>) = clusters
        .into_iter()
        .map(|(t, curves, told)| {
            ((t.to_string(), shape(&t), encoder_budget(&t)), candidate(&t, &curves, told.as_ref()))
        })
        .unzip();
    if candidates.is_empty() {
        return Ok(Vec::new());
    }
    let question = inputs.question(Budget::Workers(usize::MAX), demand);
    let effort = Effort {
        requests: usize::try_from(length.n_requests).unwrap_or(usize::MAX),
        longest: length.longest,
        seeds: question.effort.seeds.max(MANY_SEEDS),
        ..question.effort
    };
    let found = planner::choose(&Question { effort, ..question }, candidates);
    let found = found.map_err(|e| MeasureError::setting("no plan", &e))?;
    let name = |found: SearchedCandidate| {
        let is = |(_, shape, budget): &&(String, Shape, EncoderBudget)| {
            *shape == found.candidate.shape && *budget == found.candidate.settings.encoder_budget
        };
        let name = names.iter().find(is).map(|(name, ..)| name.clone());
        (name.unwrap_or_default(), found)
    };
    Ok(found.into_iter().map(name).collect())
}
