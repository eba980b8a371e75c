//! The clusters that a plan decides between: tuned, and searched with every seed.

use super::progress::{Phase, PhaseProgress, Progress};
use super::question::{PlanError, Question};
use super::search::{self, SearchedCandidate};
use super::tuning;
use std::collections::BTreeSet;

/// The best of the first search that are settled, whatever their kind.
const N_BEST: usize = 3;

/// A cluster of the first search, settled.
#[derive(Clone, Debug)]
pub(super) struct Finalist {
    /// Its index in the first search.
    pub(super) ranked_idx: usize,
    /// Its result with every seed.
    pub(super) found: SearchedCandidate,
}

/// Tunes and settles the best clusters of a first search; returns them best first.
pub(super) fn settle_all(
    question: &Question<'_>,
    ranked: &[SearchedCandidate],
    progress: Progress<'_>,
) -> Result<Vec<Finalist>, PlanError> {
    let chosen = choose(ranked);
    let n_seeds = usize::try_from(question.effort.seeds.max(1)).unwrap_or(usize::MAX);
    let mut steps = PhaseProgress::new(Phase::Finalists, chosen.len() * (n_seeds + 1), progress);
    let mut finalists: Vec<Finalist> = Vec::new();
    for ranked_idx in chosen {
        let name = ranked[ranked_idx].candidate.name();
        steps.next(&format!("{name}: settings"));
        let tuned = tuning::tune(question, ranked[ranked_idx].clone())?;
        // Two may become one by tuning.
        if finalists.iter().any(|f| f.found.candidate.is_same(&tuned.candidate)) {
            steps.skip(n_seeds);
            continue;
        }
        let found =
            search::settle_with(question, tuned, &mut |seed| steps.next(&format!("{name}: seed {seed}")))?;
        finalists.push(Finalist { ranked_idx, found });
    }
    finalists.sort_by(|a, b| b.found.goodput.mean.total_cmp(&a.found.goodput.mean));
    Ok(finalists)
}

/// Indices of the best ones, and of the best of each kind that is not among them: what is compared is compared by the same
/// kind of number.
fn choose(ranked: &[SearchedCandidate]) -> Vec<usize> {
    let mut chosen: Vec<usize> = (0..ranked.len().min(N_BEST)).collect();
    let n_kinds = |i: usize| ranked[i].candidate.shape.n_kinds();
    let kinds: BTreeSet<usize> = (0..ranked.len()).map(n_kinds).collect();
    let best_of = |kinds: usize| (0..ranked.len()).find(|i| n_kinds(*i) == kinds && ranked[*i].rate > 0.0);
    chosen.extend(kinds.into_iter().filter_map(best_of));
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}
