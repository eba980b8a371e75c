//! The stem of an encoder: its features to its first rows.

use super::{CaptionedSpec, SamSpec, SquareViewsSpec, SwinSpec, TilesNames};

/// Features to rows.
#[derive(Clone, Debug, PartialEq)]
pub enum StemSpec {
    /// Two convolutions of three taps with GELU over log-mel, the second of stride 2.
    Mel {
        /// Mel bins.
        n_mels: usize,
        /// Frames of a window; rows are half as many.
        n_frames: usize,
        /// Windows of an audio.
        windows: MelWindows,
    },
    /// One linear layer over the values of a patch.
    Patches {
        /// Dimensions of a patch, in the order of its stored weight, which has no frames if they are one: channels, frames,
        /// height, width.
        patch: [usize; 4],
        /// True if the layer has a bias.
        bias: bool,
    },
    /// Three convolutions over chunks of log-mel, each an image of its own, then one linear layer.
    MelChunks(MelChunksSpec),
    /// Convolutions over samples.
    Wave(WaveSpec),
    /// Patches of the tiles that an image is cut into.
    Tiles(TilesSpec),
    /// Rows of a token table.
    Tokens {
        /// Tokens in the table.
        vocab: usize,
        /// Tokens of the longest text.
        max_tokens: usize,
        /// Factor on the rows; folded into the table.
        scale: f32,
    },
    /// One linear layer over the values of a patch, after learned rows, if any, that every image or tile begins with.
    PrefixedPatches {
        /// Dimensions of a patch, in the order of its stored weight: channels, height, width.
        patch: [usize; 3],
        /// Patches down and across; any other grid is refused.
        grid: [usize; 2],
        /// True if the layer has a bias.
        bias: bool,
        /// Learned rows; their names follow that of the linear layer.
        n_prefix: usize,
        /// Those of them, at their end, that are stored as one table `[1, n, hidden]`, whose name is the last.
        n_registers: usize,
        /// True if they are stored as `[hidden]` each, not as `[1, 1, hidden]`.
        flat_prefix: bool,
    },
    /// A tower of stages over patches, attending inside windows.
    Swin(SwinSpec),
    /// A tower over the pixels of an image, projected, then rows of a token table.
    Captioned(CaptionedSpec),
    /// A tower over patches whose grid convolutions make smaller, then as many learned rows.
    Sam(Box<SamSpec>),
    /// Patches of squares of two sizes behind learned rows. The stem's names are the patches, the row, a bare parameter
    /// `[1, hidden]`, and the table of positions, that of the row first.
    SquareViews(SquareViewsSpec),
}

impl StemSpec {
    /// Rows it makes of an image of `grid` patches down and across, a text's rows not counted; `None` for a grid
    /// that it does not read.
    pub fn image_rows(&self, grid: [usize; 2]) -> Option<usize> {
        match self {
            Self::Mel { .. } | Self::MelChunks(_) | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => {
                None
            }
            Self::Patches { .. } => grid[0].checked_mul(grid[1]),
            Self::PrefixedPatches { grid: own, n_prefix, .. } => {
                (grid == *own).then_some(own[0] * own[1] + n_prefix)
            }
            Self::Swin(spec) => spec.rows(grid),
            Self::Captioned(spec) => spec.image_rows(grid),
            Self::Sam(spec) => spec.patch_rows(grid).map(|n| 2 * n),
            Self::SquareViews(spec) => spec.rows(grid),
        }
    }

    /// Patches down and across of every image; `None` if they are as the image is.
    pub fn fixed_grid(&self) -> Option<[usize; 2]> {
        match self {
            Self::PrefixedPatches { grid, .. } => Some(*grid),
            _ => None,
        }
    }

    /// Pixels on a side of a patch; `None` if it reads no images.
    pub fn patch_side(&self) -> Option<usize> {
        match self {
            Self::Mel { .. } | Self::MelChunks(_) | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => {
                None
            }
            Self::Patches { patch: [.., side], .. } | Self::PrefixedPatches { patch: [.., side], .. } => {
                Some(*side)
            }
            Self::Swin(spec) => Some(spec.patch[2]),
            Self::Captioned(_) => Some(1),
            Self::Sam(spec) => Some(spec.patch[2]),
            Self::SquareViews(spec) => Some(spec.patch[2]),
        }
    }

    /// Patches along `pixels` of an image: whole ones, or as many as cover it where the stem pads.
    pub fn patches_along(&self, pixels: usize) -> usize {
        let side = self.patch_side().unwrap_or(1);
        match self {
            Self::Swin(_) => pixels.div_ceil(side),
            _ => pixels / side,
        }
    }

    /// Values of a patch; 0 if it reads no images.
    pub fn patch_values(&self) -> usize {
        match self {
            Self::Mel { .. } | Self::MelChunks(_) | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => 0,
            Self::Patches { patch, .. } => patch.iter().product(),
            Self::PrefixedPatches { patch, .. } => patch.iter().product(),
            Self::Swin(spec) => spec.patch.iter().product(),
            Self::Captioned(spec) => spec.tower.channels(),
            Self::Sam(spec) => spec.patch.iter().product(),
            Self::SquareViews(spec) => spec.patch.iter().product(),
        }
    }
}

