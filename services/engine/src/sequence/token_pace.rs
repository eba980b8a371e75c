//! The pace of an answer: the time that its tokens after the first are allowed.
//!
//! A TPOT SLO gives way while first tokens are waited for. What it allows a token then counts for that token alone: an answer of
//! hundreds of tokens would stand still for all of them otherwise, when the SLO gives way after they were written.

use super::Sequence;
use std::time::{Duration, Instant};

/// Time that the tokens of an answer were allowed, in units of the SLO.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenPace {
    /// Sum of the stretches of the SLO, one for each token.
    allowed: f64,
    /// Tokens in the sum.
    n_tokens: usize,
}

impl Sequence {
    /// Times between tokens that its tokens so far are followed by. A token that is being chosen is there before the next.
    fn n_gaps(&self) -> usize {
        self.generated(0).len().saturating_sub(self.n_resumed)
    }

    /// Allows tokens that are new since the last call a stretch of the SLO each, at least 1.
    pub fn allow(&mut self, stretch: f64) {
        let n_gaps = self.n_gaps();
        self.pace.allowed += n_gaps.saturating_sub(self.pace.n_tokens) as f64 * stretch;
        self.pace.n_tokens = self.pace.n_tokens.max(n_gaps);
    }

    /// Time for which its next token may wait before the mean time of its tokens after the first exceeds `target`, stretched as far
    /// as it was for each; zero if it does already. `stretch`: that of tokens that were not [allowed](Self::allow) one yet. `None`
    /// before its first token.
    pub fn token_slack(&self, target: Duration, stretch: f64, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.milestones.first_token?);
        let n_new = self.n_gaps().saturating_sub(self.pace.n_tokens);
        let n_targets = self.pace.allowed + n_new as f64 * stretch;
        let allowed = Duration::try_from_secs_f64(target.as_secs_f64() * n_targets).unwrap_or(Duration::MAX);
        Some(allowed.saturating_sub(elapsed))
    }
}
