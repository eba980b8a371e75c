//! How rows learn their place: tables, waves, biases on scores, rotations.

use triptych_kernels::ops::{BucketRule, RopePairs};

/// How rows learn their place.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// They do not.
    Absent,
    /// A stored table `[offset + n_rows, hidden]`, added to the stem's output.
    Table {
        /// Positions it has.
        n_rows: usize,
        /// Row of position 0: some tables begin with rows that nothing uses.
        offset: usize,
    },
    /// As [`Self::Table`] without rows in front, but stored as a bare parameter `[1, n_rows, hidden]`.
    Parameter {
        /// Positions it has.
        n_rows: usize,
    },
    /// As [`Self::Sinusoids`], never stored, with frequencies down to 1 / 10 000 itself.
    WideSinusoids {
        /// Positions it has.
        n_rows: usize,
        /// What is added to a position before its angles are taken.
        offset: usize,
    },
    /// As a table `[n_rows, hidden]`: sines of all frequencies, then their cosines. A stored table, which some
    /// checkpoints have, wins.
    Sinusoids {
        /// Positions it has.
        n_rows: usize,
    },
    /// Rotation of queries and keys.
    Rotary(RotarySpec),
    /// A bias of self-attention's scores for each bucket of distances.
    Relative(RelativeSpec),
}

/// Learned biases of scores by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeSpec {
    /// Buckets of distances.
    pub n_buckets: usize,
    /// Which distances are in which bucket.
    pub rule: BucketRule,
    /// Which layers have a table `[n_buckets, n_heads]`.
    pub tables: RelativeTables,
}

/// Which layers have a table of biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelativeTables {
    /// The first, whose table is everyone's.
    First,
    /// Every one.
    Each,
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    /// Base of the frequencies.
    pub theta: f32,
    /// Which part of a position turns which frequency.
    pub axes: RotaryAxes,
    /// Values of a head that are turned, from its first; `None`: all.
    pub rotary_dim: Option<usize>,
    /// Which values are turned together.
    pub pairs: RopePairs,
    /// How frequencies were stretched after training, for a longer context.
    pub scaling: RotaryScaling,
}

impl RotarySpec {
    /// Whole heads in halves, as trained.
    pub const fn new(theta: f32, axes: RotaryAxes) -> Self {
        Self { theta, axes, rotary_dim: None, pairs: RopePairs::Halves, scaling: RotaryScaling::Absent }
    }
}

/// How frequencies were stretched for a longer context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// They were not.
    Absent,
    /// By parts: wave lengths beyond `context / low` by `factor`, below `context / high` not, smoothly between.
    Llama3 {
        /// How much slower the slow ones turn.
        factor: f32,
        /// Where slow begins.
        low: f32,
        /// Where fast begins.
        high: f32,
        /// Tokens of the context before.
        context: f32,
    },
}

/// How the `head_dim / 2` frequencies are shared out over a position's (temporal, height, width).
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryAxes {
    /// All follow the temporal part: plain text.
    Single,
    /// Consecutive runs of frequencies for temporal, height, width; they add up to `head_dim / 2` (M-RoPE).
    Sections([usize; 3]),
    /// Two equal halves, height then width, each with the frequencies of `head_dim / 2`.
    Plane,
}
