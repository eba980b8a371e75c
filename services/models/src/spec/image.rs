//! Parts of encoders beyond a plain stack: hierarchical towers, projectors, position biases.

use super::{
    AttentionNames, EncoderSpec, InterpolatedSpec, LevelsSpec, NormSpec, ReductionSpec, StackNames, StackSpec,
};

/// Parts that few encoders have; none by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncoderExtras {
    /// Names of learned factors, a channel each, on what attention and feed-forward add to the stream.
    /// They are folded into the outer matrices.
    pub scales: Option<[&'static str; 2]>,
    /// A learned bias on the scores of attention.
    pub position_bias: Option<PositionBiasSpec>,
    /// A learned grid of positions, resampled to each image.
    pub interpolated: Option<InterpolatedSpec>,
    /// Rows one after another whose mean becomes one row, before the norm behind the layers; what is left of a unit is no
    /// output.
    pub pooled: Option<usize>,
    /// Further levels of output rows.
    pub levels: Option<LevelsSpec>,
    /// Learned output rows, `[out]` each, that stand between those of tiles, such as the end of a line of patches. Of each the
    /// full names in the order they are tried.
    pub learned_rows: Vec<&'static [&'static str]>,
    /// The cut of an image into tiles, each of which the stack reads by itself; `None`: it reads the whole image.
    pub tiling: Option<TilingSpec>,
    /// Names of further norms in a layer: of the heads before the output projection, and of the inner values of the feed-forward
    /// (sub-LN, <https://arxiv.org/abs/2210.06423>).
    pub sub_norms: Option<[&'static str; 2]>,
    /// Learned tables that are added row by row.
    pub added: AddedTables,
    /// A convolution over the projected rows of an image, which leaves fewer. Only behind [`ProjectedRows::Patches`].
    ///
    /// [`ProjectedRows::Patches`]: super::ProjectedRows::Patches
    pub reduction: Option<ReductionSpec>,
    /// The tower's place among those that read the same item; `None`: it is the only one.
    pub tower: Option<TowerSpec>,
}

/// A tower of a model in which several read the same item. Each has an encoder output of its own, with rows of its own width.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerSpec {
    /// Name of the tower, in settings and messages.
    pub name: &'static str,
    /// Of the first tower: those after it.
    pub further: Vec<EncoderSpec>,
}

/// Names of learned tables with a row for each row of an image, or for each of its patches; bare parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddedTables {
    /// Added to the rows of the stem, `[1, n_rows, hidden]`: positions beside rotations.
    pub stem: Option<&'static str>,
    /// Added to the patches before the projector, `[n_patches, hidden]`.
    pub patches: Option<&'static str>,
}

/// A cut of images into tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilingSpec {
    /// The whole image as one tile, then the tiles of the image at the size that fits it best; lines of patches end with the
    /// first learned row, and patches of padding alone are left out (LLaVA-NeXT,
    /// <https://llava-vl.github.io/blog/2024-01-30-llava-next/>).
    AnyResolution {
        /// Sizes, down and across, in pixels.
        sizes: Vec<[u32; 2]>,
        /// Tiles whose rows there may be, whatever the size; more are made fewer. `None`: any number (LLaVA-OneVision has a
        /// bound, <https://arxiv.org/abs/2408.03326>).
        max_tiles: Option<u32>,
    },
    /// The image at a multiple of tiles, then the whole image as one; an image of one tile is that alone (Idefics3,
    /// <https://arxiv.org/abs/2408.12637>).
    Split,
    /// The image at the arrangement of tiles whose shape is nearest, then the whole image as one; an image of one tile is that
    /// alone (InternVL 1.5, <https://arxiv.org/abs/2404.16821>).
    AspectRatio,
    /// The same where `config.json` has the numbers of tiles, and colours are normalised as ImageNet's.
    AspectRatioWithin {
        /// The least and the most tiles, that of the whole image not counted.
        tiles: [u32; 2],
    },
    /// The whole image as one tile, then parts of a long image along its longer side (Gemma 3,
    /// <https://arxiv.org/abs/2503.19786>).
    PanAndScan,
    /// Parts of a large image at the arrangement whose shape is nearest, then the whole image, larger than a part, its shape kept
    /// and its margins filled; then the first learned row (DeepSeek-OCR-2,
    /// <https://huggingface.co/deepseek-ai/DeepSeek-OCR-2>).
    Views,
    /// Windows of a large or long image, then the whole image as a larger square (Step3,
    /// <https://huggingface.co/stepfun-ai/step3>).
    SlidingWindows,
}

