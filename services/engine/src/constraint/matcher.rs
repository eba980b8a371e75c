//! State of a constraint within one completion.

use super::{CompiledConstraint, refused};
use llguidance::toktrie::SimpleVob;
use triptych_core::Failure;

/// Grammar state after some tokens. It follows the tokens forward, back over rejected drafts, or again from the
/// start.
#[derive(Clone, Debug)]
pub struct GrammarMatcher {
    start: CompiledConstraint,
    now: CompiledConstraint,
    /// Tokens between `start` and `now`.
    tokens: Vec<u32>,
}

/// Tokens that are allowed next.
pub struct TokenMask {
    allowed: SimpleVob,
    vocab: usize,
}

impl GrammarMatcher {
    /// The state before the first token.
    pub fn new(start: CompiledConstraint) -> Self {
        Self { now: start.clone(), start, tokens: Vec::new() }
    }

    /// Mask of the token after `written`.
    ///
    /// # Errors
    /// A limit on work, or tokens that do not fit the grammar.
    pub fn mask(&mut self, written: &[u32]) -> Result<TokenMask, Failure> {
        self.follow(written)?;
        let field = self.start.field;
        let allowed = self.now.matcher.compute_mask_or_eos().map_err(|e| refused(field, &e))?;
        Ok(TokenMask { allowed, vocab: self.start.vocab })
    }

    /// True if nothing may follow `written`: the completion is at its end.
    ///
    /// # Errors
    /// As [`Self::mask`].
    pub fn is_complete(&mut self, written: &[u32]) -> Result<bool, Failure> {
        self.follow(written)?;
        Ok(self.now.matcher.is_stopped())
    }

    fn follow(&mut self, written: &[u32]) -> Result<(), Failure> {
        let field = self.start.field;
        let n_same = self.tokens.iter().zip(written).take_while(|(a, b)| a == b).count();
        let n_back = self.tokens.len() - n_same;
        if n_back > 0 && self.now.matcher.rollback(n_back).is_err() {
            self.now = self.start.clone();
            self.tokens.clear();
        }
        self.tokens.truncate(n_same);
        let new = &written[self.tokens.len()..];
        self.now.matcher.consume_tokens(new).map_err(|e| refused(field, &e))?;
        self.tokens.extend_from_slice(new);
        Ok(())
    }
}

impl TokenMask {
    /// Rules out of `logits [vocab]` the tokens that are not allowed. The tokens `ends` are allowed when the
    /// grammar may end.
    pub fn apply(&self, ends: &[u32], logits: &mut [f32]) {
        let may_end = self.allowed.get(self.vocab);
        let kept: Vec<(usize, f32)> =
            ends.iter().filter_map(|e| Some((*e as usize, *logits.get(*e as usize)?))).collect();
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= self.vocab || !self.allowed.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for (end, logit) in kept {
            logits[end] = if may_end { logit } else { f32::NEG_INFINITY };
        }
    }
}
