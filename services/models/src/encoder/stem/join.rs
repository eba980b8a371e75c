//! Rows of several units joined into one tensor.

use crate::error::ModelError;
use triptych_kernels::Backend;

/// Concatenates `parts`, each `[n_rows, width]`: `[Σ n_rows, width]`.
pub(super) fn joined<B: Backend>(backend: &B, mut parts: Vec<B::Tensor>) -> Result<B::Tensor, ModelError> {
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return Ok(only);
    }
    let dims: Vec<(usize, usize)> = parts.iter().map(|part| backend.dims(part)).collect();
    let n_rows = dims.iter().map(|d| d.0).sum::<usize>();
    let width = dims.first().map_or(0, |d| d.1);
    let mut all = backend.upload(vec![0.0; n_rows * width], n_rows, width)?;
    let mut first = 0;
    for (part, (n, _)) in parts.iter().zip(dims) {
        let rows: Vec<u32> = (first..first + n as u32).collect();
        backend.scatter_rows(&mut all, &rows, part)?;
        first += n as u32;
    }
    Ok(all)
}
