//! Outputs of the engine, one sequence at a time.

use crate::request::SequenceId;
use std::time::{Duration, Instant};
use triptych_core::Failure;
use triptych_core::sampling::{FinishReason, PromptToken, TokenLogprob};

/// Output of a sequence. `Finished`, `Aligned` and `Failed` are the last of their id.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// New tokens and text.
    Delta(SequenceId, Delta),
    /// Regular end.
    Finished(SequenceId, Finished),
    /// Cross-attention weights of an alignment, `[n_heads, n_tokens, n_rows]`.
    Aligned(SequenceId, Vec<f32>),
    /// Failure.
    Failed(SequenceId, Failure),
    /// Use of the rows of its items; only with [`RowRetention::UntilRead`](crate::config::RowRetention::UntilRead).
    Rows(SequenceId, RowUse),
}

/// Use of the rows of a sequence's items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUse {
    /// They were read and dropped.
    Read,
    /// They are needed again: each is to be delivered, as for a sequence that arrives.
    Needed,
}

/// New tokens and text of a sequence.
///
/// The texts joined are the completion's text. Text may come later than its tokens: a suffix that may begin a
/// stop string, or part of a character, is held back. Tokens of a stop string are reported, its text is not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// New text; whole characters only.
    pub text: String,
    /// New tokens; the end token is not among them.
    pub token_ids: Vec<u32>,
    /// One for each new token when asked for, otherwise none.
    pub logprobs: Vec<ChosenToken>,
    /// The next tokens of the prompt from the second on, with their log-probabilities, if they were asked for.
    pub prompt_logprobs: Vec<PromptToken>,
}

/// A chosen token with its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenToken {
    /// Chosen token.
    pub chosen: TokenLogprob,
    /// Most probable tokens of this step, best first.
    pub top: Vec<TokenLogprob>,
}

/// End of a sequence, with its usage and times.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Reason of the end.
    pub reason: FinishReason,
    /// Tokens of the prompt, placeholders of items included.
    pub n_prompt: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub n_cached: usize,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
    /// Draft tokens that were verified.
    pub n_drafted: usize,
    /// Draft tokens that were accepted.
    pub n_accepted: usize,
    /// Probability that the window holds no speech, for speech families.
    pub no_speech_prob: Option<f32>,
    /// Log-probability of the end token, if it came and log-probabilities were asked for.
    pub end_logprob: Option<f32>,
    /// Times of its stages.
    pub times: SequenceTimes,
}

/// The engine's part of a sequence's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTimes {
    /// From arrival to its first step: waiting for blocks, budget and items.
    pub queue: Duration,
    /// From its first step to its first token.
    pub prefill: Duration,
    /// Time of its first token.
    pub first_token: Instant,
    /// Time of its last token.
    pub last_token: Instant,
}

impl Output {
    /// Id of the sequence.
    pub fn id(&self) -> SequenceId {
        match self {
            Self::Delta(id, _)
            | Self::Finished(id, _)
            | Self::Failed(id, _)
            | Self::Aligned(id, _)
            | Self::Rows(id, _) => *id,
        }
    }

    /// True for the last output of an id.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Delta(..) | Self::Rows(..))
    }
}
