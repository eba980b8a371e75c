//! Swin, version 1 and 2: stages whose layers attend inside windows, every second layer in shifted windows.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/donut/modeling_donut_swin.py>.
//! Padding takes part: its rows are zero after the norm, so that their keys and values are the biases. Windows that
//! hold both ends of a shifted grid add −100 to scores between the ends, not minus infinity, as there; version 2 does so twice. Images are computed
//! one by one: at the first stage a page of 2560 by 1920 has 307 200 rows.

use super::cosine::{CosineScores, offset_biases};
use super::input::StemInput;
use super::join::{joined, stage_places};
use super::windows::{Cut, StagedWindows, WindowPartition, quads};
use crate::encoder::position_bias::{n_offsets, offset};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{FeedForward, LinearShape, Loader, Residual, SelfAttention};
use crate::spec::{NormSpec, StackNames, SwinScores, SwinSpec, SwinWindow};
use triptych_kernels::ops::{Activation, Indices, Mask, Qkv, ScoreBias, StageBuilder, StoredBias, Varlen};
use triptych_kernels::{Backend, KernelError};

/// Added to the score of a pair that only the shift brought into one window.
const ACROSS_SEAM: f32 = -100.0;

/// The stem of [`StemSpec::Swin`](crate::spec::StemSpec::Swin).
pub(crate) struct SwinStem<B: Backend> {
    projection: B::Linear,
    norm: B::Norm,
    stages: Vec<SwinStage<B>>,
    patch_values: usize,
}

struct SwinStage<B: Backend> {
    layers: Vec<SwinLayer<B>>,
    window: SwinWindow,
    // True if a grid as narrow as a window is shifted too.
    shifts_narrow: bool,
    merge: Option<Merge<B>>,
}

/// Four rows to one, before the next stage.
struct Merge<B: Backend> {
    norm: B::Norm,
    linear: B::Linear,
    // True if the norm comes after the linear layer.
    is_norm_last: bool,
}

struct SwinLayer<B: Backend> {
    attention_norm: Residual<B>,
    attention: SelfAttention<B>,
    cosine: Option<CosineScores<B>>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
    shift: usize,
    // One table, or one for each kind of seam of a shifted grid.
    bias: B::Bias,
}

/// Images of a run in a step.
pub(crate) struct SwinRows {
    /// The grids of each image, one for each stage.
    images: Vec<Vec<SwinGrid>>,
    /// Rows of each image among those of all.
    places: Vec<Indices>,
}

/// The grid of a stage.
struct SwinGrid {
    windows: StagedWindows,
    /// `None` where no layer is shifted.
    shifted: Option<StagedWindows>,
    /// Four rows of each row of the next stage.
    merge: Option<Cut>,
}

impl<B: Backend> SwinStem<B> {
    /// Loads all stages; `names` are those of a layer.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &SwinSpec, names: &StackNames) -> Result<Self, ModelError> {
        let width = spec.stages.first().map_or(0, |s| s.hidden);
        let [channels, height, side] = spec.patch;
        let shape = [width, channels, height, side];
        let part = LinearShape { name: spec.names.projection, shape: &shape, bias: true };
        let load = |i: usize| SwinStage::load(&loader.layer(spec.names.stages, i), spec, i, names);
        Ok(Self {
            projection: loader.linear(&[part])?,
            norm: loader.norm(spec.names.norm, NormSpec::layer(spec.norm_eps), width)?,
            stages: (0..spec.stages.len()).map(load).collect::<Result<_, _>>()?,
            patch_values: spec.patch.iter().product(),
        })
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        self.patch_values
    }

    /// Adds images to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<SwinRows, KernelError> {
        let image = |unit: &EncodeUnit<'_>| {
            let mut size = unit.patches;
            let grid = |stage: &SwinStage<B>| stage.grid(builder, &mut size);
            self.stages.iter().map(grid).collect()
        };
        let images = units.iter().map(image).collect::<Result<_, KernelError>>()?;
        Ok(SwinRows { images, places: stage_places(builder, units.iter().map(EncodeUnit::n_rows))? })
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        input: StemInput<'_, B>,
        rows: &SwinRows,
    ) -> Result<B::Tensor, ModelError> {
        let images: Vec<B::Tensor> = match input {
            StemInput::Rows(patches) => {
                let one = |grids: &Vec<SwinGrid>| self.one(backend, step, patches, grids);
                rows.images.iter().map(one).collect::<Result<_, _>>()?
            }
            StemInput::Units(units) => {
                let one = |(unit, grids): (&EncodeUnit<'_>, &Vec<SwinGrid>)| {
                    let n_patches = unit.patches[0] * unit.patches[1];
                    let patches =
                        backend.upload(unit.values.floats().to_vec(), n_patches, self.patch_values)?;
                    self.one(backend, step, &patches, grids)
                };
                units.iter().zip(&rows.images).map(one).collect::<Result<_, ModelError>>()?
            }
        };
        joined(backend, step, images, &rows.places)
    }

    fn one(
        &self,
        backend: &B,
        step: &B::Step,
        patches: &B::Tensor,
        grids: &[SwinGrid],
    ) -> Result<B::Tensor, ModelError> {
        let x = backend.linear(patches, &self.projection, Activation::None, None)?;
        let mut x = backend.norm(&x, &self.norm)?;
        for (stage, grid) in self.stages.iter().zip(grids) {
            for layer in &stage.layers {
                let shifted = grid.shifted.as_ref().filter(|_| layer.shift > 0);
                x = layer.forward(backend, step, &x, shifted.unwrap_or(&grid.windows))?;
            }
            if let (Some(merge), Some(cut)) = (&stage.merge, grid.merge) {
                x = merge.forward(backend, backend.merge_rows(cut.apply(backend, step, &x)?, 4)?)?;
            }
        }
        Ok(x)
    }
}

