//! Facts about a speech model that joining its transcripts needs.

use std::sync::Arc;

/// What whoever puts a transcript together must know of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechInfo {
    /// Token of 0.00 s; later ones are later times. `None`: the model knows no times.
    pub first_time: Option<u32>,
    /// Length of a window in milliseconds.
    pub window_ms: u32,
    /// Milliseconds of sound in an encoder row.
    pub row_ms: u32,
    /// Tokens of earlier text that a prompt holds at most.
    pub max_previous: usize,
    /// Width of the logits.
    pub vocab: usize,
    /// Heads of cross-attention that follow the sound, as (layer, head); none: words have no times.
    pub alignment_heads: Arc<[(u32, u32)]>,
    /// Width of the median over their weights.
    pub median: usize,
}