/// A bias on scores by the offset between two patches, with values of its own for the one learned row before them.
///
/// Stored as `[(2·down − 1)·(2·across − 1) + 3, n_heads]`: an entry for each offset, then learned row to patch,
/// patch to learned row, learned row to itself.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionBiasSpec {
    /// Patches down and across.
    pub grid: [usize; 2],
    /// Name of the table: in each layer, or one for all.
    pub table: PositionBiasTable,
}

/// The tensor that holds a position bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionBiasTable {
    /// One in each layer, under this name.
    PerLayer(&'static str),
    /// One for all layers, under this name.
    Shared(&'static str),
}

/// An image and a text that become one sequence of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct CaptionedSpec {
    /// Pixels to rows.
    pub tower: DavitSpec,
    /// Rows, and columns, of the last grid at most.
    pub max_positions: usize,
    /// Rows of image and text at most.
    pub max_rows: usize,
    /// Tokens in the table.
    pub vocab: usize,
    /// Factor on the rows of tokens; folded into the table.
    pub scale: f32,
    /// Norm of the image's rows.
    pub norm: NormSpec,
    /// True if the linear layer to the width of tokens is a bare parameter, `[in, out]`.
    pub transposed: bool,
    /// Names of its tensors.
    pub names: &'static CaptionedNames,
}

impl CaptionedSpec {
    /// Rows of an image of these pixels down and across; `None` if its grid exceeds the learned positions.
    pub fn image_rows(&self, pixels: [usize; 2]) -> Option<usize> {
        let grid = self.tower.output_grid(pixels);
        let fits = grid.iter().all(|n| (1..=self.max_positions).contains(n));
        fits.then_some(grid[0] * grid[1] + 1)
    }
}

/// Names of the tensors of an image projector.
#[derive(Debug, PartialEq, Eq)]
pub struct CaptionedNames {
    /// Prefixes of the tower, in the order they are tried.
    pub tower: &'static [&'static str],
    /// Prefixes of what follows it, in the order they are tried.
    pub projector: &'static [&'static str],
    /// Half a row of values for each row of the grid.
    pub row_positions: &'static str,
    /// Half a row of values for each column.
    pub column_positions: &'static str,
    /// Linear layer to the width of tokens.
    pub projection: &'static str,
    /// Norm after it.
    pub norm: &'static str,
}

/// DaViT: stages that attend inside windows and between channels in turn.
#[derive(Clone, Debug, PartialEq)]
pub struct DavitSpec {
    /// The stages.
    pub stages: Vec<DavitStageSpec>,
    /// Rows on a side of a window.
    pub window: usize,
    /// Names of its tensors.
    pub names: &'static DavitNames,
}

/// A stage: a convolution, then layers, each twice attention and feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DavitStageSpec {
    /// Channels that the convolution reads.
    pub channels: usize,
    /// Kernel side of the convolution.
    pub kernel: usize,
    /// Stride of the convolution.
    pub stride: usize,
    /// Zero padding on either side.
    pub padding: usize,
    /// True if the norm comes before the convolution.
    pub norm_first: bool,
    /// Groups of channels that attend among themselves.
    pub n_groups: usize,
    /// The layers, with the heads of their windows.
    pub stack: StackSpec,
}

impl DavitStageSpec {
    /// Positions along an axis of `n` positions of the stage before.
    pub fn output_size(&self, n: usize) -> usize {
        (n + 2 * self.padding).checked_sub(self.kernel).map_or(0, |rest| rest / self.stride.max(1) + 1)
    }
}