impl<B: Backend> SwinStage<B> {
    fn load(
        loader: &Loader<'_, B>,
        spec: &SwinSpec,
        idx: usize,
        names: &StackNames,
    ) -> Result<Self, ModelError> {
        let stack = &spec.stages[idx];
        let window = spec.windows[idx];
        let layer = |i: usize| {
            let shift = if i % 2 == 1 { window.shift } else { 0 };
            let loader = loader.layer(names.layers, i);
            let n_heads = stack.attention.shape.n_heads;
            let (table, cosine, seam) = match &spec.scores {
                SwinScores::Products => {
                    let shape = [n_offsets([window.side; 2]), n_heads];
                    (loader.bare_values(spec.names.bias, &shape)?, None, ACROSS_SEAM)
                }
                SwinScores::Cosines { measured, factor } => {
                    let cosine = CosineScores::load(&loader, factor, stack.attention.shape)?;
                    let table =
                        offset_biases(&loader, spec.names.bias, [window.side, measured[idx]], n_heads)?;
                    (table, Some(cosine), 2.0 * ACROSS_SEAM)
                }
            };
            Ok::<_, ModelError>(SwinLayer {
                cosine,
                attention_norm: Residual::of_attention(&loader, names.attention.norm, stack)?,
                attention: SelfAttention::load(&loader, &names.attention, stack)?,
                feed_forward_norm: Residual::of_feed_forward(&loader, names.feed_forward_norm, stack)?,
                feed_forward: FeedForward::load(&loader, names, stack)?,
                shift,
                bias: loader.backend().load_bias(bias(&table, SwinWindow { shift, ..window }, seam))?,
            })
        };
        let is_last = idx + 1 == spec.stages.len();
        Ok(Self {
            layers: (0..stack.n_layers).map(layer).collect::<Result<_, _>>()?,
            window,
            shifts_narrow: spec.scores != SwinScores::Products,
            merge: if is_last { None } else { Some(Merge::load(loader, spec, stack.hidden)?) },
        })
    }

    /// Adds the stage's grid of `size` rows down and across to a step; `size` is that of the next stage afterwards.
    fn grid(&self, builder: &mut StageBuilder, size: &mut [usize; 2]) -> Result<SwinGrid, KernelError> {
        let side = self.window.side;
        let windows = |shift| WindowPartition { grid: *size, side, shift };
        let shift = self.layers.iter().map(|layer| layer.shift).max().unwrap_or(0);
        let is_shifted = shift > 0 && (self.shifts_narrow || size[0].min(size[1]) > side);
        let shifted = is_shifted.then(|| windows(shift).stage(builder)).transpose()?;
        let windows = windows(0).stage(builder)?;
        let mut merge = None;
        if self.merge.is_some() {
            merge = Some(Cut::stage(builder, &quads(*size), size[0] * size[1])?);
            *size = size.map(|n| n.div_ceil(2));
        }
        Ok(SwinGrid { windows, shifted, merge })
    }
}

