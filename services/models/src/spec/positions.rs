//! Position encodings: tables, sinusoids, biases on scores, rotations.

use triptych_kernels::ops::{BucketRule, RopePairs};

/// Position encoding of the rows of a stack.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// None.
    Absent,
    /// A stored table `[offset + n_rows, hidden]`, added to the stem's output.
    Table {
        /// Positions it has.
        n_rows: usize,
        /// Row of position 0: some tables begin with rows that nothing uses.
        offset: usize,
    },
    /// As [`Self::Table`]; the first row of a second table, of kinds of tokens, is added to every row.
    Typed {
        /// Positions it has.
        n_rows: usize,
        /// Row of position 0.
        offset: usize,
        /// Rows of the second table.
        n_types: usize,
        /// Its name.
        types: &'static str,
    },
    /// As [`Self::Table`] without rows in front, but stored as a bare parameter `[1, n_rows, hidden]`.
    Parameter {
        /// Positions it has.
        n_rows: usize,
    },
    /// A stored table of a grid, for images of one size, which may be another.
    Resampled(ResampledSpec),
    /// As [`Self::Sinusoids`], never stored, with frequencies down to 1 / 10 000 itself.
    WideSinusoids {
        /// Positions it has.
        n_rows: usize,
        /// Added to a position before its angles are computed.
        offset: usize,
    },
    /// As [`Self::WideSinusoids`], anew after every `period` rows.
    RepeatedSinusoids {
        /// Rows until they repeat.
        period: usize,
        /// Positions it has.
        n_rows: usize,
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

/// A position table `[n_placed + from[0] · from[1], hidden]` for images of a grid of their own: the rows of the grid are resampled
/// when it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResampledSpec {
    /// Rows down and across of the stored grid.
    pub from: [usize; 2],
    /// Patches down and across of every image.
    pub to: [usize; 2],
    /// Rows of the table in front of the grid; they are kept as they are.
    pub n_placed: usize,
    /// Rows of the encoder between those and the patches that have no position.
    pub n_unplaced: usize,
    /// Filter.
    pub filter: GridFilter,
    /// True if it is a bare parameter `[1, n, hidden]`, as [`Positions::Parameter`].
    pub bare: bool,
}

/// Filter that a grid of positions is resampled by, with corners that are not aligned; none where the grids are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GridFilter {
    /// The cubic convolution of a = −0.75 over four rows, also where the grid becomes smaller.
    Bicubic,
    /// That of a = −0.5, as wide as the rows that become one.
    AntialiasedBicubic,
}

/// Learned biases of scores by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeSpec {
    /// Buckets of distances.
    pub n_buckets: usize,
    /// The bucket of a distance.
    pub rule: BucketRule,
    /// Layers that have a table `[n_buckets, n_heads]`.
    pub tables: RelativeTables,
}

/// Layers that have a table of biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelativeTables {
    /// The first; all layers share its table.
    First,
    /// Every one.
    Each,
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    /// Base of the frequencies.
    pub theta: f32,
    /// The part of a position that each frequency follows.
    pub axes: RotaryAxes,
    /// Values of a head that are rotated, from its first; `None`: all.
    pub rotary_dim: Option<usize>,
    /// The values that form a pair.
    pub pairs: RopePairs,
    /// Scaling of the frequencies for a context longer than the trained one.
    pub scaling: RotaryScaling,
}

impl RotarySpec {
    /// Whole heads in halves, as trained.
    pub const fn new(theta: f32, axes: RotaryAxes) -> Self {
        Self { theta, axes, rotary_dim: None, pairs: RopePairs::Halves, scaling: RotaryScaling::Absent }
    }
}

/// Scaling of rotary frequencies for a longer context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// None.
    Absent,
    /// All divided by a factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Between bounds.
    Yarn(YarnSpec),
    /// By parts: wave lengths beyond `context / low` by `factor`, below `context / high` not, smoothly between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Low-frequency bound: wave lengths above `context / low` are divided.
        low: f32,
        /// High-frequency bound: wave lengths below `context / high` are kept.
        high: f32,
        /// Tokens of the context in training.
        context: f32,
    },
}

/// YaRN: frequencies between two bounds change smoothly from kept to divided (<https://arxiv.org/abs/2309.00071>).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnSpec {
    /// Divisor of the low frequencies.
    pub factor: f32,
    /// Turns within the trained context above which a frequency is kept.
    pub fast: f32,
    /// Turns within the trained context below which a frequency is divided.
    pub slow: f32,
    /// Tokens of the context in training.
    pub context: f32,
    /// True if the bounds are rounded outward to integers.
    pub truncate: bool,
    /// Factor on cosines and sines.
    pub attention_factor: f32,
}

/// Assignment of the `head_dim / 2` frequencies to a position's (temporal, height, width).
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryAxes {
    /// All follow the temporal part: plain text.
    Single,
    /// Consecutive runs of frequencies for temporal, height, width; they add up to `head_dim / 2` (M-RoPE).
    Sections([usize; 3]),
    /// The same numbers of frequencies for temporal, height, width, taken in turn: frequency `i` follows height where
    /// `i mod 3` is 1, width where it is 2, until that part has its number; temporal elsewhere.
    Interleaved([usize; 3]),
    /// Two equal halves, height then width, each with the frequencies of `head_dim / 2`.
    Plane,
    /// Two equal halves, height then width; of the frequencies of `head_dim`, height has those of even number, width the others.
    AlternatingPlane,
}
