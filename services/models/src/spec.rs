//! What a model is, as data: shapes, and an enum value for each difference between models.
//!
//! A family turns `config.json` into these; [`crate::encoder`] and [`crate::decoder`] run them. Nothing here
//! reads a file or names a model. The idea, one encoder and one decoder with models as specs, is that of
//! CTranslate2 (<https://github.com/OpenNMT/CTranslate2/blob/v4.6.0/CONTRIBUTING.md>).

mod image;

pub use image::*;

use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, BucketRule, NormKind, RopePairs};

/// A whole model: one encoder, one decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The encode stage.
    pub encoder: EncoderSpec,
    /// The prefill and decode stages.
    pub decoder: DecoderSpec,
}

/// An encoder: stem, positions, transformer layers, and what follows them.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// The kind of items it reads.
    pub modality: Modality,
    /// Features to rows.
    pub stem: StemSpec,
    /// How rows learn their place.
    pub positions: Positions,
    /// The layers.
    pub stack: StackSpec,
    /// Layers that attend inside windows only; `None`: every layer sees the whole sequence.
    pub windows: Option<WindowSpec>,
    /// What few encoders have.
    pub extras: EncoderExtras,
    /// A projection that makes several rows one; `None`: the stack's rows are the output.
    pub merger: Option<MergerSpec>,
    /// What its tensors are called.
    pub names: &'static EncoderNames,
}

impl EncoderSpec {
    /// Width of an output row.
    pub fn output_width(&self) -> usize {
        let merged = match (&self.stem, &self.merger) {
            (StemSpec::Tiles(tiles), _) => tiles.out,
            (_, Some(merger)) => merger.out,
            (_, None) => self.stack.hidden,
        };
        self.extras.projection.map_or(merged, |p| p.out)
    }

    /// Prefixes of tensors that are the encoder's and stand under none of its own: of each part one or another.
    pub fn further_prefixes(&self) -> Vec<&'static [&'static str]> {
        let mut parts: Vec<&'static [&'static str]> = match &self.stem {
            StemSpec::Tiles(tiles) => vec![tiles.names.projection],
            StemSpec::Captioned(captioned) => vec![captioned.names.tower, captioned.names.projector],
            _ => Vec::new(),
        };
        parts.extend(self.extras.projection.map(|p| p.prefixes));
        parts
    }
}

/// A decoder: token table, positions, transformer layers, head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Width of the logits: tokens in the table but for those that [`HeadSpec::unwritten`] counts.
    pub vocab: usize,
    /// Tokens the context holds.
    pub max_context: usize,
    /// How rows learn their place.
    pub positions: Positions,
    /// The layers.
    pub stack: StackSpec,
    /// How encoder rows come in.
    pub items: ItemsSpec,
    /// Factor on token embeddings; folded into the table.
    pub embedding_scale: f32,
    /// Rows of the last layer to logits.
    pub head: HeadSpec,
    /// What its tensors are called.
    pub names: &'static DecoderNames,
}

/// The projection to logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// Whether the token table stands in for a head that is not stored.
    pub tied: bool,
    /// Factor on the rows it reads; folded into its weights.
    pub scale: f32,
    /// Rows at the end of the token table that have no logit: tokens that are read and never written.
    pub unwritten: usize,
}

impl HeadSpec {
    /// A head without a factor.
    pub const fn plain(tied: bool) -> Self {
        Self { tied, scale: 1.0, unwritten: 0 }
    }
}

/// How encoder rows reach the decoder.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemsSpec {
    /// In the place of token embeddings; rows are as wide as the decoder's.
    Embedded,
    /// Through cross-attention.
    CrossAttention(CrossSpec),
}

/// How a decoder cross-attends.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossSpec {
    /// Width of an encoder row.
    pub encoder_hidden: usize,
    /// Heads, scale and biases; they may differ from self-attention's.
    pub attention: AttentionSpec,
    /// Which layers do it.
    pub layers: CrossLayers,
}

