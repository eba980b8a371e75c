//! Refusal of sequences whose deadline cannot be met.

use crate::blocks::BlockPool;
use crate::sequence::Sequence;
use crate::step_rates::StepRates;
use std::time::Instant;
use triptych_core::{Failure, FailureClass};

/// Data for the decision whether a sequence can meet its deadline.
#[derive(Clone, Copy)]
pub(super) struct DeadlineCheck<'a> {
    pub rates: &'a StepRates,
    /// Pool with the prefix cache.
    pub pool: &'a BlockPool,
    pub now: Instant,
}

impl DeadlineCheck<'_> {
    /// Refuses a sequence that has not started and would be late even at the best rates measured.
    pub fn check(self, sequence: &mut Sequence) -> Result<(), Failure> {
        let left = sequence.deadline.saturating_duration_since(self.now);
        // Resumed tokens are prefilled as the prompt is.
        let n_given = sequence.n_tokens();
        let n_steps = sequence.n_least().saturating_sub(sequence.generated(0).len() + 1);
        if sequence.milestones.first_step.is_some() || self.rates.least(n_given, n_steps) <= left {
            return Ok(());
        }
        // Cached blocks cost nothing; they are looked up only where it matters.
        let cached = self.pool.find_seen(sequence.keys(0, n_given - 1));
        let n_cached = cached.n_room();
        let needed = self.rates.least(n_given - n_cached, n_steps);
        if needed <= left {
            return Ok(());
        }
        let text =
            format!("{} ms are left, and at least {} ms are needed", left.as_millis(), needed.as_millis());
        Err(Failure::new(FailureClass::DeadlineExceeded, text))
    }
}