/// Windows of log-mel that an audio becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MelWindows {
    /// Any number, each with a log-mel of its own, filled up with silence; the decoder reads one at a time.
    Separate,
    /// One, filled up with silence whose rows are not attended to and are no output.
    Masked,
    /// As many as the whole audio fills, cut out of one log-mel of it; their rows are one item's, those of silence included.
    Joined,
}

/// Convolutions over log-mel in chunks: three of 3 by 3 taps and stride 2, with GELU, then one linear layer, without bias, over
/// all bins and channels of a frame. A chunk is an image of its own, filled up with zeros; a row of nothing else is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MelChunksSpec {
    /// Mel bins.
    pub n_mels: usize,
    /// Frames of a chunk.
    pub n_frames: usize,
    /// Channels of each convolution.
    pub n_channels: usize,
    /// Chunks that attend to each other.
    pub n_chunks: usize,
}

impl MelChunksSpec {
    /// Convolutions, each of which halves bins and frames.
    pub const N_CONVS: usize = 3;

    /// Length of an axis behind the convolutions.
    pub fn reduced(n: usize) -> usize {
        n.div_ceil(1 << Self::N_CONVS)
    }

    /// Rows of a whole chunk.
    pub fn chunk_rows(&self) -> usize {
        Self::reduced(self.n_frames)
    }

    /// Rows of the chunks that attend to each other.
    pub fn window_rows(&self) -> usize {
        self.n_chunks * self.chunk_rows()
    }

    /// Rows of so many frames.
    pub fn n_rows(&self, n_frames: usize) -> usize {
        let n_whole = n_frames / self.n_frames.max(1);
        n_whole * self.chunk_rows() + Self::reduced(n_frames - n_whole * self.n_frames)
    }

    /// Values of the chunks of so many frames, `[n_chunks, n_mels, n_frames]`.
    pub fn n_values(&self, n_frames: usize) -> Option<usize> {
        let n_chunks = n_frames.div_ceil(self.n_frames.max(1));
        n_chunks.checked_mul(self.n_mels)?.checked_mul(self.n_frames)
    }
}

/// Three convolutions over raw samples, of the stack's width, twice that width, and that width again. After the first,
/// which has no bias, come tanh and a norm of the whole window; after the others GELU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaveSpec {
    /// Samples per second.
    pub rate: u32,
    /// Taps and stride of each.
    pub convs: [[usize; 2]; 3],
    /// Added to the variance of the norm.
    pub norm_eps: f32,
    /// Samples of a window.
    pub window: usize,
}

impl WaveSpec {
    /// Rows that the stem makes of `n_samples` samples.
    pub fn n_rows(&self, n_samples: usize) -> usize {
        self.convs
            .iter()
            .fold(n_samples, |n, [taps, stride]| n.checked_sub(*taps).map_or(0, |n| n / stride + 1))
    }

    /// Samples from one row to the next.
    pub fn samples_per_row(&self) -> usize {
        self.convs.iter().map(|[_, stride]| stride).product()
    }

    /// Samples of one row.
    pub fn min_samples(&self) -> usize {
        self.convs.iter().rev().fold(1, |n, [taps, stride]| (n - 1) * stride + taps)
    }
}

/// An encoder of images that are cut into tiles: each tile has a class row and its patches; the stack is followed by a
/// second, gated one, and the output of both, and of some layers between, is projected to one row.
#[derive(Clone, Debug, PartialEq)]
pub struct TilesSpec {
    /// Dimensions of a patch, in the order of its stored weight: channels, height, width.
    pub patch: [usize; 3],
    /// Patches on a side of a tile.
    pub side: usize,
    /// Tiles that are computed of every image, whether it has as many or not.
    pub max_tiles: usize,
    /// Added to the variance of the norms before and after the stack.
    pub norm_eps: f32,
    /// Layers of the second stack.
    pub n_global_layers: usize,
    /// Layers of the stack whose output is part of the row as well, in the order of the projection's columns.
    pub taps: Vec<usize>,
    /// Width of an output row.
    pub out: usize,
    /// Names of its tensors.
    pub names: &'static TilesNames,
}

impl TilesSpec {
    /// Rows of a tile: its class and its patches.
    pub fn tile_rows(&self) -> usize {
        self.side * self.side + 1
    }

    /// Rows of an image with all tiles.
    pub fn image_rows(&self) -> usize {
        self.max_tiles * self.tile_rows()
    }

    /// Tiles down and across of every way to cut an image, in the order in which tables know them, from 1.
    pub fn arrangements(&self) -> Vec<[usize; 2]> {
        let sides = 1..=self.max_tiles;
        sides
            .clone()
            .flat_map(|down| sides.clone().map(move |across| [down, across]))
            .filter(|[down, across]| down * across <= self.max_tiles)
            .collect()
    }
}
