//! A model as data: shapes, and an enum value for each difference between models.
//!
//! A family turns `config.json` into these; [`crate::encoder`] and [`crate::decoder`] run them. Nothing here
//! reads a file or names a model. The idea, one encoder and one decoder with models as specs, is that of
//! CTranslate2 (<https://github.com/OpenNMT/CTranslate2/blob/v4.6.0/CONTRIBUTING.md>).

mod experts;
mod image;
mod kv_groups;
mod names;
mod positions;
mod projector;
mod recurrent;
mod sam;
mod square_views;
mod stem;
mod work;

pub use experts::*;
pub use image::*;
pub use kv_groups::*;
pub use names::*;
pub use positions::*;
pub use projector::*;
pub use recurrent::*;
pub use sam::*;
pub use square_views::*;
pub use stem::*;

use std::num::NonZeroU32;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, NormKind};

/// A whole model: one encoder or none, one decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The encode stage; `None`: the decoder reads its prompt alone.
    pub encoder: Option<EncoderSpec>,
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
    /// Position encoding of the rows.
    pub positions: Positions,
    /// The layers.
    pub stack: StackSpec,
    /// Layers that attend inside windows only; `None`: every layer attends to the whole sequence.
    pub windows: Option<WindowSpec>,
    /// Parts that few encoders have.
    pub extras: EncoderExtras,
    /// From rows of the stack to output rows; `None`: they are the same.
    pub projector: Option<ProjectorSpec>,
    /// Names of its tensors.
    pub names: &'static EncoderNames,
}

impl EncoderSpec {
    /// Width of an output row.
    pub fn output_width(&self) -> usize {
        if let Some(reduction) = &self.extras.reduction {
            return reduction.out;
        }
        let level = match (&self.stem, &self.projector) {
            (_, Some(projector)) => projector.out(self.stack.hidden),
            (StemSpec::Tiles(tiles), None) => tiles.out,
            (_, None) => self.stack.hidden,
        };
        level * (1 + self.extras.levels.as_ref().map_or(0, |levels| levels.layers.len()))
    }

    /// Rows of the stack that become one output row.
    pub fn merged_rows(&self) -> usize {
        let joined = self.projector.as_ref().map_or(1, |projector| projector.group().max(1));
        let halves = if self.has_queries() { 2 } else { 1 };
        joined * halves * self.extras.pooled.unwrap_or(1).max(1)
    }

    /// True if the second half of an image's rows are learned queries.
    pub fn has_queries(&self) -> bool {
        self.projector.as_ref().is_some_and(|projector| projector.rows == ProjectedRows::Queries)
    }

    /// Side of the square of rows that become one output row.
    pub fn merged_side(&self) -> usize {
        self.projector.as_ref().map_or(1, |projector| projector.side.max(1))
    }

    /// Side of the square whose rows follow each other in the stack.
    pub fn contiguous_side(&self) -> usize {
        match self.projector.as_ref().map(|projector| projector.rows) {
            Some(ProjectedRows::All) => self.merged_side(),
            Some(ProjectedRows::Patches | ProjectedRows::Line | ProjectedRows::Queries) | None => 1,
        }
    }

    /// Output rows of an image of `grid` patches down and across, a text's rows not counted; `None` for a grid that it does
    /// not read.
    pub fn image_tokens(&self, grid: [usize; 2]) -> Option<usize> {
        let stack_rows = self.stem.image_rows(grid)?;
        let side = self.merged_side();
        if self.extras.reduction.is_some() {
            let [down, across] = grid.map(|n| ReductionSpec::reduced(n / side));
            return Some(down * across);
        }
        match self.projector.as_ref().map(|projector| projector.rows) {
            Some(ProjectedRows::Patches) => {
                let whole = grid.iter().all(|n| n.is_multiple_of(side));
                whole.then_some(grid[0] * grid[1] / (side * side))
            }
            Some(ProjectedRows::All | ProjectedRows::Line | ProjectedRows::Queries) | None => {
                Some(stack_rows / self.merged_rows())
            }
        }
    }

    /// The same encoder for images of `grid` patches, whose positions are resampled from those of its own; `None` for one that has no
    /// square table of positions, or reads images of any size.
    pub fn resized(mut self, grid: [usize; 2]) -> Option<Self> {
        let StemSpec::PrefixedPatches { grid: own, n_prefix, .. } = &mut self.stem else { return None };
        let table = ResampledSpec {
            from: *own,
            to: grid,
            n_placed: *n_prefix,
            n_unplaced: 0,
            filter: GridFilter::Bicubic,
            bare: true,
        };
        let resampled = match self.positions {
            Positions::Parameter { .. } => table,
            Positions::Table { offset: 0, .. } => ResampledSpec { bare: false, ..table },
            Positions::Resampled(table) => ResampledSpec { to: grid, ..table },
            _ => return None,
        };
        *own = grid;
        self.positions = Positions::Resampled(resampled);
        let is_square = resampled.from[0] == resampled.from[1];
        (is_square && self.extras.position_bias.is_none() && !grid.contains(&0)).then_some(self)
    }

