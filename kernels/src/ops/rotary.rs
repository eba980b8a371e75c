//! Arguments of the rotary embedding.

use super::stage::Angles;

/// The pairs of values of a head that are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RopePairs {
    /// Pair `i` is `(x[i], x[i + rotary_dim/2])`: Llama and most others.
    #[default]
    Halves,
    /// Pair `i` is `(x[2i], x[2i + 1])`: GPT-J, GLM, Moonshine.
    Interleaved,
}

/// The part of a head that is rotated, and its pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    /// Width of a head.
    pub head_dim: usize,
    /// Values of a head that are rotated, from its first; even, at most `head_dim`. The rest stays as it is.
    pub rotary_dim: usize,
    /// The values that form a pair.
    pub pairs: RopePairs,
}

impl RopeShape {
    /// Whole heads, paired as [`RopePairs::Halves`].
    pub fn whole(head_dim: usize) -> Self {
        Self { head_dim, rotary_dim: head_dim, pairs: RopePairs::Halves }
    }
}

/// Rotation of the rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// The values of a head that are rotated.
    pub shape: RopeShape,
    /// `[n_tokens, rotary_dim / 2]`.
    pub angles: Angles,
}
