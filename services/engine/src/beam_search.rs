//! Beam search: the live beams, the finished hypotheses, and the end of the search.
//!
//! Behaviour is that of transformers' vectorised search for one input
//! (<https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py>,
//! `_beam_search`): each step looks at the best continuations of all live beams together, those among the
//! first `width` that end are finished, and the best `width` that do not end live on. The score of a hypothesis
//! is its log-probability over its length to the power of the penalty, end token included, prompt not. The
//! search sees log-probabilities and tokens; it does not know caches, forks and batches.
//!
//! One difference: transformers fills missing beams with copies of no weight; here there are fewer live beams.
//! At the start there is one.

use std::cmp::Ordering;
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_models::sampling::SampleError;
use triptych_models::sampling::logits::{first_broken, largest};

/// Beam search for the completions of one prompt.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    width: usize,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    end_tokens: Vec<u32>,
    max_tokens: usize,
    /// Best first; all of one length.
    live: Vec<Beam>,
    /// Best first, at most `width`.
    finished: Vec<Hypothesis>,
    /// Branches of the last step, finished ones too; then the number of all branches before it.
    taken: Vec<BeamBranch>,
    n_taken_before: usize,
}

/// A live beam.
#[derive(Clone, Debug, Default)]
struct Beam {
    tokens: Vec<u32>,
    path: Vec<usize>,
    score: f32,
}

/// A finished beam.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Tokens, the one that ended it included.
    pub tokens: Vec<u32>,
    /// Length-normalised log-probability.
    pub score: f32,
    /// Index of each token's branch, counted over all branches of the search; see [`BeamSearch::taken`].
    pub path: Vec<usize>,
}

/// Extension of a beam by one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeamBranch {
    /// Index of the extended beam among the live beams of the step before.
    pub parent: usize,
    /// Appended token.
    pub token: u32,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeamStep {
    /// Live beams, best first: `width` of them, or fewer when fewer continuations are allowed.
    Continue(Vec<BeamBranch>),
    /// End of the search.
    Done,
}

/// A continuation with its total log-probability.
#[derive(Clone, Copy, Debug)]
struct BeamCandidate {
    branch: BeamBranch,
    score: f32,
}

impl BeamSearch {
    /// A search with one live beam, the prompt. `max_tokens`: most tokens of a hypothesis, at least 1.
    pub fn new(params: &BeamParams, end_tokens: &[u32], max_tokens: usize) -> Self {
        let width = (params.width as usize).max(1);
        // One beam is greedy search, which stops at its first end.
        let early_stopping = if width == 1 { EarlyStopping::Immediately } else { params.early_stopping };
        Self {
            width,
            length_penalty: f64::from(params.length_penalty),
            early_stopping,
            end_tokens: end_tokens.to_vec(),
            max_tokens: max_tokens.max(1),
            live: vec![Beam::default()],
            finished: Vec::new(),
            taken: Vec::new(),
            n_taken_before: 0,
        }
    }

    /// Number of live beams, and so rows of log-probabilities of a step.
    pub fn n_live(&self) -> usize {
        self.live.len()
    }

    /// Tokens of live beam `beam` after the prompt; empty past the last beam.
    pub fn tokens(&self, beam: usize) -> &[u32] {
        self.live.get(beam).map_or(&[], |b| &b.tokens)
    }

    /// Branches of the last step, those of finished beams included.
    pub fn taken(&self) -> &[BeamBranch] {
        &self.taken
    }

