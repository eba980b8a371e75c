//! Failures from outside: deadlines that passed or cannot be met, and items that failed.

use super::Scheduler;
use super::deadline::DeadlineCheck;
use crate::request::SequenceId;
use std::time::Instant;
use triptych_core::{Failure, FailureClass};

impl Scheduler {
    /// Ends the sequences whose deadline passed or cannot be met, and those that need a failed item.
    pub(super) fn take_failed(&mut self, now: Instant) -> Vec<(SequenceId, Failure)> {
        let mut failed = Vec::new();
        let deadline = DeadlineCheck { rates: &self.rates, pool: &self.pool, now };
        for sequence in self.sequences.values_mut() {
            let late = || Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out");
            let checked = match sequence.deadline <= now {
                true => Err(late()),
                false => match sequence.readable(sequence.n_computed(), &self.cross) {
                    Ok(_) => deadline.check(sequence),
                    Err(failure) => Err(failure),
                },
            };
            if let Err(failure) = checked {
                failed.extend(sequence.completions.iter().map(|id| (*id, failure.clone())));
            }
        }
        for (id, _) in &failed {
            self.retire(*id);
        }
        failed
    }
}
