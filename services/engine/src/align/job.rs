//! A pass over known tokens, as it is asked for.

use crate::request::SequenceId;
use triptych_core::{AdapterId, EncoderOutput};

/// A pass over known tokens.
#[derive(Clone, Debug)]
pub struct AlignJob {
    /// Id of the result; no sequence has it.
    pub id: SequenceId,
    /// Tokens, from position 0.
    pub tokens: Vec<u32>,
    /// Encoder output rows, `[n_tokens, hidden]`.
    pub output: EncoderOutput,
    /// First row to attend to.
    pub first_row: u32,
    /// Number of rows to attend to.
    pub n_rows: u32,
    /// Adapter of the tokens.
    pub adapter: Option<AdapterId>,
    /// Heads of cross-attention, as (layer, head).
    pub heads: std::sync::Arc<[(u32, u32)]>,
}