    /// Prefixes of further tensors of the encoder: for each part a list, of which one is stored.
    pub fn further_prefixes(&self) -> Vec<&'static [&'static str]> {
        let mut parts: Vec<&'static [&'static str]> = match &self.stem {
            StemSpec::Tiles(tiles) => vec![tiles.names.projection],
            StemSpec::Captioned(captioned) => vec![captioned.names.tower, captioned.names.projector],
            StemSpec::Sam(sam) => vec![sam.names.prefixes, sam.queries[0], sam.queries[1]],
            _ => Vec::new(),
        };
        parts.extend(self.projector.as_ref().and_then(|projector| projector.names.prefixes));
        parts.extend(self.extras.reduction.iter().flat_map(|reduction| reduction.prefixes));
        parts.extend(self.extras.learned_rows.iter().copied());
        parts
    }

    /// The towers that read an item, this one first; all but one only where a model has several.
    pub fn towers(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.extras.tower.iter().flat_map(|tower| &tower.further))
    }

    /// Name of this tower; empty: there are no others.
    pub fn tower_name(&self) -> &'static str {
        self.extras.tower.as_ref().map_or("", |tower| tower.name)
    }
}

/// A decoder: token table, positions, transformer layers, head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Width of the logits: tokens in the table without those that [`HeadSpec::input_only`] counts.
    pub vocab: usize,
    /// Tokens the context holds.
    pub max_context: usize,
    /// Position encoding of the rows.
    pub positions: Positions,
    /// The layers.
    pub stack: StackSpec,
    /// The path of encoder rows into the decoder.
    pub items: ItemsSpec,
    /// Factor on token embeddings; folded into the table.
    pub embedding_scale: f32,
    /// Rows of the last layer to logits.
    pub head: HeadSpec,
    /// Names of its tensors.
    pub names: &'static DecoderNames,
}

/// The projection to logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// True if the token table serves as the head where none is stored.
    pub tied: bool,
    /// Factor on the rows it reads; folded into its weights.
    pub scale: f32,
    /// Rows at the end of the token table that have no logit: tokens that are only ever input.
    pub input_only: usize,
    /// Bound `c` that logits come near and never reach: `c · tanh(logit / c)`; `None`: none.
    pub softcap: Option<f32>,
    /// Layers before the projection; `None`: none.
    pub transform: Option<HeadTransformSpec>,
}

/// A linear layer with bias as wide as the rows, an activation and a norm, before the projection to logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadTransformSpec {
    /// Activation of the linear layer.
    pub activation: Activation,
    /// Kind of the norm.
    pub norm: NormSpec,
    /// Full names of the linear layer and of the norm.
    pub names: [&'static str; 2],
    /// Full names, with their endings, of a bias of the logits, `[vocab]`, in the order they are tried; added where it is stored.
    pub biases: &'static [&'static str],
}

impl HeadSpec {
    /// A head without a factor.
    pub const fn plain(tied: bool) -> Self {
        Self { tied, scale: 1.0, input_only: 0, softcap: None, transform: None }
    }
}

/// The path of encoder rows into the decoder.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemsSpec {
    /// In the place of token embeddings. Rows have `1 + levels` times `hidden` values.
    Embedded {
        /// Levels beyond the first: the `hidden` values of level `i`, from 1, are added to the output of layer `i − 1`
        /// (DeepStack, <https://arxiv.org/abs/2406.04334>).
        levels: usize,
        /// True if the rows of a span attend to each other, also to those after their own.
        is_mutual: bool,
    },
    /// Through cross-attention.
    CrossAttention(CrossSpec),
}

/// Cross-attention of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossSpec {
    /// Width of an encoder row.
    pub encoder_hidden: usize,
    /// Heads, scale and biases; they may differ from self-attention's.
    pub attention: AttentionSpec,
    /// The layers that cross-attend.
    pub layers: CrossLayers,
    /// Width of the first tower's rows, which stand among the tokens; those of the last are cross-attended to. `None`: there is
    /// one tower, whose rows are all cross-attended to, or stand nowhere else.
    pub embedded_hidden: Option<usize>,
}

/// The layers of a decoder that cross-attend.
#[derive(Clone, Debug, PartialEq)]
pub enum CrossLayers {
    /// All, after their self-attention.
    Every,
    /// Some, in the place of their self-attention. Sequences without encoder rows skip them, and so do tokens before the
    /// first that attends to encoder rows.
    Instead(CrossInstead),
}

/// Layers that cross-attend in the place of self-attention.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossInstead {
    /// Indices of the layers, ascending.
    pub layers: Vec<usize>,
    /// Names of the tensors that only these layers have.
    pub names: &'static CrossInsteadNames,
}