/// Which layers of a decoder cross-attend.
#[derive(Clone, Debug, PartialEq)]
pub enum CrossLayers {
    /// All, after their self-attention.
    Every,
    /// Some, in the place of their self-attention. A sequence without encoder rows passes them by, and so do its
    /// tokens before the first that sees them.
    Instead(CrossInstead),
}

/// Layers that cross-attend in the place of self-attention.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossInstead {
    /// Which, ascending.
    pub layers: Vec<usize>,
    /// Of each head of queries and keys.
    pub head_norm: NormSpec,
    /// What their own tensors are called.
    pub names: &'static CrossInsteadNames,
}

/// What only layers without self-attention have; relative to the layer.
#[derive(Debug, PartialEq)]
pub struct CrossInsteadNames {
    /// Norms of a head's queries and keys.
    pub head_norms: [&'static str; 2],
    /// Full names of the gates on attention and feed-forward: their `tanh` is a factor, folded into weights.
    pub gates: [&'static str; 2],
}

impl CrossSpec {
    /// The layers that cross-attend in the place of self-attention.
    pub fn instead(&self) -> Option<&CrossInstead> {
        match &self.layers {
            CrossLayers::Every => None,
            CrossLayers::Instead(instead) => Some(instead),
        }
    }
}

/// A stack of equal transformer layers.
#[derive(Clone, Debug, PartialEq)]
pub struct StackSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub n_layers: usize,
    /// Self-attention, and cross-attention where there is one.
    pub attention: AttentionSpec,
    /// Feed-forward.
    pub feed_forward: FeedForwardSpec,
    /// Every norm of the stack.
    pub norm: NormSpec,
    /// Whether and where rows are normalised before the first layer.
    pub input_norm: InputNorm,
    /// Where the norm of a sub-layer sits.
    pub placement: NormPlacement,
    /// Whether a norm follows the last layer.
    pub final_norm: bool,
}

/// Heads and biases of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Heads and scale.
    pub shape: AttentionShape,
    /// Which projections have one.
    pub bias: AttentionBias,
}

/// Which projections of an attention have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBias {
    /// Queries.
    pub q: bool,
    /// Keys.
    pub k: bool,
    /// Values.
    pub v: bool,
    /// Output.
    pub out: bool,
}

/// A feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedForwardSpec {
    /// Inner width.
    pub width: usize,
    /// One matrix in, or two with one gating the other.
    pub kind: FeedForwardKind,
    /// On the inner values, or on the gate.
    pub activation: Activation,
    /// Whether its layers have a bias.
    pub bias: bool,
}

/// The form of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// `W₂ act(W₁ x)`.
    Plain,
    /// `W₂ (act(G x) · U x)`.
    Gated,
    /// The same, with `U` on top of `G` in one stored matrix.
    UpGate,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Which.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
    /// Whether it has a bias, which only one of kind [`NormKind::Layer`] can.
    pub bias: bool,
}

impl NormSpec {
    /// Mean and variance, with a bias.
    pub const fn layer(eps: f32) -> Self {
        Self { kind: NormKind::Layer, eps, bias: true }
    }

    /// Root mean square.
    pub const fn rms(eps: f32) -> Self {
        Self { kind: NormKind::Rms, eps, bias: false }
    }
}

/// Where the norm of a sub-layer sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + f(norm(x))`.
    Pre,
    /// `norm(x + f(x))`.
    Post,
}

/// A norm between the stem or token table and the first layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputNorm {
    /// None.
    Absent,
    /// Of the embeddings alone: positions are added to its result.
    BeforePositions,
    /// Of the sum of embeddings and positions.
    AfterPositions,
}

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

/// Attention inside windows of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowSpec {
    /// Side of a window in merge groups.
    pub side: usize,
    /// Layers that see the whole image, ascending.
    pub whole_layers: Vec<usize>,
}

/// A projection that makes a square of `side · side` rows one: norm, join, two linear layers with GELU between.
#[derive(Clone, Debug, PartialEq)]
pub struct MergerSpec {
    /// Rows on a side of the square.
    pub side: usize,
    /// Width of its output.
    pub out: usize,
}

