//! An image, then a text: the mean of the tower's rows, the rows themselves, all projected, then rows of the token
//! table.
//!
//! After `Florence2MultiModalProjector` and `Florence2Model` of
//! <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>.
//! Each position of the grid gets a learned half row for its column, one for its row, and the sinusoids of time 0, which
//! are zeros and ones: the one frame of a still image.

use super::davit::{DavitImage, DavitTower};
use super::input::StemInput;
use super::join::{joined, stage_places};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::CaptionedSpec;
use crate::weights::Weights;
use triptych_core::DType;
use triptych_kernels::ops::{
    Activation, AttentionShape, Indices, Mask, Qkv, ScoreBias, Sequences, StageBuilder, Varlen, WeightView,
};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::Captioned`](crate::spec::StemSpec::Captioned).
pub(crate) struct CaptionedStem<B: Backend> {
    tower: DavitTower<B>,
    // `[max_positions, width]`, as `position_tables` has them.
    row_positions: B::Table,
    column_positions: B::Table,
    projection: B::Linear,
    norm: B::Norm,
    tokens: B::Table,
    spec: CaptionedSpec,
}

/// Images and texts of a run in a step.
pub(crate) struct CaptionedRows {
    units: Vec<(CaptionedImage, Indices)>,
    /// Rows of each image and text among those of all.
    places: Vec<Indices>,
}

/// An image in a step.
struct CaptionedImage {
    tower: DavitImage,
    /// Line and column of each position of its grid.
    lines: Indices,
    columns: Indices,
    /// One query over all positions.
    mean: Sequences,
    /// Rows of the mean, and of the positions.
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
        let projection = match spec.transposed {
            true => projector.transposed_linear(names.projection, shape)?,
            false => {
                projector.linear(&[LinearShape { name: names.projection, shape: &shape, bias: false }])?
            }
        };
        let values = |name, width| projector.matrix(name, &[spec.max_positions, width]).map(|t| t.values());
        let lines = values(names.row_positions, width / 2)?;
        let columns = values(names.column_positions, width - width / 2)?;
        let dims = [spec.max_positions, width];
        let table = |values: &Vec<f32>| {
            let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            backend.load_table(WeightView { dtype: DType::F32, shape: &dims, data: &data }, 1.0)
        };
        let [row_positions, column_positions] = &position_tables(&lines, &columns, dims);
        Ok(Self {
            tower: DavitTower::load(&Loader::new(backend, weights, names.tower), &spec.tower)?,
            row_positions: table(row_positions)?,
            column_positions: table(column_positions)?,
            projection,
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
            Ok((self.stage_image(builder, unit.patches)?, builder.indices(unit.values.tokens())?))
        };
        let staged = units.iter().map(one).collect::<Result<_, KernelError>>()?;
        let lens = units.iter().flat_map(|unit| {
            // The mean comes before the positions.
            let n_image = 1 + self.spec.tower.output_grid(unit.patches).iter().product::<usize>();
            [n_image, unit.values.tokens().len()]
        });
        Ok(CaptionedRows { units: staged, places: stage_places(builder, lens)? })
    }

    fn stage_image(
        &self,
        builder: &mut StageBuilder,
        pixels: [usize; 2],
    ) -> Result<CaptionedImage, KernelError> {
        let [down, across] = self.spec.tower.output_grid(pixels);
        let n = down * across;
        let places = 0..n as u32;
        let lines: Vec<u32> = places.clone().map(|place| place / across as u32).collect();
        let columns: Vec<u32> = places.map(|place| place % across as u32).collect();
        Ok(CaptionedImage {
            tower: self.tower.stage(builder, pixels)?,
            lines: builder.indices(&lines)?,
            columns: builder.indices(&columns)?,
            mean: builder.sequences(&[0, 1], &[0, n as u32])?,
            places: stage_places(builder, [1, n])?,
        })
    }

    /// Values of a pixel.
    pub fn channels(&self) -> usize {
        self.spec.tower.channels()
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`. Rows of features are the pixels of one unit.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        input: StemInput<'_, B>,
        rows: &CaptionedRows,
    ) -> Result<B::Tensor, ModelError> {
        let mut parts = Vec::with_capacity(2 * rows.units.len());
        for (i, (image, tokens)) in rows.units.iter().enumerate() {
            let pixels = match input {
                StemInput::Rows(pixels) => pixels.clone(),
                StemInput::Units(units) => {
                    let values = units.get(i).map_or(&[][..], |unit| unit.values.floats());
                    let n_pixels = values.len() / self.channels().max(1);
                    backend.upload(values.to_vec(), n_pixels, self.channels())?
                }
            };
            parts.push(self.image(backend, step, pixels, image)?);
            parts.push(backend.embed(step, &self.tokens, *tokens)?);
        }
        joined(backend, step, parts, &rows.places)
    }

    /// Rows of an image, its pixels `[n_pixels, channels]`: `[1 + n_positions, hidden]`.
    fn image(
        &self,
        backend: &B,
        step: &B::Step,
        pixels: B::Tensor,
        image: &CaptionedImage,
    ) -> Result<B::Tensor, ModelError> {
        let mut x = self.tower.forward(backend, step, pixels, &image.tower)?;
        for (table, rows) in [(&self.row_positions, image.lines), (&self.column_positions, image.columns)] {
            backend.add(&mut x, &backend.embed(step, table, rows)?)?;
        }
        let mean = self.mean(backend, step, &x, image.mean)?;
        let rows = joined(backend, step, vec![mean, x], &image.places)?;
        Ok(backend.norm(&backend.linear(&rows, &self.projection, Activation::None, None)?, &self.norm)?)
    }

    /// Mean of rows `x: [n_positions, width]`: `[1, width]`. A query of zeros weighs all keys alike.
    fn mean(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        seqs: Sequences,
    ) -> Result<B::Tensor, ModelError> {
        let width = backend.dims(x).1;
        let head_dim = (1..=width.min(128)).rev().find(|n| width.is_multiple_of(*n)).unwrap_or(1);
        let n_heads = width / head_dim;
        let shape = AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale: 1.0, softcap: None };
        let q = &backend.zeros(1, width)?;
        let seqs = Varlen { seqs, mask: Mask::Full, bias: ScoreBias::None };
        Ok(backend.attention(step, Qkv { q, k: x, v: x }, shape, seqs)?)
    }
}

/// Tables of positions `[max_positions, width]`, for lines and for columns: each half of a row is of one of them, zeros of the
/// other, and both have the time's values in theirs.
fn position_tables(lines: &[f32], columns: &[f32], [max_positions, width]: [usize; 2]) -> [Vec<f32>; 2] {
    let of_line = width / 2;
    let of_column = width - of_line;
    // Sines of time 0 are 0, cosines 1; they alternate.
    let time = |i: usize| (i % 2) as f32;
    let [mut of_lines, mut of_columns] = [(); 2].map(|()| vec![0.0; max_positions * width]);
    for place in 0..max_positions {
        for i in 0..width {
            let at = place * width + i;
            match i.checked_sub(of_column) {
                Some(i_line) => of_lines[at] = lines[place * of_line + i_line] + time(i),
                None => of_columns[at] = columns[place * of_column + i] + time(i),
            }
        }
    }
    [of_lines, of_columns]
}
