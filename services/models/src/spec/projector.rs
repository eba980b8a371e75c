//! The part of an encoder behind its stack: rows joined, a norm, linear layers.

use super::NormSpec;
use triptych_kernels::ops::Activation;

/// Rows of a stack to output rows.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectorSpec {
    /// Rows of the stack that it reads.
    pub rows: ProjectedRows,
    /// Side of the square of rows that become one, or of a line their number; 1: each by itself.
    pub side: usize,
    /// The way that rows of a square become one.
    pub merge: RowMerge,
    /// Norm before the first linear layer.
    pub norm: Option<ProjectorNorm>,
    /// Outputs of each linear layer, in order.
    pub widths: Vec<usize>,
    /// True if the linear layers have a bias.
    pub bias: bool,
    /// True if the linear layers are bare parameters, `[in, out]`.
    pub transposed: bool,
    /// Activation between two linear layers.
    pub activation: Activation,
    /// Names of its tensors.
    pub names: &'static ProjectorNames,
    /// A linear layer of joined rows before the others; `None`: there is none.
    pub merging: Option<MergingSpec>,
    /// A gated feed-forward behind the linear layers; `None`: there is none.
    pub gated: Option<GatedSpec>,
}

/// A linear layer of joined rows, without activation. Its inputs are stored channel by channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergingSpec {
    /// Outputs.
    pub width: usize,
    /// Form of the stored weight.
    pub form: MergingForm,
    /// Name, under the prefix of the projector.
    pub name: &'static str,
}

/// Form of the stored weight of a [`MergingSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergingForm {
    /// `[out, hidden · side²]`, without bias.
    Matrix,
    /// A convolution `[out, hidden, side, side]`, with bias.
    Convolution,
}

/// A norm with an activation, then a gated feed-forward without biases.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedSpec {
    /// The norm.
    pub norm: NormSpec,
    /// Activation of normalised values.
    pub normed: Activation,
    /// Inner width of the feed-forward.
    pub width: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Names of the norm, of gate and up, and of the outer layer.
    pub names: [&'static str; 4],
}

impl ProjectorSpec {
    /// Width of an output row, from that of a row of the stack.
    pub fn out(&self, hidden: usize) -> usize {
        self.widths.last().copied().unwrap_or_else(|| self.merged(hidden))
    }

    /// Width of merged rows, which the first linear layer reads, from that of a row of the stack.
    pub fn merged(&self, hidden: usize) -> usize {
        self.merging.map_or_else(|| self.joined(hidden), |merging| merging.width)
    }

    /// Width of joined rows, from that of a row of the stack.
    pub fn joined(&self, hidden: usize) -> usize {
        match self.merge {
            RowMerge::Concatenate => hidden * self.group(),
            RowMerge::Average => hidden,
        }
    }

    /// Rows that become one.
    pub fn group(&self) -> usize {
        match self.rows {
            ProjectedRows::All | ProjectedRows::Patches | ProjectedRows::Queries => self.side * self.side,
            ProjectedRows::Line => self.side,
        }
    }
}

/// The way that rows of a square become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMerge {
    /// One after another, line by line of the square: `[side² · hidden]`.
    Concatenate,
    /// Their mean: `[hidden]`. Only before a norm of joined rows.
    Average,
}

/// Rows of a stack that a projector reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectedRows {
    /// All, in the order of the stack, where rows of a square follow each other.
    All,
    /// Those of an image's patches, square by square; rows that stand before them are left out.
    Patches,
    /// All, which stand in one line, such as those of audio.
    Line,
    /// The second half of an image's rows: learned queries. They attend to the rows up to their own, those of the first half to
    /// each other.
    Queries,
}

/// The norm of a projector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectorNorm {
    /// Its kind.
    pub norm: NormSpec,
    /// True if it is of joined rows, false if of each row before it is joined.
    pub of_joined: bool,
}

/// Names of the tensors of a projector.
#[derive(Debug, PartialEq, Eq)]
pub struct ProjectorNames {
    /// Full prefixes, in the order they are tried; `None`: those of the encoder.
    pub prefixes: Option<&'static [&'static str]>,
    /// The norm, if it has one.
    pub norm: &'static str,
    /// The linear layers, in order; an empty name is the prefix itself.
    pub layers: &'static [&'static str],
}

/// Further levels of output rows: the output of layers within the stack, each through a projector of its own. The values of
/// a level follow those of the level before in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelsSpec {
    /// Indices of the layers, ascending.
    pub layers: Vec<usize>,
    /// The projector of each.
    pub projector: ProjectorSpec,
    /// Name of the list of projectors.
    pub list: &'static str,
}

/// A learned table of positions on a square grid, resampled to the grid of each image (bilinear, corners aligned) and added to
/// the rows of the stem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterpolatedSpec {
    /// Positions on a side of the grid.
    pub side: usize,
    /// Name of the table, `[side², hidden]`.
    pub name: &'static str,
}
