//! The legend of dimension names, and element types.
//!
//! Every tensor in the code base is documented with these names, row-major unless it says otherwise:
//!
//! | name | counts |
//! |---|---|
//! | `n_tokens` | rows of a flat, unpadded batch: the tokens of all its sequences, concatenated |
//! | `n_seqs` | sequences in a step |
//! | `n_heads`, `n_kv_heads` | query heads; key and value heads (grouped-query attention when fewer) |
//! | `head_dim` | width of one head |
//! | `hidden` | width of the residual stream; for an encoder output, the width of a row |
//! | `ffn` | inner width of the feed-forward block |
//! | `vocab` | entries of the vocabulary |
//! | `n_patches` | image patches before merging; `patch_dim` the values of one patch |
//! | `n_mels`, `n_frames` | mel bins and 10 ms frames of a log-mel spectrogram |
//! | `n_blocks`, `block_size` | KV blocks of a pool, and tokens in one block |

use std::fmt;

/// Element type of a stored or computed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Eight-bit integers with an f32 scale for each row. Only rows of encoder outputs.
    I8,
    /// Eight-bit floats (E4M3, no infinities) with an f32 scale for each row. Only rows of encoder outputs.
    F8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I8 | Self::F8 => 1,
        }
    }

    /// True if each row has an f32 scale beside its elements.
    pub const fn is_scaled(self) -> bool {
        matches!(self, Self::I8 | Self::F8)
    }

    /// The name used in safetensors headers, settings and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::I8 => "I8",
            Self::F8 => "F8_E4M3",
        }
    }

    /// Reads the name, in either case.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::F16, Self::I8, Self::F8]
            .into_iter()
            .find(|d| d.as_str().eq_ignore_ascii_case(text))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Tokens in one KV block, of self- and cross-attention alike (`block_size`).
///
/// 32 keys make a page a whole micro-kernel panel on the CPU, so attention over pages needs no packing.
pub const KV_BLOCK_TOKENS: usize = 32;