/// Names of tensors that only layers without self-attention have, relative to the layer.
#[derive(Debug, PartialEq)]
pub struct CrossInsteadNames {
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

/// A stack of transformer layers, equal but for what [`Self::layers`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct StackSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Self-attention, and cross-attention where there is one.
    pub attention: AttentionSpec,
    /// Feed-forward block of each layer.
    pub feed_forward: FeedForwardSpec,
    /// Every norm of the stack.
    pub norm: NormSpec,
    /// Norm before the first layer.
    pub input_norm: InputNorm,
    /// Placement of the norm of a sub-layer.
    pub placement: NormPlacement,
    /// True if a norm follows the last layer.
    pub final_norm: bool,
    /// Differences of each layer of a decoder, `[n_layers]`; empty: all are alike. Encoders have it empty.
    pub layers: Vec<LayerSpec>,
}

impl StackSpec {
    /// Differences of a layer from the stack.
    pub fn layer(&self, idx: usize) -> LayerSpec {
        self.layers.get(idx).cloned().unwrap_or_default()
    }
}

/// Differences of one layer from its stack; none by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerSpec {
    /// Keys up to its own that a query of self-attention attends to at most, itself included; `None`: all.
    pub window: Option<NonZeroU32>,
    /// Rotation of queries and keys; `None`: that of the stack's positions.
    pub rotary: Option<RotarySpec>,
    /// Experts in the place of the stack's feed-forward block; `None`: that block.
    pub experts: Option<ExpertsSpec>,
    /// Queries of self-attention through fewer values; `None`: by one matrix.
    pub low_rank_query: Option<LowRankQuerySpec>,
    /// Linear attention in the place of self-attention; `None`: self-attention.
    pub recurrent: Option<GatedDeltaSpec>,
    /// Names of a visual expert: second weights of self-attention's projections and of the feed-forward, for the rows of a span
    /// of encoder rows but its last (<https://arxiv.org/abs/2311.03079>); its norms are not read. `None`: there is none.
    pub visual_expert: Option<&'static StackNames>,
}

/// A query projection in two matrices with a norm between them, the stack's, without biases (multi-matrix factorization
/// attention, <https://arxiv.org/abs/2412.19255>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankQuerySpec {
    /// Values between both, in the place of all heads' in the first.
    pub rank: usize,
    /// Names of the norm and of the second matrix, relative to the layer.
    pub names: [&'static str; 2],
}

/// Heads and biases of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Heads and scale.
    pub shape: AttentionShape,
    /// Projections that have a bias.
    pub bias: AttentionBias,
    /// Norms of queries and keys; `None`: none.
    pub head_norms: Option<HeadNormsSpec>,
}

/// Norms of queries and of keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNormsSpec {
    /// Kind of both.
    pub norm: NormSpec,
    /// The values that are normalised together.
    pub part: NormedPart,
    /// Names of that of queries and that of keys, relative to the layer.
    pub names: [&'static str; 2],
}

/// The part of queries, and of keys, that a norm is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormedPart {
    /// Each head by itself: `[head_dim]`.
    Head,
    /// All heads of a row together: `[n_heads · head_dim]`.
    Row,
}

/// Projections of an attention that have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBias {
    /// Bias of the query projection.
    pub q: bool,
    /// Bias of the key projection.
    pub k: bool,
    /// Bias of the value projection.
    pub v: bool,
    /// Bias of the output projection.
    pub out: bool,
}

/// A feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedForwardSpec {
    /// Inner width, in values.
    pub width: usize,
    /// One matrix in, or two with one gating the other.
    pub kind: FeedForwardKind,
    /// Activation of the inner values, or of the gate.
    pub activation: Activation,
    /// True if its linear layers have a bias.
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
    /// The same, with `G` on top of `U` in one stored matrix.
    GateUp,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Layer norm or RMS norm.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
    /// True if it has a bias, which only [`NormKind::Layer`] can.
    pub bias: bool,
    /// True if the factor is the stored scale plus 1.
    pub unit_offset: bool,
}

impl NormSpec {
    /// Layer norm, with a bias.
    pub const fn layer(eps: f32) -> Self {
        Self { kind: NormKind::Layer, eps, bias: true, unit_offset: false }
    }

    /// RMS norm, without a bias.
    pub const fn rms(eps: f32) -> Self {
        Self { kind: NormKind::Rms, eps, bias: false, unit_offset: false }
    }
}

/// Placement of the norm of a sub-layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + f(norm(x))`.
    Pre,
    /// `norm(x + f(x))`.
    Post,
    /// `x + norm(f(x))`.
    ResPost,
    /// `x + norm₂(f(norm(x)))`.
    Sandwich {
        /// Names of `norm₂` of attention and of feed-forward, relative to the layer.
        names: [&'static str; 2],
    },
}

impl NormPlacement {
    /// Names of the second norms of attention and of feed-forward; empty without.
    pub fn second_names(self) -> [&'static str; 2] {
        match self {
            Self::Pre | Self::Post | Self::ResPost => [""; 2],
            Self::Sandwich { names } => names,
        }
    }
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

/// Attention inside windows of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowSpec {
    /// Side of a window in merge groups.
    pub side: usize,
    /// Layers with full attention over the image, ascending.
    pub full_attention_layers: Vec<usize>,
}