/// Features to rows.
#[derive(Clone, Debug, PartialEq)]
pub enum StemSpec {
    /// Two convolutions of three taps with GELU over log-mel, the second of stride 2.
    Mel {
        /// Mel bins.
        n_mels: usize,
        /// Frames of a window; rows are half as many.
        n_frames: usize,
    },
    /// One linear layer over the values of a patch, without bias.
    Patches {
        /// Dimensions of a patch as its weight is stored: channels, frames, height, width.
        patch: [usize; 4],
    },
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
    /// One linear layer with bias over the values of a patch, after learned rows that every image begins with.
    PrefixedPatches {
        /// Dimensions of a patch as its weight is stored: channels, height, width.
        patch: [usize; 3],
        /// Patches down and across; the only grid that it reads.
        grid: [usize; 2],
        /// Learned rows, `[1, 1, hidden]` each; their names follow that of the linear layer.
        n_prefix: usize,
    },
    /// A pyramid of stages over patches, attending inside windows.
    ShiftedWindows(ShiftedSpec),
    /// A pyramid over the pixels of an image, projected, then rows of a token table.
    Captioned(CaptionedSpec),
}

impl StemSpec {
    /// Rows it makes of an image of `grid` patches down and across, a text's rows not counted; `None` for a grid
    /// that it does not read.
    pub fn image_rows(&self, grid: [usize; 2]) -> Option<usize> {
        match self {
            Self::Mel { .. } | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => None,
            Self::Patches { .. } => grid[0].checked_mul(grid[1]),
            Self::PrefixedPatches { grid: own, n_prefix, .. } => {
                (grid == *own).then_some(own[0] * own[1] + n_prefix)
            }
            Self::ShiftedWindows(spec) => spec.rows(grid),
            Self::Captioned(spec) => spec.image_rows(grid),
        }
    }

    /// Pixels on a side of a patch; `None` if it reads no images.
    pub fn patch_side(&self) -> Option<usize> {
        match self {
            Self::Mel { .. } | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => None,
            Self::Patches { patch: [.., side] } | Self::PrefixedPatches { patch: [.., side], .. } => {
                Some(*side)
            }
            Self::ShiftedWindows(spec) => Some(spec.patch[2]),
            Self::Captioned(_) => Some(1),
        }
    }

    /// Patches along `pixels` of an image: whole ones, or as many as cover it where the stem pads.
    pub fn patches_along(&self, pixels: usize) -> usize {
        let side = self.patch_side().unwrap_or(1);
        match self {
            Self::ShiftedWindows(_) => pixels.div_ceil(side),
            _ => pixels / side,
        }
    }

    /// Values of a patch; 0 if it reads no images.
    pub fn patch_values(&self) -> usize {
        match self {
            Self::Mel { .. } | Self::Tokens { .. } | Self::Wave(_) | Self::Tiles(_) => 0,
            Self::Patches { patch } => patch.iter().product(),
            Self::PrefixedPatches { patch, .. } => patch.iter().product(),
            Self::ShiftedWindows(spec) => spec.patch.iter().product(),
            Self::Captioned(spec) => spec.pyramid.channels(),
        }
    }
}

/// Three convolutions over raw samples, of the stack's width, twice it, and it again: tanh and a norm of the whole
/// piece after the first, which has no bias; GELU after the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaveSpec {
    /// Samples per second.
    pub rate: u32,
    /// Taps and stride of each.
    pub convs: [[usize; 2]; 3],
    /// Added to the variance of the norm.
    pub norm_eps: f32,
    /// Samples of the longest piece that is read at once.
    pub window: usize,
}

impl WaveSpec {
    /// Rows that so many samples become.
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
    /// Dimensions of a patch as its weight is stored: channels, height, width.
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
    /// What its tensors are called.
    pub names: &'static TilesNames,
}