    /// Takes a step. `log_probs: [n_live, vocab]` are those of the next token, after the rules on them; minus
    /// infinity rules a token out. `ends(before, token)` is true if `token` after a beam's tokens `before` ends
    /// it for another reason than an end token or the length, such as a stop string.
    ///
    /// # Errors
    /// [`SampleError`] for a value that is no log-probability, or when every token of every beam is ruled out.
    pub fn advance(
        &mut self,
        log_probs: &[f32],
        mut ends: impl FnMut(&[u32], u32) -> bool,
    ) -> Result<BeamStep, SampleError> {
        let candidates = self.candidates(log_probs)?;
        let length = self.live.first().map_or(0, |b| b.tokens.len()) + 1;
        self.n_taken_before += std::mem::take(&mut self.taken).len();
        let mut live = Vec::with_capacity(self.width);
        let mut branches = Vec::with_capacity(self.width);
        for (rank, candidate) in candidates.iter().enumerate() {
            if rank >= self.width && live.len() == self.width {
                break;
            }
            let BeamBranch { parent, token } = candidate.branch;
            let ended = length >= self.max_tokens
                || self.end_tokens.contains(&token)
                || ends(self.tokens(parent), token);
            if !ended && live.len() < self.width {
                live.push(self.take(candidate));
                branches.push(candidate.branch);
            } else if ended && rank < self.width {
                self.finish(candidate);
            }
        }
        self.live = live;
        match self.may_improve(length) {
            true => Ok(BeamStep::Continue(branches)),
            false => Ok(BeamStep::Done),
        }
    }

    /// The `n` best hypotheses, best first; live beams count as hypotheses of their length. Fewer only if the
    /// search never had as many beams.
    pub fn into_hypotheses(mut self, n: usize) -> Vec<Hypothesis> {
        let live = std::mem::take(&mut self.live);
        if self.finished.len() < n {
            let unfinished = live.into_iter().filter(|b| !b.tokens.is_empty());
            let rest = n - self.finished.len();
            let scored: Vec<_> = unfinished.take(rest).map(|beam| self.hypothesis(beam)).collect();
            self.finished.extend(scored);
            self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        }
        self.finished.truncate(n);
        self.finished
    }

    /// Best continuations of all beams, best first: enough that `width` are left when every end token of every
    /// beam is among them.
    fn candidates(&self, log_probs: &[f32]) -> Result<Vec<BeamCandidate>, SampleError> {
        let vocab = log_probs.len() / self.live.len().max(1);
        let n_kept = (1 + self.end_tokens.len()).max(2) * self.width;
        let mut kept: Vec<BeamCandidate> = Vec::with_capacity(2 * n_kept);
        let mut floor = f32::NEG_INFINITY;
        for (parent, (beam, row)) in self.live.iter().zip(log_probs.chunks_exact(vocab.max(1))).enumerate() {
            if let Some(token) = first_broken(row) {
                return Err(SampleError::NotFinite { token, value: row[token] });
            }
            for (i, stretch) in row.chunks(SCANNED).enumerate() {
                if beam.score + largest(stretch) <= floor {
                    continue;
                }
                for (token, log_prob) in (i * SCANNED..).zip(stretch) {
                    let score = beam.score + log_prob;
                    if score > floor {
                        kept.push(BeamCandidate {
                            branch: BeamBranch { parent, token: token as u32 },
                            score,
                        });
                        if kept.len() == 2 * n_kept {
                            floor = keep_best(&mut kept, n_kept);
                        }
                    }
                }
            }
        }
        keep_best(&mut kept, n_kept);
        if kept.is_empty() { Err(SampleError::NothingAllowed { vocab }) } else { Ok(kept) }
    }

    /// Extends a beam by a candidate.
    fn take(&mut self, candidate: &BeamCandidate) -> Beam {
        let BeamBranch { parent, token } = candidate.branch;
        let node = self.n_taken_before + self.taken.len();
        self.taken.push(candidate.branch);
        let mut beam = self.live.get(parent).cloned().unwrap_or_default();
        beam.tokens.push(token);
        beam.path.push(node);
        Beam { score: candidate.score, ..beam }
    }

    fn finish(&mut self, candidate: &BeamCandidate) {
        let beam = self.take(candidate);
        let hypothesis = self.hypothesis(beam);
        let rank = self.finished.partition_point(|h| h.score >= hypothesis.score);
        self.finished.insert(rank, hypothesis);
        self.finished.truncate(self.width);
    }

