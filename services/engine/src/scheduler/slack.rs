//! Slack of the sequences that decode: the time for which they may wait without missing the TPOT SLO, and what it is spent on.

use super::Scheduler;
use crate::sequence::{QueueKey, Sequence};
use std::time::{Duration, Instant};

impl Scheduler {
    /// Lets the TPOT SLO give way to the first token that has been waited for longest.
    pub(super) fn relax_slo(&mut self, now: Instant) {
        self.decode_pacing.relax(self.longest_wait(now));
        let stretch = self.decode_pacing.stretch();
        for sequence in self.sequences.values_mut().filter(|s| s.is_decoding()) {
            sequence.allow(stretch);
        }
    }

    /// Longest time for which a first token has been waited for, by a sequence that is no less urgent than any that decodes.
    fn longest_wait(&self, now: Instant) -> Duration {
        let most_urgent = self.sequences.values().filter(|s| s.is_decoding()).map(|s| s.priority).min();
        let waits = |s: &&Sequence| {
            s.milestones.first_token.is_none() && most_urgent.is_none_or(|most| s.priority <= most)
        };
        let waiting = self.sequences.values().filter(waits);
        waiting.map(|s| now.saturating_duration_since(s.milestones.arrived)).max().unwrap_or_default()
    }

    /// True if the next step must not prefill, for the sake of sequences that decode.
    pub(super) fn only_decodes(&self, now: Instant) -> bool {
        let target = self.decode_pacing.target(self.rates.least(0, 1));
        self.decode_pacing.is_owed()
            && target.is_none_or(|target| {
                self.least_slack(target, now).is_some_and(|slack| slack < self.prefill_step())
            })
    }

    /// The least slack of the sequences that decode.
    fn least_slack(&self, target: Duration, now: Instant) -> Option<Duration> {
        let stretch = self.decode_pacing.stretch();
        let decoding = self.sequences.values().filter(|s| s.is_decoding());
        decoding.filter_map(|s| s.token_slack(target, stretch, now)).min()
    }

    /// Time for which the next step may wait so that no answer exceeds the TPOT SLO by it. Zero where a prompt can be read, since it
    /// waits too, and without an SLO that can be met.
    pub fn decode_slack(&self, now: Instant) -> Duration {
        let step = self.rates.least(0, 1);
        let target = self.decode_pacing.target(step);
        let slack = target.and_then(|target| self.least_slack(target, now)).unwrap_or_default();
        let can_read = |(key, s): (&QueueKey, &Sequence)| {
            let n_computed = s.n_computed();
            let readable = || s.readable(n_computed, &self.cross).unwrap_or(0);
            !s.is_decoding() && !self.waits_for_item(*key) && readable() > n_computed
        };
        let slack = slack.saturating_sub(step);
        if slack.is_zero() || self.sequences.iter().any(can_read) { Duration::ZERO } else { slack }
    }

    /// The part of [`decode_slack`](Self::decode_slack) for which no answer exceeds the TPOT SLO if a step with prompts comes before
    /// the next token. Zero once half of the time up to an answer's deadline has passed: that comes before an SLO.
    pub fn spare_decode_slack(&self, now: Instant) -> Duration {
        let slack = self.decode_slack(now);
        let mut decoding = self.sequences.values().filter(|s| s.is_decoding());
        if slack.is_zero() || decoding.any(|s| !s.is_early(now)) {
            return Duration::ZERO;
        }
        let until_late =
            self.decode_pacing.slo().and_then(|slo| self.least_slack(slo, now)).unwrap_or_default();
        slack.min(until_late.saturating_sub(self.rates.least(0, 1).saturating_add(self.rates.long_prefill())))
    }

    /// Predicted time of a step with as many rows of prompts as wait and fit.
    fn prefill_step(&self) -> Duration {
        let n_rows = self.n_waiting_tokens().min(self.config.token_budget);
        let row = self.rates.prefill_row().unwrap_or_default();
        self.rates.least(0, 1).saturating_add(row.saturating_mul(u32::try_from(n_rows).unwrap_or(u32::MAX)))
    }
}
