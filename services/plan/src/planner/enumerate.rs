//! Clusters that fit a budget.

use super::bound;
use super::candidate::{Candidate, Shape, WorkerSettings};
use super::means::Means;
use super::question::Question;
use super::towers::TowerWorkers;
use crate::curves::CostCurves;
use std::collections::BTreeSet;
use std::sync::Arc;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Most workers for which every ratio is a candidate; above, only ratios near the balanced one are.
const ALL_RATIOS: usize = 10;
/// Shares of encoders around the balanced one.
const AROUND: [f64; 9] = [0.4, 0.6, 0.75, 0.87, 1.0, 1.15, 1.3, 1.6, 2.2];
/// Encoder token budgets of workers with both; the first is the default.
pub const ENCODER_BUDGETS: [EncoderBudget; 3] =
    [EncoderBudget::Automatic, EncoderBudget::Tokens(256), EncoderBudget::Unlimited];

/// All clusters that fit the budget.
pub fn all(question: &Question<'_>, means: &Means) -> Vec<Candidate> {
    let mut all = Vec::new();
    for curves in &question.curves {
        let workers = question.budget.workers(curves.threads);
        let candidate = |shape, settings| Candidate { shape, curves: Arc::clone(curves), settings };
        let settings = WorkerSettings::with_slo(&question.slo, curves);
        let both = match workers {
            0 => continue,
            1 => Shape::Colocated,
            workers => Shape::Replicated { workers },
        };
        all.extend(
            encoder_budgets(curves, means)
                .iter()
                .map(|&encoder_budget| candidate(both, WorkerSettings { encoder_budget, ..settings })),
        );
        for encoders in ratios(workers, curves, means) {
            let pds = workers - encoders;
            let towers = towers(encoders, workers, (curves, means));
            let shapes = towers.into_iter().map(|encoders| Shape::Towers { encoders, pds });
            let shapes = std::iter::once(Shape::Split { encoders, pds }).chain(shapes);
            all.extend(shapes.map(|shape| candidate(shape, settings)));
        }
    }
    all
}

/// Encoder token budgets of workers with both; none where there are no such workers.
fn encoder_budgets(curves: &CostCurves, means: &Means) -> &'static [EncoderBudget] {
    match (&curves.api, curves.allows_colocated()) {
        (_, false) => &[],
        // Its engine encodes within its steps, whatever waits.
        (Some(_), true) => &[EncoderBudget::Unlimited],
        (None, true) if means.items > 0.0 => &ENCODER_BUDGETS,
        (None, true) => &ENCODER_BUDGETS[..1],
    }
}

/// Divisions of the encoders of a cluster among towers, of a model that has several: all for a small one, else that in
/// proportion to their work.
fn towers(encoders: usize, workers: usize, (curves, means): (&CostCurves, &Means)) -> Vec<TowerWorkers> {
    match (curves.has_towers(), workers <= ALL_RATIOS) {
        (false, _) => Vec::new(),
        (true, true) => TowerWorkers::all(encoders, curves.n_towers()),
        (true, false) => {
            let shares = bound::encodes_s(curves, means);
            TowerWorkers::in_proportion(encoders, &shares).into_iter().collect()
        }
    }
}

/// Numbers of encoders among so many workers, ascending.
fn ratios(workers: usize, curves: &Arc<CostCurves>, means: &Means) -> BTreeSet<usize> {
    // A model without an encoder has no points of one.
    if workers < 2 || curves.encode.is_empty() || !curves.allows_split() {
        return BTreeSet::new();
    }
    if workers <= ALL_RATIOS {
        return (1..workers).collect();
    }
    let one = |shape| Candidate { shape, curves: Arc::clone(curves), settings: WorkerSettings::default() };
    let bound = bound::of(&one(Shape::Colocated), means);
    let share = bound.encode_s / (bound.encode_s + bound.decode_s).max(f64::MIN_POSITIVE);
    let balanced = share * workers as f64;
    AROUND.iter().map(|part| ((balanced * part).round() as usize).clamp(1, workers - 1)).collect()
}
