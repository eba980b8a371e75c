//! Rows of several units joined into one tensor.

use crate::error::ModelError;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Adds the rows of parts of `lens` rows, which [`joined`] lays one under another, to a step.
///
/// # Errors
/// [`KernelError`] if the step has no room for them.
pub(super) fn stage_places(
    builder: &mut StageBuilder,
    lens: impl IntoIterator<Item = usize>,
) -> Result<Vec<Indices>, KernelError> {
    let mut first = 0;
    let place = |len: usize| {
        let rows: Vec<u32> = (first..first + len as u32).collect();
        first += len as u32;
        builder.indices(&rows)
    };
    lens.into_iter().map(place).collect()
}

/// Concatenates `parts`, each `[n_rows, width]`, whose rows are at `places`: `[Σ n_rows, width]`.
///
/// # Errors
/// [`ModelError::Kernel`] for parts of other sizes than were staged.
pub(in crate::encoder) fn joined<B: Backend>(
    backend: &B,
    step: &B::Step,
    mut parts: Vec<B::Tensor>,
    places: &[Indices],
) -> Result<B::Tensor, ModelError> {
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return Ok(only);
    }
    let dims: Vec<(usize, usize)> = parts.iter().map(|part| backend.dims(part)).collect();
    let n_rows = dims.iter().map(|d| d.0).sum::<usize>();
    let width = dims.first().map_or(0, |d| d.1);
    let mut all = backend.zeros(n_rows, width)?;
    for (part, rows) in parts.iter().zip(places) {
        backend.scatter_rows(step, &mut all, *rows, part)?;
    }
    Ok(all)
}
