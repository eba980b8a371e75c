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

/// The smallest cluster with encoders of their own that serves `rate`; `None` if not even `most` does.
///
/// # Errors
/// [`PlanError`].
pub fn needed(question: &Question<'_>, rate: f64, most: Replicas) -> Result<Option<Replicas>, PlanError> {
    let curves = question.curves.first().ok_or(PlanError::NoCurves)?;
    let means = Means::of(question.demand, curves).ok_or(PlanError::Empty)?;
    let candidate = |replicas: Replicas| Candidate {
        shape: Shape::Split { encoders: replicas.encoders, pds: replicas.pds },
        curves: Arc::clone(curves),
        settings: WorkerSettings::default(),
    };
    let one = bound::of(&candidate(Replicas { encoders: 1, pds: 1 }), &means);
    let at_least =
        |seconds: f64, most: usize| ((rate * seconds / FULL).ceil() as usize).clamp(1, most.max(1));
    let mut replicas =
        Replicas { encoders: at_least(one.encode_s, most.encoders), pds: at_least(one.decode_s, most.pds) };
    for _ in 0..MOST_TRIES {
        let evidence = run(
            question,
            &candidate(replicas),
            RunSpec { rate, seed: 0, n_requests: question.effort.requests },
        )?;
        if evidence.verdict.passed {
            return Ok(Some(replicas));
        }
        let used = |name: &str| evidence.pools.iter().find(|p| p.name == name).map_or(0.0, |p| p.utilisation);
        let more = |n: usize| n + n.div_ceil(10);
        let encoders_full = replicas.encoders >= most.encoders;
        let pds_full = replicas.pds >= most.pds;
        match (encoders_full, pds_full) {
            (true, true) => return Ok(None),
            (false, _) if pds_full || used("encoder") > used("pd") => {
                replicas.encoders = more(replicas.encoders).min(most.encoders);
            }
            _ => replicas.pds = more(replicas.pds).min(most.pds),
        }
    }
    Ok(None)
}
