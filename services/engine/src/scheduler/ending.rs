//! Ends that come from outside: time that ran out, or will; items that will not come.

use super::Scheduler;
use crate::blocks::BlockPool;
use crate::rates::Rates;
use crate::request::SequenceId;
use crate::sequence::Sequence;
use std::time::Instant;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{Failure, FailureClass};

impl Scheduler {
    /// Ends those whose time is over, those that need an item that failed, and those that cannot make it.
    pub(super) fn reap(&mut self, now: Instant) -> Vec<(SequenceId, Failure)> {
        let mut failed = Vec::new();
        for sequence in self.line.values_mut() {
            let late = || Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out");
            let verdict = match sequence.deadline <= now {
                true => Err(late()),
                false => match sequence.readable(sequence.n_computed(), &self.cross) {
                    Ok(_) => can_make_it(sequence, (&self.rates, &self.pool), now),
                    Err(failure) => Err(failure),
                },
            };
            if let Err(failure) = verdict {
                failed.extend(sequence.answers.iter().map(|id| (*id, failure.clone())));
            }
        }
        for (id, _) in &failed {
            self.retire(*id);
        }
        failed
    }
}

/// Refuses a sequence that has not started and would be late even at the best rates measured.
pub(super) fn can_make_it(
    sequence: &mut Sequence,
    (rates, pool): (&Rates, &BlockPool),
    now: Instant,
) -> Result<(), Failure> {
    let left = sequence.deadline.saturating_duration_since(now);
    // What was written elsewhere is read as the prompt is.
    let (n_given, n_written) = (sequence.n_tokens(), sequence.generated(0).len());
    let n_steps = sequence.n_least().saturating_sub(n_written + 1);
    if sequence.milestones.first_step.is_some() || rates.least(n_given, n_steps) <= left {
        return Ok(());
    }
    // Blocks that are known already cost nothing; looked up only where it matters.
    let n_known = pool.find(sequence.keys(0, n_given - 1)).blocks().len() * KV_BLOCK_TOKENS;
    let needed = rates.least(n_given - n_known, n_steps);
    if needed <= left {
        return Ok(());
    }
    let text = format!("{} ms are left, and at least {} ms are needed", left.as_millis(), needed.as_millis());
    Err(Failure::new(FailureClass::DeadlineExceeded, text))
}
