//! The tower of Segment Anything, convolutions behind it, and learned rows behind those: input of a second tower.
//!
//! After `DeepseekOcr2SamVisionEncoder` and `DeepseekOcr2VisionModel` of
//! <https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/deepseek_ocr2/modeling_deepseek_ocr2.py>.
//! Stored positions are those of a whole image; a part has fewer (bicubic). Views are computed one by one: one has 4096 rows as
//! published.

use super::join::{joined, stage_places};
use super::offsets::{OffsetBiases, Placements, SquareAttention, StagedSquares};
use super::windows::WindowPartition;
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{FeedForward, LinearShape, Loader, Residual, SelfAttention};
use crate::preprocess::image::resample_grid;
use crate::spec::{NormSpec, SamSpec};
use crate::weights::Weights;
use triptych_core::DType;
use triptych_kernels::ops::{Activation, Conv2d, Indices, StageBuilder, WeightView};
use triptych_kernels::{Backend, KernelError};

/// Taps of a convolution on a side.
const TAPS: usize = 3;

/// The stem of [`StemSpec::Sam`](crate::spec::StemSpec::Sam).
pub(crate) struct SamStem<B: Backend> {
    patches: B::Linear,
    // Of a part and of a whole image, `[side², hidden]`.
    positions: [B::Table; 2],
    layers: Vec<SamLayer<B>>,
    // Of the sides of windows, parts and whole images.
    placements: [Placements<B>; 3],
    convolutions: [B::Linear; 4],
    norms: [B::Norm; 2],
    // Of a part and of a whole image.
    queries: [B::Table; 2],
    spec: SamSpec,
}

struct SamLayer<B: Backend> {
    attention_norm: Residual<B>,
    attention: SelfAttention<B>,
    // One for windows; for layers that attend to all, one for parts and one for whole images.
    biases: Vec<OffsetBiases<B>>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
}

/// Views of a run in a step.
pub(crate) struct SamRows {
    /// Of parts and of whole images; `None`: the run has none.
    kinds: [Option<StagedView>; 2],
    /// Rows of the patches and of the queries of each view among those of all.
    places: Vec<Indices>,
}

/// Arrays that all views of one size share.
#[derive(Clone, Copy)]
struct StagedView {
    side: usize,
    windows: StagedSquares,
    whole: StagedSquares,
    /// Every patch, and every query.
    positions: Indices,
    queries: Indices,
}

