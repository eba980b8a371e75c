//! Patches as rows, after learned rows that every image begins with: class and distillation tokens, registers.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vit/modeling_vit.py>
//! (`ViTEmbeddings`) and `deit/modeling_deit.py` beside it.

use super::input::{StemInput, patch_rows};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use triptych_kernels::ops::{Activation, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::PrefixedPatches`](crate::spec::StemSpec::PrefixedPatches).
pub(crate) struct PrefixedPatchStem<B: Backend> {
    projection: B::Linear,
    // One row each, `[1, hidden]`; the last may have more.
    prefix: Vec<LearnedRows<B>>,
    patch_values: usize,
    hidden: usize,
}

/// A table of learned rows, all of which every image begins with.
struct LearnedRows<B: Backend> {
    table: B::Table,
    n_rows: usize,
}

/// Shapes of the tensors of such a stem.
#[derive(Clone, Copy)]
pub(crate) struct PrefixedShape {
    /// Channels, height, width of a patch.
    pub patch: [usize; 3],
    /// True if the projection has a bias.
    pub bias: bool,
    /// Learned rows under the last name; 0: one, as under the others.
    pub n_registers: usize,
    /// True if learned rows are `[hidden]`, not `[1, 1, hidden]`.
    pub flat_prefix: bool,
    /// Width of a row.
    pub hidden: usize,
}

/// Places of the rows of a run.
pub(crate) struct PrefixedRows {
    /// Of the patches.
    patches: Indices,
    /// Of the learned rows of each table, for each image, and the rows of the table.
    prefix: Vec<[Indices; 2]>,
}

impl<B: Backend> PrefixedPatchStem<B> {
    /// Loads the projection of patches, named first, and learned rows under each name after it.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, names: &[&str], shape: PrefixedShape) -> Result<Self, ModelError> {
        let PrefixedShape { patch, bias, n_registers, flat_prefix, hidden } = shape;
        let (name, prefix) = names.split_first().map_or(("", names), |(first, rest)| (*first, rest));
        let dims = [hidden, patch[0], patch[1], patch[2]];
        let learned = |(i, name): (usize, &&str)| {
            let n_rows = if i + 1 == prefix.len() { n_registers.max(1) } else { 1 };
            let table = match flat_prefix {
                true => loader.bare_row(name, hidden)?,
                false => loader.bare_table(name, n_rows, hidden)?,
            };
            Ok(LearnedRows { table, n_rows })
        };
        Ok(Self {
            projection: loader.linear(&[LinearShape { name, shape: &dims, bias }])?,
            prefix: prefix.iter().enumerate().map(learned).collect::<Result<_, ModelError>>()?,
            patch_values: patch.iter().product(),
            hidden,
        })
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        self.patch_values
    }

    /// Adds the places of rows to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<PrefixedRows, KernelError> {
        let mut firsts = Vec::with_capacity(units.len());
        let mut patches = Vec::new();
        let mut row = 0;
        for unit in units {
            firsts.push(row);
            let first_patch = row + self.prefix.iter().map(|learned| learned.n_rows as u32).sum::<u32>();
            row = first_patch + (unit.patches[0] * unit.patches[1]) as u32;
            patches.extend(first_patch..row);
        }
        let mut prefix = Vec::with_capacity(self.prefix.len());
        let mut n_before = 0;
        for learned in &self.prefix {
            let n_rows = learned.n_rows as u32;
            let places = firsts.iter().flat_map(|first| (0..n_rows).map(move |i| first + n_before + i));
            let places = builder.indices(&places.collect::<Vec<u32>>())?;
            let rows = firsts.iter().flat_map(|_| 0..n_rows);
            prefix.push([places, builder.indices(&rows.collect::<Vec<u32>>())?]);
            n_before += n_rows;
        }
        Ok(PrefixedRows { prefix, patches: builder.indices(&patches)? })
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
        rows: &PrefixedRows,
    ) -> Result<B::Tensor, ModelError> {
        let patches = patch_rows(backend, input, self.patch_values)?;
        let patches = backend.linear(&patches, &self.projection, Activation::None, None)?;
        let n_rows = rows.patches.len() + rows.prefix.iter().map(|[places, _]| places.len()).sum::<usize>();
        let mut x = backend.zeros(n_rows, self.hidden)?;
        backend.scatter_rows(step, &mut x, rows.patches, &patches)?;
        for (learned, [places, rows]) in self.prefix.iter().zip(&rows.prefix) {
            let learned = backend.embed(step, &learned.table, *rows)?;
            backend.scatter_rows(step, &mut x, *places, &learned)?;
        }
        Ok(x)
    }
}
