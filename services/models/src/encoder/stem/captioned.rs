//! An image, then a text: rows of a pyramid's last plane with their mean before them, projected, and after them
//! rows of the token table.
//!
//! After `Florence2MultiModalProjector` and `Florence2Model` of
//! <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>.
//! Each place of the plane gets half a learned row for its column, half for its line, and the sinusoids of time 0,
//! which are zeros and ones: the one frame of a still image.

use super::davit::DavitTower;
use super::join::joined;
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::CaptionedSpec;
use crate::weights::Weights;
use triptych_kernels::Backend;
use triptych_kernels::ops::Activation;

/// The stem of [`StemSpec::Captioned`](crate::spec::StemSpec::Captioned).
pub(crate) struct CaptionedStem<B: Backend> {
    pyramid: DavitTower<B>,
    // `[max_places, width / 2]`, and for columns the rest of the width.
    lines: Vec<f32>,
    columns: Vec<f32>,
    projection: B::Linear,
    norm: B::Norm,
    tokens: B::Table,
    spec: CaptionedSpec,
}

impl<B: Backend> CaptionedStem<B> {
    /// Loads pyramid and projector under the prefixes of the spec, and the token table, `tokens`, of rows of
    /// `hidden`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        backend: &B,
        weights: &Weights,
        spec: &CaptionedSpec,
        (tokens, hidden): (&[&str], usize),
    ) -> Result<Self, ModelError> {
        let names = spec.names;
        let projector = Loader::new(backend, weights, names.projector);
        let width = spec.pyramid.width();
        let shape = [hidden, width];
        let part = LinearShape { name: names.projection, shape: &shape, bias: false };
        let table = |name, width| projector.matrix(name, &[spec.max_places, width]).map(|t| t.values());
        Ok(Self {
            pyramid: DavitTower::load(&Loader::new(backend, weights, names.tower), &spec.pyramid)?,
            lines: table(names.lines, width / 2)?,
            columns: table(names.columns, width - width / 2)?,
            projection: projector.linear(&[part])?,
            norm: projector.norm(names.norm, spec.norm, hidden)?,
            tokens: Loader::new(backend, weights, tokens).scaled_table(
                "",
                [spec.vocab, hidden],
                spec.scale,
            )?,
            spec: spec.clone(),
        })
    }

    /// Rows of all units in a line, `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(&self, backend: &B, units: &[EncodeUnit<'_>]) -> Result<B::Tensor, ModelError> {
        let mut parts = Vec::with_capacity(2 * units.len());
        for unit in units {
            parts.push(self.image(backend, unit)?);
            parts.push(backend.embed(&self.tokens, unit.values.tokens())?);
        }
        joined(backend, parts)
    }

    fn image(&self, backend: &B, unit: &EncodeUnit<'_>) -> Result<B::Tensor, ModelError> {
        let (pixels, n_pixels) = (unit.values.floats(), unit.patches[0] * unit.patches[1]);
        let x = backend.upload(pixels.to_vec(), n_pixels, self.spec.pyramid.channels())?;
        let x = self.pyramid.forward(backend, x, unit.patches)?;
        let grid = self.spec.pyramid.places(unit.patches);
        let (n_places, width) = backend.dims(&x);
        let rows = self.with_mean(backend.download(&x)?, grid, width);
        let rows = backend.upload(rows, n_places + 1, width)?;
        Ok(backend.norm(&backend.linear(&rows, &self.projection, Activation::None, None)?, &self.norm)?)
    }

    /// The places of a plane with their positions, and before them their mean: `[1 + places, width]`.
    fn with_mean(&self, mut rows: Vec<f32>, [_, across]: [usize; 2], width: usize) -> Vec<f32> {
        let (of_line, of_column) = (width / 2, width - width / 2);
        let mut sum = vec![0.0f64; width];
        for (place, row) in rows.chunks_exact_mut(width.max(1)).enumerate() {
            let (y, x) = (place / across, place % across);
            let column = &self.columns[x * of_column..][..of_column];
            let line = &self.lines[y * of_line..][..of_line];
            // Sines of time 0 are 0, cosines 1; they take turns.
            let time = (0..width).map(|i| (i % 2) as f32);
            for (i, (value, position)) in row.iter_mut().zip(column.iter().chain(line).zip(time)).enumerate()
            {
                *value += position.0 + position.1;
                sum[i] += f64::from(*value);
            }
        }
        let n_places = (rows.len() / width.max(1)).max(1) as f64;
        sum.iter().map(|s| (s / n_places) as f32).chain(rows).collect()
    }
}