    fn hypothesis(&self, beam: Beam) -> Hypothesis {
        let score = self.normalised(beam.score, beam.tokens.len());
        Hypothesis { tokens: beam.tokens, score, path: beam.path }
    }

    /// True if a live beam of `length` tokens may still displace a finished hypothesis.
    fn may_improve(&self, length: usize) -> bool {
        let Some(best) = self.live.first() else { return false };
        let worst = match self.finished.get(self.width - 1) {
            None => return true,
            Some(worst) => worst.score,
        };
        let reachable = match self.early_stopping {
            EarlyStopping::Immediately => return false,
            // A positive penalty favours length, so the longest completion bounds the score.
            EarlyStopping::Never if self.length_penalty > 0.0 => self.max_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => length,
        };
        self.normalised(best.score, reachable) > worst
    }

    fn normalised(&self, score: f32, length: usize) -> f32 {
        score / (length as f64).powf(self.length_penalty) as f32
    }
}

/// Logits that are skipped together when none of them is good enough, as is usual.
const SCANNED: usize = 256;

/// Order of candidates: best first; of equals the one of the better beam, then the lower token. A total order.
fn by_score(a: &BeamCandidate, b: &BeamCandidate) -> Ordering {
    let order = |c: &BeamCandidate| (c.branch.parent, c.branch.token);
    b.score.total_cmp(&a.score).then_with(|| order(a).cmp(&order(b)))
}

/// Keeps the `n` best in order; returns the score that a further one must exceed.
fn keep_best(candidates: &mut Vec<BeamCandidate>, n: usize) -> f32 {
    candidates.sort_unstable_by(by_score);
    candidates.truncate(n);
    // Later candidates are of a worse beam or a higher token, so an equal one would come after.
    candidates.get(n - 1).map_or(f32::NEG_INFINITY, |c| c.score)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    fn search(width: u32, max_tokens: usize) -> BeamSearch {
        let params = BeamParams { width, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
        BeamSearch::new(&params, &[0], max_tokens)
    }

    #[test]
    fn a_single_allowed_token_leaves_one_beam_which_spreads_later() {
        let mut search = search(3, 5);
        let branch = |parent, token| BeamBranch { parent, token };
        let turn = search.advance(&[NO, NO, -0.5, NO], |_, _| false).unwrap();
        assert_eq!(turn, BeamStep::Continue(vec![branch(0, 2)]));
        let turn = search.advance(&[NO, -1.0, -0.5, -2.0], |_, _| false).unwrap();
        assert_eq!(turn, BeamStep::Continue(vec![branch(0, 2), branch(0, 1), branch(0, 3)]));
        assert_eq!((search.tokens(1), search.tokens(3)), (&[2, 1][..], &[][..]));
    }

    #[test]
    fn a_beam_that_a_stop_string_ends_is_finished_and_no_longer_live() {
        let mut search = search(2, 5);
        let turn =
            search.advance(&[NO, -0.1, -3.0], |before, token| before.is_empty() && token == 1).unwrap();
        assert_eq!(turn, BeamStep::Continue(vec![BeamBranch { parent: 0, token: 2 }]));
        assert_eq!(search.into_hypotheses(1), [Hypothesis { tokens: vec![1], score: -0.1, path: vec![0] }]);
    }

    #[test]
    fn a_search_that_is_cut_short_returns_its_live_beams() {
        let mut search = search(2, 50);
        search.advance(&[NO, -1.0, -3.0], |_, _| false).unwrap();
        let hypotheses = search.into_hypotheses(2);
        assert_eq!(hypotheses.iter().map(|h| h.tokens[0]).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn broken_rows_are_errors() {
        let advance = |row: &[f32]| search(2, 5).advance(row, |_, _| false);
        assert!(matches!(advance(&[-1.0, f32::NAN]), Err(SampleError::NotFinite { token: 1, .. })));
        assert_eq!(advance(&[NO, NO]), Err(SampleError::NothingAllowed { vocab: 2 }));
        assert_eq!(advance(&[]), Err(SampleError::NothingAllowed { vocab: 0 }));
    }
}
