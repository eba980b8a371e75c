//! Arguments of attention: heads, masks, sequences, and the paged cache.

use std::num::NonZeroU32;

use super::bias::ScoreBias;
use super::rotary::Rotation;
use super::stage::{Indices, PagedSequences, Sequences};

/// Heads of an attention, and how scores are scaled and capped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on every score, usually `1/√head_dim`.
    pub scale: f32,
    /// Bound `c` that scaled scores come near and never reach, before a bias is added: `c · tanh(score / c)`; `None`: none.
    pub softcap: Option<f32>,
}

impl AttentionShape {
    /// Columns of queries, and of keys or of values.
    pub fn widths(self) -> [usize; 2] {
        [self.n_heads, self.n_kv_heads].map(|heads| heads.saturating_mul(self.head_dim))
    }
}

/// Query heads whose weights are asked for.
#[derive(Clone, Copy, Debug)]
pub struct ChosenHeads {
    /// Heads of the attention.
    pub shape: AttentionShape,
    /// Indices of the chosen query heads, in the order of the result, `[heads]`.
    pub heads: Indices,
}

/// The keys that a query may attend to.
#[derive(Clone, Copy, Debug)]
pub enum Mask {
    /// Every query attends to every key of its sequence.
    Full,
    /// The last query of a sequence attends to all its keys, each earlier one to one key fewer.
    Causal,
    /// As [`Self::Causal`], with fewer keys or more.
    Bounded(MaskBounds),
}

/// Changes to a causal mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct MaskBounds {
    /// Keys up to its own that a query attends to at most, itself included (a sliding window); `None`: all.
    pub window: Option<NonZeroU32>,
    /// Keys after its own that each query attends to as well, `[Σq]`: the rest of a span whose tokens attend to each other.
    /// The last key that a query attends to is never before that of the query before it. `None`: none.
    pub ahead: Option<Indices>,
}

impl Mask {
    /// The causal mask with these changes.
    pub fn causal(bounds: MaskBounds) -> Self {
        match bounds {
            MaskBounds { window: None, ahead: None } => Self::Causal,
            bounds => Self::Bounded(bounds),
        }
    }

    /// Changes to a causal mask; `None` for [`Self::Full`].
    pub(crate) fn bounds(self) -> Option<MaskBounds> {
        match self {
            Self::Full => None,
            Self::Causal => Some(MaskBounds::default()),
            Self::Bounded(bounds) => Some(bounds),
        }
    }
}

/// Size of a paged KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers, each with its own keys and values.
    pub n_layers: usize,
    /// Blocks of `KV_BLOCK_TOKENS` tokens.
    pub n_blocks: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Query, key and value of [`Backend::attention`](super::Backend::attention).
#[derive(Debug)]
pub struct Qkv<'a, T> {
    /// `[Σq, n_heads·head_dim]`.
    pub q: &'a T,
    /// `[Σk, n_kv_heads·head_dim]`.
    pub k: &'a T,
    /// `[Σk, n_kv_heads·head_dim]`.
    pub v: &'a T,
}

/// Rows of [`Backend::write_fused_qkv`](super::Backend::write_fused_qkv).
#[derive(Debug)]
pub struct FusedQkv<'a, T> {
    /// Queries, keys and values side by side, `[n_tokens, (n_heads + 2·n_kv_heads)·head_dim]`.
    pub rows: &'a T,
    /// Heads of the rows.
    pub shape: AttentionShape,
    /// Rotation of queries and keys.
    pub rotation: Option<Rotation>,
}

/// Sequences of [`Backend::attention`](super::Backend::attention).
#[derive(Debug)]
pub struct Varlen<'a, L, T> {
    /// Offsets of each sequence's queries and keys.
    pub seqs: Sequences,
    /// The keys of a sequence that each of its queries may attend to.
    pub mask: Mask,
    /// Bias added to the scores.
    pub bias: ScoreBias<'a, L, T>,
}

impl<L, T> Copy for Varlen<'_, L, T> {}

impl<L, T> Clone for Varlen<'_, L, T> {
    fn clone(&self) -> Self {
        *self
    }
}

/// One layer of a cache, to read.
#[derive(Debug)]
pub struct KvLayer<'a, C, L, T> {
    /// The cache.
    pub cache: &'a C,
    /// Index of the layer.
    pub layer: usize,
    /// The sequences whose keys are read, and the rows of their queries.
    pub seqs: PagedSequences,
    /// The keys of a sequence that each of its queries may attend to.
    pub mask: Mask,
    /// Bias added to the scores.
    pub bias: ScoreBias<'a, L, T>,
}

/// Slots of one layer of a cache, to write; slot = block id · `KV_BLOCK_TOKENS` + place in the block.
#[derive(Debug)]
pub struct KvSlots<'a, C> {
    /// The cache.
    pub cache: &'a mut C,
    /// Index of the layer.
    pub layer: usize,
    /// Slot of each row, `[n_tokens]`.
    pub slots: Indices,
}
