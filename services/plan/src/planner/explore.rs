//! Search over all candidates.

use super::bound::{self, Bound};
use super::candidate::Candidate;
use super::enumerate;
use super::means::Means;
use super::progress::{Phase, PhaseProgress, Progress};
use super::question::{PlanError, Question};
use super::search::{self, SearchedCandidate};

/// A candidate and its bound.
pub(super) type BoundedCandidate = (Candidate, Bound);

/// Candidates that were searched with one seed, best first, and those that were pruned by their bound.
pub(super) fn explore(
    question: &Question<'_>,
    means: &Means,
    progress: Progress<'_>,
) -> Result<(Vec<SearchedCandidate>, Vec<BoundedCandidate>), PlanError> {
    let mut candidates: Vec<BoundedCandidate> = enumerate::all(question, means)
        .into_iter()
        .map(|candidate| {
            let bound = bound::of(&candidate, means);
            (candidate, bound)
        })
        .collect();
    candidates.sort_by(|a, b| b.1.rate.total_cmp(&a.1.rate));
    let mut steps = PhaseProgress::new(Phase::FirstSearch, candidates.len(), progress);
    let (mut found, mut pruned): (Vec<SearchedCandidate>, Vec<_>) = Default::default();
    for (candidate, bound) in candidates {
        steps.next(&candidate.name());
        let best = found.iter().map(|f: &SearchedCandidate| f.rate).fold(0.0, f64::max);
        // The bound assumes that nothing ever waits, so no candidate reaches it.
        if bound.rate <= best {
            pruned.push((candidate, bound));
            continue;
        }
        found.push(search::goodput(question, candidate, bound, question.effort.coarse())?);
    }
    found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
    Ok((found, pruned))
}