impl TilesSpec {
    /// Rows of a tile: its class and its patches.
    pub fn tile_rows(&self) -> usize {
        self.side * self.side + 1
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

/// What the tensors of an encoder of tiles are called, beside those of its stack; relative to its prefix.
#[derive(Debug, PartialEq)]
pub struct TilesNames {
    /// The row before the patches of every tile; a full name.
    pub class: &'static str,
    /// Places of rows in a tile; a full name.
    pub positions: &'static str,
    /// The gate between those and the next; a full name.
    pub position_gate: &'static str,
    /// Places of rows in an image of each arrangement.
    pub tile_positions: &'static str,
    /// Tables of tiles before the stack and after it; full names.
    pub tiles: [&'static str; 2],
    /// Their gates; full names.
    pub tile_gates: [&'static str; 2],
    /// Norms before the stack and after it.
    pub norms: [&'static str; 2],
    /// The list of layers of the second stack.
    pub global_layers: &'static str,
    /// Gates of its layers' attention and feed-forward; full names.
    pub global_gates: [&'static str; 2],
    /// Full prefixes of the projection, in the order they are tried.
    pub projection: &'static [&'static str],
}

/// What an encoder's tensors are called. Names are relative to a prefix, without `.weight` and `.bias`.
#[derive(Debug, PartialEq)]
pub struct EncoderNames {
    /// Prefixes of one checkpoint generation or another, in the order they are tried.
    pub prefixes: &'static [&'static str],
    /// Layers of the stem, in order.
    pub stem: &'static [&'static str],
    /// Full names of the token table of an encoder of text, in the order they are tried; else empty.
    pub tokens: &'static [&'static str],
    /// Position table, or a layer's table of biases, relative to the layer; empty without one.
    pub positions: &'static str,
    /// The layers.
    pub stack: StackNames,
    /// Norm and two linear layers of the merger, if there is one.
    pub merger: Option<[&'static str; 3]>,
}

/// What a decoder's tensors are called.
#[derive(Debug, PartialEq)]
pub struct DecoderNames {
    /// Prefixes of one checkpoint generation or another, in the order they are tried.
    pub prefixes: &'static [&'static str],
    /// Full names of the token table, in the order they are tried.
    pub tokens: &'static [&'static str],
    /// Position table, or a layer's table of biases, relative to the layer; empty without one.
    pub positions: &'static str,
    /// The layers.
    pub stack: StackNames,
    /// Full names of the head, in the order they are tried.
    pub head: &'static [&'static str],
    /// Full name of a bias of the logits, `[1, vocab]`, with its ending; added where it is stored.
    pub head_bias: Option<&'static str>,
}

/// What the tensors of a stack are called.
#[derive(Debug, PartialEq)]
pub struct StackNames {
    /// Norm before the first layer; relative to the prefix, empty without one.
    pub input_norm: &'static str,
    /// The list of layers.
    pub layers: &'static str,
    /// Self-attention.
    pub attention: AttentionNames,
    /// Cross-attention.
    pub cross: Option<CrossNames>,
    /// Norm of the feed-forward.
    pub feed_forward_norm: &'static str,
    /// Inner layers: one, or gate and up.
    pub feed_forward_inner: &'static [&'static str],
    /// Outer layer.
    pub feed_forward_outer: &'static str,
    /// Norm after the last layer; relative to the prefix.
    pub final_norm: &'static str,
}

/// What the tensors of a cross-attention are called.
#[derive(Debug, PartialEq)]
pub struct CrossNames {
    /// Its norm.
    pub norm: &'static str,
    /// Query, key and value projections.
    pub qkv: [&'static str; 3],
    /// Output projection.
    pub out: &'static str,
}

/// What the tensors of a self-attention are called.
#[derive(Debug, PartialEq)]
pub struct AttentionNames {
    /// Its norm.
    pub norm: &'static str,
    /// Projections.
    pub qkv: QkvNames,
    /// Output projection.
    pub out: &'static str,
}

/// How query, key and value projections are stored.
#[derive(Debug, PartialEq)]
pub enum QkvNames {
    /// One matrix, the three on top of each other.
    Fused(&'static str),
    /// Three.
    Split([&'static str; 3]),
}
