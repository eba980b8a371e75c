//! Number of workers for a rate: from the lower bound of the stages upwards, adding workers to the busiest pool, until the
//! simulated cluster meets the SLO.

use super::controller::Replicas;
use crate::planner::bound;
use crate::planner::means::Means;
use crate::planner::search::{RunSpec, run};
use crate::planner::{Candidate, PlanError, Question, Shape, WorkerSettings};
use std::sync::Arc;

/// Most clusters that are simulated.
const MOST_TRIES: usize = 40;
/// Highest utilisation at which a stage can meet the SLO.
const FULL: f64 = 0.95;

/// The smallest cluster with encoders of their own that serves `rate`; `None` if not even `most` does. Where `most` has encoders of
/// each tower, each has a pool.
///
/// # Errors
/// [`PlanError`].
pub fn needed(question: &Question<'_>, rate: f64, most: Replicas) -> Result<Option<Replicas>, PlanError> {
    let curves = question.curves.first().ok_or(PlanError::NoCurves)?;
    let means = Means::of(question.demand, curves).ok_or(PlanError::Empty)?;
    let candidate = |Replicas { encoders, pds }: Replicas| Candidate {
        shape: match encoders.counts() {
            [encoders] => Shape::Split { encoders: *encoders, pds },
            _ => Shape::Towers { encoders, pds },
        },
        curves: Arc::clone(curves),
        settings: WorkerSettings::default(),
    };
    let most_of = most.pools();
    let least = least_work(&candidate(Replicas::new(1, 1)), &means, most_of.len());
    let at_least =
        |(seconds, most): (&f64, &usize)| ((rate * seconds / FULL).ceil() as usize).clamp(1, (*most).max(1));
    let mut pools: Vec<usize> = least.iter().zip(&most_of).map(at_least).collect();
    for _ in 0..MOST_TRIES {
        let replicas = Replicas::of_pools(&pools);
        let evidence = run(
            question,
            &candidate(replicas),
            RunSpec { rate, seed: 0, n_requests: question.effort.requests },
        )?;
        if evidence.verdict.passed {
            return Ok(Some(replicas));
        }
        let used = |i: &usize| evidence.pools.get(*i).map_or(0.0, |pool| pool.utilisation);
        let open = (0..pools.len()).filter(|i| pools[*i] < most_of[*i]);
        // Of pools that are as busy the last, that of PD workers.
        let Some(busiest) = open.max_by(|a, b| used(a).total_cmp(&used(b))) else { return Ok(None) };
        let more = pools[busiest] + pools[busiest].div_ceil(10);
        pools[busiest] = more.min(most_of[busiest]);
    }
    Ok(None)
}

/// Least worker time of a request in each of so many pools, in seconds: encoders of all towers or of each, then PD workers.
fn least_work(one: &Candidate, means: &Means, n_pools: usize) -> Vec<f64> {
    let bound = bound::of(one, means);
    match n_pools {
        ..=2 => vec![bound.encode_s, bound.decode_s],
        _ => bound::encodes_s(&one.curves, means).into_iter().chain([bound.decode_s]).collect(),
    }
}
