//! Learned tables that are added row by row: to the rows of the stem, and to an image's patches behind the layers.

use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::Loader;
use crate::spec::EncoderSpec;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The tables of an encoder; most have none.
pub(super) struct AddedRows<B: Backend> {
    stem: Option<B::Table>,
    patches: Option<B::Table>,
}

/// Rows of the tables in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedAdded {
    stem: Option<Indices>,
    patches: Option<Indices>,
}

impl<B: Backend> AddedRows<B> {
    /// Loads the tables that a spec names, of an encoder that reads one grid.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let grid = spec.stem.fixed_grid().unwrap_or_default();
        let hidden = spec.stack.hidden;
        let n_rows = spec.stem.image_rows(grid).unwrap_or_default();
        let names = spec.extras.added;
        Ok(Self {
            stem: names.stem.map(|name| loader.bare_table(name, n_rows, hidden)).transpose()?,
            patches: names
                .patches
                .map(|name| loader.bare_rows(name, grid[0] * grid[1], hidden))
                .transpose()?,
        })
    }

    /// Adds the rows of units to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<StagedAdded, KernelError> {
        let mut of = |n_rows: Vec<usize>| {
            let rows: Vec<u32> = n_rows.into_iter().flat_map(|n| 0..n as u32).collect();
            builder.indices(&rows)
        };
        let rows = units.iter().map(EncodeUnit::n_rows);
        let patches = units.iter().map(|unit| unit.patches[0] * unit.patches[1]);
        Ok(StagedAdded {
            stem: self.stem.as_ref().map(|_| of(rows.collect())).transpose()?,
            patches: self.patches.as_ref().map(|_| of(patches.collect())).transpose()?,
        })
    }

    /// Adds to the rows of the stem, `[n_rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError`] for other rows than were staged.
    pub fn to_stem(
        &self,
        (backend, step): (&B, &B::Step),
        x: &mut B::Tensor,
        staged: StagedAdded,
    ) -> Result<(), KernelError> {
        add((backend, step), x, (self.stem.as_ref(), staged.stem))
    }

    /// Adds to the patches, `[n_patches, hidden]`.
    ///
    /// # Errors
    /// As [`Self::to_stem`].
    pub fn to_patches(
        &self,
        (backend, step): (&B, &B::Step),
        x: &mut B::Tensor,
        staged: StagedAdded,
    ) -> Result<(), KernelError> {
        add((backend, step), x, (self.patches.as_ref(), staged.patches))
    }
}

fn add<B: Backend>(
    (backend, step): (&B, &B::Step),
    x: &mut B::Tensor,
    (table, rows): (Option<&B::Table>, Option<Indices>),
) -> Result<(), KernelError> {
    match (table, rows) {
        (Some(table), Some(rows)) => backend.add(x, &backend.embed(step, table, rows)?),
        _ => Ok(()),
    }
}
