//! Known tokens over an encoder output: where the heads of a decoder look. It is no sequence: it takes no blocks,
//! waits in no line, and is done between two steps.

use crate::request::SequenceId;
use triptych_core::EncoderOutput;

/// A pass over known tokens.
#[derive(Clone, Debug)]
pub struct AlignJob {
    /// Whom the result is for; a name that no sequence has.
    pub id: SequenceId,
    /// The tokens, from position 0.
    pub tokens: Vec<u32>,
    /// The encoder output.
    pub output: EncoderOutput,
    /// First row of it.
    pub first_row: u32,
    /// Rows.
    pub n_rows: u32,
    /// Heads of cross-attention, as (layer, head).
    pub heads: std::sync::Arc<[(u32, u32)]>,
}
