//! Better settings for a cluster: one after the other, each at the value that does best while the others stay.

use super::candidate::{Candidate, Settings, TURNS};
use super::search::{Found, run};
use super::{PlanError, Question};

/// Rows of a step.
const TOKEN_BUDGETS: [usize; 4] = [128, 256, 512, 1024];
/// Sequences at once.
const SEQUENCES: [usize; 4] = [16, 32, 64, 128];
/// Output tokens and items of an encoder batch.
const BATCHES: [(usize, usize); 4] = [(128, 16), (512, 16), (2048, 16), (8192, 16)];
/// A change of settings must be worth so much.
const WORTH: f64 = 1.01;

/// Tries each setting once.
pub fn tune(question: &Question<'_>, found: Found) -> Result<Found, PlanError> {
    if !question.effort.tunes || found.rate == 0.0 {
        return Ok(found);
    }
    let mut best = found;
    for settings in VARIANTS {
        for settings in settings(&best.candidate) {
            if settings != best.candidate.settings && settings.token_budget >= settings.max_sequences {
                let candidate = Candidate { settings, ..best.candidate.clone() };
                best = better(question, best, candidate)?;
            }
        }
    }
    Ok(best)
}

/// Each group of settings in its turn, as functions of the best so far.
const VARIANTS: [fn(&Candidate) -> Vec<Settings>; 3] = [
    |c| {
        let with = |encoder_budget| Settings { encoder_budget, ..c.settings };
        if c.shape.is_split() { Vec::new() } else { TURNS.map(with).to_vec() }
    },
    |c| TOKEN_BUDGETS.iter().map(|&token_budget| Settings { token_budget, ..c.settings }).collect(),
    |c| {
        let sequences = SEQUENCES.iter().map(|&max_sequences| Settings { max_sequences, ..c.settings });
        let batches = BATCHES.iter().map(|&(batch_tokens, batch_items)| Settings {
            batch_tokens,
            batch_items,
            ..c.settings
        });
        sequences.chain(batches).collect()
    },
];

/// Whether it passes at a higher rate than the best so far; only then how much higher is searched.
fn better(question: &Question<'_>, best: Found, candidate: Candidate) -> Result<Found, PlanError> {
    let effort = question.effort.coarse();
    let mut rate = best.rate * WORTH;
    let mut winner = None;
    while rate <= best.bound.rate {
        let evidence = run(question, &candidate, (rate, 0, effort.requests))?;
        if !evidence.verdict.passed {
            break;
        }
        winner = Some(evidence);
        rate *= 1.0 + effort.tolerance;
    }
    Ok(match winner {
        Some(at) => Found { candidate, rate: at.rate, at: Some(at), ..best },
        None => best,
    })
}