impl DavitSpec {
    /// Channels of a pixel.
    pub fn channels(&self) -> usize {
        self.stages.first().map_or(0, |s| s.channels)
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.stages.last().map_or(0, |s| s.stack.hidden)
    }

    /// Grid of the last stage for an image of these pixels, down and across.
    pub fn output_grid(&self, pixels: [usize; 2]) -> [usize; 2] {
        self.stages.iter().fold(pixels, |grid, stage| grid.map(|n| stage.output_size(n)))
    }
}

/// Names of the tensors of a DaViT tower.
#[derive(Debug, PartialEq)]
pub struct DavitNames {
    /// The list of convolutions between stages, a norm and a linear layer each.
    pub convolutions: &'static str,
    /// The convolution in it.
    pub convolution: &'static str,
    /// The norm in it.
    pub norm: &'static str,
    /// The list of stages, lists of blocks.
    pub blocks: &'static str,
    /// The half of a block that attends inside windows.
    pub spatial: &'static str,
    /// The half that attends between channels.
    pub channel: &'static str,
    /// The depthwise convolutions of a half, before attention and before feed-forward.
    pub depthwise: [&'static str; 2],
    /// Attention inside windows.
    pub window: AttentionNames,
    /// Attention between channels.
    pub channels: AttentionNames,
    /// Feed-forward of either half; its attention is that of windows.
    pub stack: StackNames,
}

/// Swin: stages of shifted windows; between two, four rows become one of twice the width.
#[derive(Clone, Debug, PartialEq)]
pub struct SwinSpec {
    /// Dimensions of a patch as its weight is stored: channels, height, width.
    pub patch: [usize; 3],
    /// Windows of each stage.
    pub windows: Vec<SwinWindow>,
    /// The scores inside them.
    pub scores: SwinScores,
    /// The stages; every second layer of one is shifted.
    pub stages: Vec<StackSpec>,
    /// Added to the variance in the norms after the patches and between stages.
    pub norm_eps: f32,
    /// Names of its tensors; those of a layer are named as in any stack.
    pub names: &'static SwinNames,
}

/// The windows of a stage of Swin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwinWindow {
    /// Rows on a side.
    pub side: usize,
    /// Rows that the grid of every second layer is shifted by.
    pub shift: usize,
}

/// The scores inside windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwinScores {
    /// Products, with a stored bias for each offset. A grid as narrow as a window is not shifted, a narrower one refused.
    Products,
    /// Cosines times a factor of each head, with a bias that a network of two layers makes of each offset (version 2). A narrow
    /// grid is padded and shifted as any other. Between stages the norm comes after the linear layer.
    Cosines {
        /// Rows on a side of the windows by which offsets are measured, of each stage.
        measured: Vec<usize>,
        /// Name of the logarithm of each head's factor.
        factor: &'static str,
    },
}

impl SwinSpec {
    /// Rows of the last stage; `None` for a grid that a window of some stage does not fit into.
    pub(super) fn rows(&self, mut grid: [usize; 2]) -> Option<usize> {
        let pads = matches!(self.scores, SwinScores::Cosines { .. });
        for (i, window) in self.windows.iter().enumerate() {
            if i > 0 {
                grid = grid.map(|n| n.div_ceil(2));
            }
            if grid[0].min(grid[1]) < if pads { 1 } else { window.side } {
                return None;
            }
        }
        grid[0].checked_mul(grid[1])
    }
}

/// Names of the tensors of a Swin encoder.
#[derive(Debug, PartialEq, Eq)]
pub struct SwinNames {
    /// Linear layer over patches.
    pub projection: &'static str,
    /// Norm after it.
    pub norm: &'static str,
    /// The list of stages.
    pub stages: &'static str,
    /// Bias of a layer's scores by offset, `[(2·window − 1)², n_heads]`, or the network that makes it.
    pub bias: &'static str,
    /// Norm of four rows joined.
    pub merge_norm: &'static str,
    /// Linear layer over them.
    pub merge: &'static str,
}
