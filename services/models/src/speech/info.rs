//! Facts about a speech model that assembling its transcripts needs.

use std::sync::Arc;

/// Facts about a speech model that assembling its transcripts needs.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechInfo {
    /// Token of 0.00 s; later ones are later times. `None`: the model knows no times.
    pub first_time: Option<u32>,
    /// Length of a window in milliseconds.
    pub window_ms: u32,
    /// Milliseconds of audio in an encoder row.
    pub row_ms: u32,
    /// Tokens of earlier text that a prompt holds at most.
    pub max_previous: usize,
    /// Width of the logits.
    pub vocab: usize,
    /// Cross-attention heads that follow the audio, as (layer, head); empty: words have no times.
    pub alignment_heads: Arc<[(u32, u32)]>,
    /// Width of the median filter over their weights, odd.
    pub median: usize,
}
