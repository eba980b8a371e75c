//! A stem over square images of two sizes, and convolutions behind a stack that make their grids smaller.

/// Patches of squares of two sizes, behind copies of a learned row. Positions are stored for the larger, and resampled for the
/// smaller (bicubic).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SquareViewsSpec {
    /// Dimensions of a patch as its weight is stored: channels, height, width.
    pub patch: [usize; 3],
    /// Patches on a side of a part of an image, and on a side of a whole one, which is that of stored positions.
    pub sides: [usize; 2],
    /// Copies of the learned row, all at its position.
    pub n_prefix: usize,
}

impl SquareViewsSpec {
    /// Rows of a view; `None` for a grid that is neither that of a part nor that of a whole image.
    pub fn rows(&self, grid: [usize; 2]) -> Option<usize> {
        let is_view = self.sides.iter().any(|side| grid == [*side; 2]);
        is_view.then(|| self.n_prefix + grid[0] * grid[1])
    }
}

/// A convolution of stride 2 over the projected rows of an image, then a linear layer, without activation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReductionSpec {
    /// Channels of the convolution.
    pub channels: usize,
    /// Width of an output row.
    pub out: usize,
    /// True if the linear layer has a bias; the convolution has one.
    pub bias: bool,
    /// Full prefixes of the convolution and of the linear layer, in the order they are tried.
    pub prefixes: [&'static [&'static str]; 2],
}

impl ReductionSpec {
    /// Taps of the convolution on a side; its padding is half of that, rounded down.
    pub const TAPS: usize = 3;
    /// Its stride.
    pub const STRIDE: usize = 2;

    /// Positions along an axis of `n` behind the convolution.
    pub fn reduced(n: usize) -> usize {
        n.div_ceil(Self::STRIDE)
    }
}
