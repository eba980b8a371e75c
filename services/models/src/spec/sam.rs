//! The tower of Segment Anything, as far as it encodes images, with convolutions behind it that make its grid smaller.

use super::{EncoderNames, StackSpec};

/// A tower over patches whose layers attend inside windows, some over the whole image, with biases by offsets down and across
/// that depend on the query (<https://arxiv.org/abs/2304.02643>). Behind it a neck of two convolutions and two more of stride 2;
/// then as many learned rows as that leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct SamSpec {
    /// Dimensions of a patch as its weight is stored: channels, height, width.
    pub patch: [usize; 3],
    /// Patches on a side of a part of an image, and on a side of a whole one, which is that of stored positions.
    pub sides: [usize; 2],
    /// Rows on a side of a window.
    pub window: usize,
    /// Layers that attend over the whole image, ascending.
    pub global_layers: Vec<usize>,
    /// The layers.
    pub stack: StackSpec,
    /// Channels of both convolutions of the neck, of the first behind it, and of the second.
    pub channels: [usize; 3],
    /// Names of its tensors; those of the stem are the patches, positions, then both convolutions and both norms of the neck,
    /// then both convolutions behind it.
    pub names: &'static EncoderNames,
    /// Names of the biases of a layer by offsets down and across, `[2·side − 1, head_dim]`.
    pub offsets: [&'static str; 2],
    /// Full names of the learned rows of a part, and of a whole image.
    pub queries: [&'static [&'static str]; 2],
}

impl SamSpec {
    /// Added to the variance in the norms of the neck; not in the configuration.
    pub const NECK_EPS: f32 = 1e-6;

    /// Positions along an axis of `n` behind the convolutions.
    pub fn reduced(n: usize) -> usize {
        n.div_ceil(2).div_ceil(2)
    }

    /// Rows of a view behind the convolutions; `None` for a grid that is neither that of a part nor that of a whole image.
    pub fn patch_rows(&self, grid: [usize; 2]) -> Option<usize> {
        let is_view = self.sides.iter().any(|side| grid == [*side; 2]);
        is_view.then(|| Self::reduced(grid[0]) * Self::reduced(grid[1]))
    }
}