impl<B: Backend> Merge<B> {
    fn load(loader: &Loader<'_, B>, spec: &SwinSpec, hidden: usize) -> Result<Self, ModelError> {
        let is_norm_last = spec.scores != SwinScores::Products;
        let shape = [2 * hidden, 4 * hidden];
        let part = LinearShape { name: spec.names.merge, shape: &shape, bias: false };
        let normed = shape[usize::from(!is_norm_last)];
        let norm = loader.norm(spec.names.merge_norm, NormSpec::layer(spec.norm_eps), normed)?;
        Ok(Self { norm, linear: loader.linear(&[part])?, is_norm_last })
    }

    /// Rows `[n, 2·hidden]` of `joined: [n, 4·hidden]`.
    fn forward(&self, backend: &B, joined: B::Tensor) -> Result<B::Tensor, ModelError> {
        let linear = |x: &B::Tensor| backend.linear(x, &self.linear, Activation::None, None);
        Ok(match self.is_norm_last {
            true => backend.norm(&linear(&joined)?, &self.norm)?,
            false => linear(&backend.norm(&joined, &self.norm)?)?,
        })
    }
}

impl<B: Backend> SwinLayer<B> {
    fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        windows: &StagedWindows,
    ) -> Result<B::Tensor, ModelError> {
        let bias = ScoreBias::Chosen(&self.bias, windows.seams);
        let seqs = Varlen { seqs: windows.seqs, mask: Mask::Full, bias };
        let x = self.attention_norm.around(backend, x, |input, residual| {
            let cut = windows.cut.apply(backend, step, input)?;
            let [mut q, mut k, v] = self.attention.project(backend, step, &cut, None)?;
            if let Some(cosine) = &self.cosine {
                [q, k] = cosine.apply(backend, [q, k])?;
            }
            let qkv = Qkv { q: &q, k: &k, v: &v };
            let context = backend.attention(step, qkv, self.attention.shape(), seqs)?;
            let context = backend.gather_rows(step, &context, windows.back)?;
            self.attention.output(backend, &context, residual)
        })?;
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(backend, input, residual))
    }
}

/// Tables `[n_tables, n_heads, n, n]` from a stored `[n_offsets, n_heads]`: one, or for a shifted grid one for each kind
/// of seam, in the order of [`WindowPartition::seams`]. `across_seam` is added to scores across a seam.
fn bias(table: &[f32], window: SwinWindow, across_seam: f32) -> StoredBias<'static> {
    let SwinWindow { side, shift } = window;
    let n = side * side;
    let n_heads = table.len() / n_offsets([side; 2]).max(1);
    let seams = if shift > 0 { 0..4 } else { 0..1 };
    let dims = [seams.len(), n_heads, n, n];
    let mut tables = Vec::with_capacity(dims.iter().product());
    for seam in seams {
        let region = |place: usize| {
            let down = seam & 2 != 0 && place / side >= side - shift;
            let across = seam & 1 != 0 && place % side >= side - shift;
            (down, across)
        };
        for head in 0..n_heads {
            for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
                let seam_bias = if region(from) == region(to) { 0.0 } else { across_seam };
                tables.push(table[offset([side; 2], from, to) * n_heads + head] + seam_bias);
            }
        }
    }
    StoredBias::Tables { values: tables, dims }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seam_separates_its_sides() {
        let StoredBias::Tables { values: tables, dims } =
            bias(&[0.0; 9], SwinWindow { side: 2, shift: 1 }, ACROSS_SEAM)
        else {
            unreachable!("tables")
        };
        assert_eq!((tables.len(), dims), (4 * 16, [4, 1, 4, 4]));
        let apart = |seam: usize, from: usize, to: usize| tables[seam * 16 + from * 4 + to] < 0.0;
        assert!((0..16).all(|i| !apart(0, i / 4, i % 4)));
        // Across: the right column is the grid's left end.
        assert!(apart(1, 0, 1) && apart(1, 3, 2) && !apart(1, 0, 2));
        assert!(apart(2, 0, 2) && !apart(2, 0, 1));
        assert!(apart(3, 0, 3) && apart(3, 1, 2) && !apart(3, 3, 3));
    }
}
