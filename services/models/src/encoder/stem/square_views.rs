//! Patches of squares of two sizes behind copies of a learned row.
//!
//! After `Step3VisionEmbeddings` of vLLM 0.32
//! (<https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/step3_vl.py>). Stored positions are those of a
//! whole image; a part has fewer (bicubic).

use super::input::{StemInput, patch_rows};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::preprocess::image::resample_grid;
use crate::spec::SquareViewsSpec;
use triptych_core::DType;
use triptych_kernels::ops::{Activation, Indices, StageBuilder, WeightView};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::SquareViews`](crate::spec::StemSpec::SquareViews).
pub(crate) struct SquareViewsStem<B: Backend> {
    projection: B::Linear,
    // The learned row with its position, then the positions of a part, then those of a whole image.
    positions: B::Table,
    spec: SquareViewsSpec,
    hidden: usize,
}

/// Places of the rows of a run.
pub(crate) struct SquareViewRows {
    /// Of the patches.
    patches: Indices,
    /// Row of the table for each row.
    positions: Indices,
}

impl<B: Backend> SquareViewsStem<B> {
    /// Loads the projection of patches, the learned row and the positions, by their names in this order.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &[&str],
        (spec, hidden): (&SquareViewsSpec, usize),
    ) -> Result<Self, ModelError> {
        let name = |i: usize| names.get(i).copied().unwrap_or_default();
        let [channels, height, width] = spec.patch;
        let shape = [hidden, channels, height, width];
        let [part, whole] = spec.sides;
        let stored = loader.matrix(name(2), &[whole * whole + 1, hidden])?.values();
        let (own, grid) = stored.split_at(hidden.min(stored.len()));
        let row = loader.bare_values(name(1), &[1, hidden])?;
        let mut values: Vec<f32> = row.iter().zip(own).map(|(row, position)| row + position).collect();
        values.extend(resample_grid(grid, [whole, part], hidden));
        values.extend(grid);
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = [1 + part * part + whole * whole, hidden];
        let table = WeightView { dtype: DType::F32, shape: &dims, data: &data };
        Ok(Self {
            projection: loader.linear(&[LinearShape { name: name(0), shape: &shape, bias: true }])?,
            positions: loader.backend().load_table(table, 1.0)?,
            spec: spec.clone(),
            hidden,
        })
    }

    /// Adds the places of rows to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<SquareViewRows, KernelError> {
        let [part, _] = self.spec.sides;
        let (mut patches, mut positions) = (Vec::new(), Vec::new());
        for unit in units {
            let n_patches = unit.patches[0] * unit.patches[1];
            let first = if unit.patches == [part; 2] { 1 } else { 1 + part * part };
            positions.extend(std::iter::repeat_n(0, self.spec.n_prefix));
            let row = positions.len() as u32;
            patches.extend(row..row + n_patches as u32);
            positions.extend(first as u32..(first + n_patches) as u32);
        }
        Ok(SquareViewRows { patches: builder.indices(&patches)?, positions: builder.indices(&positions)? })
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
        rows: &SquareViewRows,
    ) -> Result<B::Tensor, ModelError> {
        let n_values = self.spec.patch.iter().product();
        let patches = patch_rows(backend, StemInput::Units(units), n_values)?;
        let patches = backend.linear(&patches, &self.projection, Activation::None, None)?;
        let mut x = backend.zeros(rows.positions.len(), self.hidden)?;
        backend.scatter_rows(step, &mut x, rows.patches, &patches)?;
        backend.add(&mut x, &backend.embed(step, &self.positions, rows.positions)?)?;
        Ok(x)
    }
}
