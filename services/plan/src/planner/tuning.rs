//! Coordinate search over the settings of a cluster.

use super::bound;
use super::candidate::{Candidate, WorkerSettings};
use super::enumerate::ENCODER_BUDGETS;
use super::means::Means;
use super::question::{PlanError, Question};
use super::search::{RunSpec, SearchedCandidate, run};

/// Token budgets of a step.
const TOKEN_BUDGETS: [usize; 4] = [128, 256, 512, 1024];
/// Numbers of concurrent sequences.
const SEQUENCES: [usize; 4] = [16, 32, 64, 128];
/// Percent of the time for decode while prompts are prefilled.
const DECODE_SHARES: [u8; 5] = [0, 20, 33, 50, 67];
/// Limits of an encoder batch: output tokens and items.
const BATCHES: [(usize, usize); 4] = [(128, 16), (512, 16), (2048, 16), (8192, 16)];
/// Least improvement by which a setting is changed.
const WORTH: f64 = 1.01;

/// Tries each setting once.
pub fn tune(question: &Question<'_>, found: SearchedCandidate) -> Result<SearchedCandidate, PlanError> {
    if !question.effort.tunes || found.rate == 0.0 {
        return Ok(found);
    }
    let means = Means::of(question.demand, &found.candidate.curves).ok_or(PlanError::Empty)?;
    let mut best = found;
    for settings in VARIANTS {
        for settings in settings(&best.candidate) {
            if settings != best.candidate.settings && settings.token_budget >= settings.max_sequences {
                let candidate = Candidate { settings, ..best.candidate.clone() };
                best = better(question, &means, best, candidate)?;
            }
        }
    }
    Ok(best)
}

/// Variants of each group of settings, as functions of the best candidate so far.
const VARIANTS: [fn(&Candidate) -> Vec<WorkerSettings>; 4] = [
    |c| {
        let with = |encoder_budget| WorkerSettings { encoder_budget, ..c.settings };
        if c.shape.is_split() || c.curves.api.is_some() {
            Vec::new()
        } else {
            ENCODER_BUDGETS.map(with).to_vec()
        }
    },
    |c| TOKEN_BUDGETS.iter().map(|&token_budget| WorkerSettings { token_budget, ..c.settings }).collect(),
    |c| {
        // They count where there is no SLO that the share follows from.
        let with = |decode_share| WorkerSettings { decode_share, tpot_slo: None, ..c.settings };
        // Other engines have no such setting.
        if c.curves.api.is_some() { Vec::new() } else { DECODE_SHARES.map(with).to_vec() }
    },
    |c| {
        let sequences = SEQUENCES.iter().map(|&max_sequences| WorkerSettings { max_sequences, ..c.settings });
        let batches = BATCHES.iter().map(|&(batch_tokens, batch_items)| WorkerSettings {
            batch_tokens,
            batch_items,
            ..c.settings
        });
        sequences.chain(batches).collect()
    },
];

/// The candidate with the settings, if it passes at a higher rate than the best so far.
fn better(
    question: &Question<'_>,
    means: &Means,
    best: SearchedCandidate,
    candidate: Candidate,
) -> Result<SearchedCandidate, PlanError> {
    let effort = question.effort.coarse();
    let bound = bound::of(&candidate, means);
    let mut rate = best.at.as_ref().map_or(best.rate, |at| at.asked) * WORTH;
    let mut winner = None;
    while rate <= bound.rate {
        let evidence = run(question, &candidate, RunSpec { rate, seed: 0, n_requests: effort.requests })?;
        if !evidence.verdict.passed {
            break;
        }
        winner = Some(evidence);
        rate *= 1.0 + effort.tolerance;
    }
    Ok(match winner {
        Some(at) => {
            SearchedCandidate { candidate, bound, rate: at.rate.min(bound.rate), at: Some(at), ..best }
        }
        None => best,
    })
}
