//! The pace of an answer: the time that its tokens after the first are allowed.
//!
//! A TPOT SLO gives way while first tokens are waited for. What it allows a token then counts for that token alone: an answer of
//! hundreds of tokens would stand still for all of them otherwise, when the SLO gives way after they were written.

use std::time::Duration;

/// Time that the tokens of an answer were allowed, in units of the SLO.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenPace {
    /// Sum of the stretches of the SLO, one for each token.
    allowed: f64,
    /// Tokens in the sum.
    n_tokens: usize,
}

impl TokenPace {
    /// Allows those of `n_tokens` that are new since the last call a stretch of the SLO each, at least 1.
    pub fn allow(&mut self, n_tokens: usize, stretch: f64) {
        self.allowed += n_tokens.saturating_sub(self.n_tokens) as f64 * stretch;
        self.n_tokens = self.n_tokens.max(n_tokens);
    }

    /// Time that `n_tokens` are allowed with an SLO of `target`; those that are new have a stretch of `stretch`.
    pub fn time(&self, n_tokens: usize, target: Duration, stretch: f64) -> Duration {
        let n_new = n_tokens.saturating_sub(self.n_tokens);
        let n_targets = self.allowed + n_new as f64 * stretch;
        Duration::try_from_secs_f64(target.as_secs_f64() * n_targets).unwrap_or(Duration::MAX)
    }
}
