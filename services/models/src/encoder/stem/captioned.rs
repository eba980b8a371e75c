//! An image, then a text: the mean of the tower's rows, the rows themselves, all projected, then rows of the token
//! table.
//!
//! After `Florence2MultiModalProjector` and `Florence2Model` of
//! <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>.
//! Each position of the grid gets a learned half row for its column, one for its row, and the sinusoids of time 0, which
//! are zeros and ones: the one frame of a still image.

use super::davit::{DavitImage, DavitTower};
use super::join::{joined, stage_places};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::CaptionedSpec;
use crate::weights::Weights;
use triptych_kernels::ops::{Activation, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::Captioned`](crate::spec::StemSpec::Captioned).
pub(crate) struct CaptionedStem<B: Backend> {
    tower: DavitTower<B>,
    // `[max_positions, width / 2]`, and for columns the rest of the width.
    row_positions: Vec<f32>,
    column_positions: Vec<f32>,
    projection: B::Linear,
    norm: B::Norm,
    tokens: B::Table,
    spec: CaptionedSpec,
}

/// Images and texts of a run in a step.
pub(crate) struct CaptionedRows {
    units: Vec<(DavitImage, Indices)>,
    /// Rows of each image and text among those of all.
    places: Vec<Indices>,
}

/// The token table of the text.
#[derive(Clone, Copy)]
pub(crate) struct TokenTable<'a> {
    /// Full names, in the order they are tried.
    pub names: &'a [&'a str],
    /// Width of a row.
    pub hidden: usize,
}

impl<B: Backend> CaptionedStem<B> {
    /// Loads tower and projector under the prefixes of the spec, and the token table `[vocab, hidden]`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        backend: &B,
        weights: &Weights,
        spec: &CaptionedSpec,
        tokens: TokenTable<'_>,
    ) -> Result<Self, ModelError> {
        let names = spec.names;
        let hidden = tokens.hidden;
        let projector = Loader::new(backend, weights, names.projector);
        let width = spec.tower.width();
        let shape = [hidden, width];
        let part = LinearShape { name: names.projection, shape: &shape, bias: false };
        let table = |name, width| projector.matrix(name, &[spec.max_positions, width]).map(|t| t.values());
        Ok(Self {
            tower: DavitTower::load(&Loader::new(backend, weights, names.tower), &spec.tower)?,
            row_positions: table(names.row_positions, width / 2)?,
            column_positions: table(names.column_positions, width - width / 2)?,
            projection: projector.linear(&[part])?,
            norm: projector.norm(names.norm, spec.norm, hidden)?,
            tokens: Loader::new(backend, weights, tokens.names).scaled_table(
                "",
                [spec.vocab, hidden],
                spec.scale,
            )?,
            spec: spec.clone(),
        })
    }

    /// Adds images and texts to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<CaptionedRows, KernelError> {
        let one = |unit: &EncodeUnit<'_>| {
            let image = self.tower.stage(builder, unit.patches)?;
            Ok((image, builder.indices(unit.values.tokens())?))
        };
        let staged = units.iter().map(one).collect::<Result<_, KernelError>>()?;
        let lens = units.iter().flat_map(|unit| {
            // The mean comes before the positions.
            let n_image = 1 + self.spec.tower.output_grid(unit.patches).iter().product::<usize>();
            [n_image, unit.values.tokens().len()]
        });
        Ok(CaptionedRows { units: staged, places: stage_places(builder, lens)? })
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        units: &[EncodeUnit<'_>],
        rows: &CaptionedRows,
    ) -> Result<B::Tensor, ModelError> {
        let mut parts = Vec::with_capacity(2 * units.len());
        for (unit, (image, tokens)) in units.iter().zip(&rows.units) {
            parts.push(self.image(backend, step, unit, image)?);
            parts.push(backend.embed(step, &self.tokens, *tokens)?);
        }
        joined(backend, step, parts, &rows.places)
    }

    fn image(
        &self,
        backend: &B,
        step: &B::Step,
        unit: &EncodeUnit<'_>,
        image: &DavitImage,
    ) -> Result<B::Tensor, ModelError> {
        let pixels = unit.values.floats();
        let n_pixels = unit.patches[0] * unit.patches[1];
        let x = backend.upload(pixels.to_vec(), n_pixels, self.spec.tower.channels())?;
        let x = self.tower.forward(backend, step, x, image)?;
        let grid = self.spec.tower.output_grid(unit.patches);
        let (n_positions, width) = backend.dims(&x);
        let rows = self.with_mean(backend.download(&x)?, grid, width);
        let rows = backend.upload(rows, n_positions + 1, width)?;
        Ok(backend.norm(&backend.linear(&rows, &self.projection, Activation::None, None)?, &self.norm)?)
    }

    /// Adds positions to the rows of a grid and puts their mean before them: `[1 + n_positions, width]`.
    fn with_mean(&self, mut rows: Vec<f32>, [_, across]: [usize; 2], width: usize) -> Vec<f32> {
        let of_line = width / 2;
        let of_column = width - width / 2;
        let mut sum = vec![0.0f64; width];
        for (place, row) in rows.chunks_exact_mut(width.max(1)).enumerate() {
            let y = place / across;
            let x = place % across;
            let column = &self.column_positions[x * of_column..][..of_column];
            let line = &self.row_positions[y * of_line..][..of_line];
            // Sines of time 0 are 0, cosines 1; they alternate.
            let time = (0..width).map(|i| (i % 2) as f32);
            for (i, (value, position)) in row.iter_mut().zip(column.iter().chain(line).zip(time)).enumerate()
            {
                *value += position.0 + position.1;
                sum[i] += f64::from(*value);
            }
        }
        let n_positions = (rows.len() / width.max(1)).max(1) as f64;
        sum.iter().map(|s| (s / n_positions) as f32).chain(rows).collect()
    }
}
