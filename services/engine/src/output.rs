//! What leaves the engine: news of one sequence at a time.

use crate::request::SequenceId;
use std::time::{Duration, Instant};
use triptych_core::Failure;
use triptych_core::sampling::{FinishReason, TokenLogprob};

/// News of a sequence. After `Finished` or `Failed` there is no more.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// It wrote something.
    Delta(SequenceId, Delta),
    /// It ended as it should.
    Finished(SequenceId, Finished),
    /// Where the heads of an alignment look: `[n_heads, n_tokens, n_rows]`.
    Aligned(SequenceId, Vec<f32>),
    /// It ended otherwise.
    Failed(SequenceId, Failure),
}

/// What a sequence wrote.
///
/// Texts joined are the answer. Text may come later than its tokens: a piece that could be the beginning of
/// a stop string, or of a character, waits. Tokens of a stop string are reported, its text is not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// New text; whole characters only.
    pub text: String,
    /// New tokens; the end token is not among them.
    pub token_ids: Vec<u32>,
    /// One for each new token when asked for, otherwise none.
    pub logprobs: Vec<ChosenToken>,
}

/// A chosen token with its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenToken {
    /// The token that was chosen.
    pub chosen: TokenLogprob,
    /// The most probable tokens at this place, best first.
    pub top: Vec<TokenLogprob>,
}

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Tokens of the prompt, placeholders of items included.
    pub n_prompt: usize,
    /// Tokens of the prompt whose keys and values were there already.
    pub n_cached: usize,
    /// Tokens chosen, the end token included.
    pub n_generated: usize,
    /// Tokens proposed by speculation.
    pub n_drafted: usize,
    /// Of those, how many were right.
    pub n_accepted: usize,
    /// Probability that the window holds no speech, for families that say so.
    pub no_speech_prob: Option<f32>,
    /// Log-probability of the end token, if it came and log-probabilities were asked for.
    pub end_logprob: Option<f32>,
    /// Where its time went.
    pub times: SequenceTimes,
}

/// The engine's part of a sequence's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTimes {
    /// From arrival to its first step: waiting for blocks, budget and items.
    pub queue: Duration,
    /// From its first step to its first token.
    pub prefill: Duration,
    /// When its first token was there.
    pub first_token: Instant,
    /// When its last token was there.
    pub last_token: Instant,
}

impl Output {
    /// Whose news.
    pub fn id(&self) -> SequenceId {
        match self {
            Self::Delta(id, _) | Self::Finished(id, _) | Self::Failed(id, _) | Self::Aligned(id, _) => *id,
        }
    }

    /// Whether this is the last news of the sequence.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Delta(..))
    }
}
