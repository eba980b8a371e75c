//! State of a constraint within one completion.

use super::CompiledConstraint;
use super::guard::{guarded, refused};
use llguidance::toktrie::SimpleVob;
use triptych_core::Failure;

/// Most lexer work of all masks of one completion, in the library's fuel: that of 64 masks at their limit, less than a
/// second. Lexer states are kept, so that a completion within a usual grammar takes a thousandth of it.
const MAX_WORK: u64 = 64 * 100_000;

/// Grammar state after some tokens. It follows the tokens forward, back over rejected drafts, or again from the
/// start.
#[derive(Clone, Debug)]
pub struct GrammarMatcher {
    start: CompiledConstraint,
    now: CompiledConstraint,
    /// Tokens between `start` and `now`.
    tokens: Vec<u32>,
    /// Lexer work so far, in fuel.
    work: u64,
}

/// Tokens that are allowed next.
pub struct TokenMask {
    allowed: SimpleVob,
    vocab: usize,
}

impl GrammarMatcher {
    /// The state before the first token.
    pub fn new(start: CompiledConstraint) -> Self {
        Self { now: start.clone(), start, tokens: Vec::new(), work: 0 }
    }

    /// Mask of the token after `written`.
    ///
    /// # Errors
    /// A limit on work, tokens that do not fit the grammar, or a panic of the library, after which the matcher is not used again.
    pub fn mask(&mut self, written: &[u32]) -> Result<TokenMask, Failure> {
        let field = self.start.field;
        guarded(field, || {
            self.follow(written)?;
            let allowed = self.now.matcher.compute_mask_or_eos().map_err(|e| refused(field, &e))?;
            self.pay()?;
            Ok(TokenMask { allowed, vocab: self.start.vocab })
        })
    }

    /// True if nothing may follow `written`: the completion is at its end.
    ///
    /// # Errors
    /// As [`Self::mask`].
    pub fn is_complete(&mut self, written: &[u32]) -> Result<bool, Failure> {
        guarded(self.start.field, || {
            self.follow(written)?;
            Ok(self.now.matcher.is_stopped())
        })
    }

    /// Counts the work of the latest mask.
    fn pay(&mut self) -> Result<(), Failure> {
        let field = self.start.field;
        let cost = self.now.matcher.last_step_stats().map_or(0, |stats| stats.lexer_cost);
        self.work = self.work.saturating_add(cost);
        if self.work <= MAX_WORK {
            return Ok(());
        }
        let text = format!("{field} took {} units of lexer work, the limit is {MAX_WORK}", self.work);
        Err(Failure::invalid(text).with_param(field))
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

    /// The first allowed token at or after `place` modulo the vocabulary, ends left out.
    pub(super) fn allowed_from(&self, place: usize) -> Option<u32> {
        let first = place.checked_rem(self.vocab)?;
        let token = (first..self.vocab).chain(0..first).find(|token| self.allowed.get(*token))?;
        u32::try_from(token).ok()
    }
}
