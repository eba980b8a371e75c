//! Times and counters of a sequence.

use std::time::Instant;

/// Times of the events in a sequence's life.
#[derive(Clone, Copy, Debug)]
pub struct Milestones {
    /// Arrival.
    pub arrived: Instant,
    /// Start of its first step.
    pub first_step: Option<Instant>,
    /// Time of its first token.
    pub first_token: Option<Instant>,
}

/// Token counters of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceCounters {
    /// Prompt tokens that were found in the prefix cache at the first admission.
    pub n_cached: usize,
    /// Draft tokens that were verified.
    pub n_drafted: usize,
    /// Draft tokens that were accepted.
    pub n_accepted: usize,
}
