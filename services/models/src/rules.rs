//! Rules of a family on its logits, applied before sampling.
//!
//! Whisper's are the reason: forced task tokens, suppressed tokens, and the grammar of timestamps. The order
//! is that of transformers' logits processors.

use std::sync::Arc;

/// Times among tokens: `<|0.00|>` is `first`, each next one 20 ms later, to the end of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimestampRule {
    /// Token of 0.00 s.
    pub first: u32,
    /// `<|notimestamps|>`.
    pub no_timestamps: u32,
    /// End of text.
    pub end: u32,
    /// Latest first timestamp, as an index; `None`: any.
    pub max_initial: Option<u32>,
}

/// What may be chosen next.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LogitRules {
    /// Never chosen.
    pub suppress: Arc<[u32]>,
    /// Not chosen as the first free token.
    pub begin_suppress: Arc<[u32]>,
    /// For generated token `i`, the only ones allowed: forced tokens have one, language detection many.
    /// Free generation starts after these.
    pub steps: Vec<Arc<[u32]>>,
    /// The grammar of times.
    pub timestamps: Option<TimestampRule>,
    /// Token whose probability at the first free position is reported as "no speech".
    pub no_speech: Option<u32>,
}