impl<B: Backend> SamStem<B> {
    /// Loads the tower, what is behind it and the learned rows of width `hidden`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        backend: &B,
        weights: &Weights,
        (spec, hidden): (&SamSpec, usize),
    ) -> Result<Self, ModelError> {
        let loader = Loader::new(backend, weights, spec.names.prefixes);
        let name = |i: usize| spec.names.stem.get(i).copied().unwrap_or_default();
        let [channels, height, width] = spec.patch;
        let own = spec.stack.hidden;
        let conv = |i: usize, [out, n_in]: [usize; 2], taps: usize| {
            let shape = [out, n_in, taps, taps];
            loader.linear(&[LinearShape { name: name(i), shape: &shape, bias: false }])
        };
        let norm = |i: usize| loader.norm(name(i), NormSpec::layer(SamSpec::NECK_EPS), spec.channels[0]);
        let [neck, inner, outer] = spec.channels;
        let shape = [own, channels, height, width];
        let [part, whole] = spec.sides;
        let head_dim = spec.stack.attention.shape.head_dim;
        let placement = |side| Placements::new(backend, side, head_dim);
        let queries = |i: usize| {
            let n_rows = SamSpec::reduced(spec.sides[i]).pow(2);
            Loader::new(backend, weights, spec.queries[i]).table("", n_rows, hidden)
        };
        Ok(Self {
            patches: loader.linear(&[LinearShape { name: name(0), shape: &shape, bias: true }])?,
            positions: positions(&loader, name(1), spec)?,
            layers: (0..spec.stack.n_layers)
                .map(|i| SamLayer::load(&loader, spec, i))
                .collect::<Result<_, _>>()?,
            placements: [placement(spec.window)?, placement(part)?, placement(whole)?],
            convolutions: [
                conv(2, [neck, own], 1)?,
                conv(3, [neck, neck], TAPS)?,
                conv(6, [inner, neck], TAPS)?,
                conv(7, [outer, inner], TAPS)?,
            ],
            norms: [norm(4)?, norm(5)?],
            queries: [queries(0)?, queries(1)?],
            spec: spec.clone(),
        })
    }

    /// Index of the size of a view; `units` has checked it.
    fn kind(&self, unit: &EncodeUnit<'_>) -> usize {
        usize::from(unit.patches[0] != self.spec.sides[0])
    }

    /// Adds views to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<SamRows, KernelError> {
        let mut kinds = [None; 2];
        for unit in units {
            let kind = &mut kinds[self.kind(unit)];
            if kind.is_none() {
                *kind = Some(self.stage_view(builder, unit.patches[0])?);
            }
        }
        let halves = units.iter().flat_map(|unit| [unit.n_rows() / 2; 2]);
        Ok(SamRows { kinds, places: stage_places(builder, halves)? })
    }

    fn stage_view(&self, builder: &mut StageBuilder, side: usize) -> Result<StagedView, KernelError> {
        let n_heads = self.spec.stack.attention.shape.n_heads;
        let mut squares = |of: usize| {
            let windows = WindowPartition { grid: [side; 2], side: of, shift: 0 };
            StagedSquares::stage(builder, windows, n_heads)
        };
        let (windows, whole) = (squares(self.spec.window)?, squares(side)?);
        let every = |n: usize| (0..n as u32).collect::<Vec<_>>();
        Ok(StagedView {
            side,
            windows,
            whole,
            positions: builder.indices(&every(side * side))?,
            queries: builder.indices(&every(SamSpec::reduced(side).pow(2)))?,
        })
    }

    /// Rows of all views, concatenated, of each its patches and then its queries: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        units: &[EncodeUnit<'_>],
        rows: &SamRows,
    ) -> Result<B::Tensor, ModelError> {
        let mut parts = Vec::with_capacity(2 * units.len());
        for unit in units {
            let kind = self.kind(unit);
            let Some(view) = &rows.kinds[kind] else { continue };
            let n_values = self.spec.patch.iter().product();
            let values = unit.values.floats().to_vec();
            let patches = backend.upload(values, view.side * view.side, n_values)?;
            let x = self.tower(backend, step, &patches, (view, kind))?;
            parts.push(self.reduced(backend, &x, view.side)?);
            parts.push(backend.embed(step, &self.queries[kind], view.queries)?);
        }
        joined(backend, step, parts, &rows.places)
    }

    /// Rows of the last layer, `[side², width]`.
    fn tower(
        &self,
        backend: &B,
        step: &B::Step,
        patches: &B::Tensor,
        (view, kind): (&StagedView, usize),
    ) -> Result<B::Tensor, ModelError> {
        let mut x = backend.linear(patches, &self.patches, Activation::None, None)?;
        backend.add(&mut x, &backend.embed(step, &self.positions[kind], view.positions)?)?;
        for layer in &self.layers {
            let (squares, biases, placements) = match layer.biases.as_slice() {
                [windows] => (&view.windows, windows, &self.placements[0]),
                both => (&view.whole, &both[kind], &self.placements[1 + kind]),
            };
            x = layer.attention_norm.around(backend, &x, |input, residual| {
                let attention = SquareAttention { attention: &layer.attention, biases, placements };
                let context = attention.forward(backend, step, input, squares)?;
                layer.attention.output(backend, &context, residual)
            })?;
            x = layer.feed_forward_norm.around(backend, &x, |input, residual| {
                layer.feed_forward.forward(backend, input, residual)
            })?;
        }
        Ok(x)
    }

    /// Rows behind the convolutions, from `x: [side², width]`.
    fn reduced(&self, backend: &B, x: &B::Tensor, side: usize) -> Result<B::Tensor, ModelError> {
        let [neck, same, first, second] = &self.convolutions;
        let convolve = |x: &B::Tensor, weight: &B::Linear, (side, stride): (usize, usize)| {
            let conv = Conv2d {
                n_images: 1,
                size: [side; 2],
                kernel: [TAPS; 2],
                stride: [stride; 2],
                padding: [TAPS / 2; 2],
            };
            backend.linear(&backend.unfold2d(x, conv)?, weight, Activation::None, None)
        };
        let x = backend.norm(&backend.linear(x, neck, Activation::None, None)?, &self.norms[0])?;
        let x = backend.norm(&convolve(&x, same, (side, 1))?, &self.norms[1])?;
        let x = convolve(&x, first, (side, 2))?;
        Ok(convolve(&x, second, (side.div_ceil(2), 2))?)
    }
}

impl<B: Backend> SamLayer<B> {
    fn load(loader: &Loader<'_, B>, spec: &SamSpec, idx: usize) -> Result<Self, ModelError> {
        let (stack, names) = (&spec.stack, &spec.names.stack);
        let loader = loader.layer(names.layers, idx);
        let shape = stack.attention.shape;
        let [part, whole] = spec.sides;
        let sides = match spec.global_layers.contains(&idx) {
            true => vec![[2 * whole - 1, part], [2 * whole - 1, whole]],
            false => vec![[2 * spec.window - 1, spec.window]],
        };
        let biases = sides.into_iter().map(|sides| OffsetBiases::load(&loader, spec.offsets, sides, shape));
        Ok(Self {
            attention_norm: Residual::of_attention(&loader, names.attention.norm, stack)?,
            attention: SelfAttention::load(&loader, &names.attention, stack)?,
            biases: biases.collect::<Result<_, _>>()?,
            feed_forward_norm: Residual::of_feed_forward(&loader, names.feed_forward_norm, stack)?,
            feed_forward: FeedForward::load(&loader, names, stack)?,
        })
    }
}

/// Positions of a part and of a whole image, from the latter.
fn positions<B: Backend>(
    loader: &Loader<'_, B>,
    name: &str,
    spec: &SamSpec,
) -> Result<[B::Table; 2], ModelError> {
    let width = spec.stack.hidden;
    let [part, whole] = spec.sides;
    let stored = loader.bare_values(name, &[1, whole, whole, width])?;
    let table = |values: &[f32], side: usize| {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let shape = [side * side, width];
        loader.backend().load_table(WeightView { dtype: DType::F32, shape: &shape, data: &data }, 1.0)
    };
    Ok([table(&resample_grid(&stored, [whole, part], width), part)?, table(&stored, whole)?])
}
