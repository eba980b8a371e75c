//! Input of a stem: features of units in host memory, or rows that the back end has.

use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use triptych_kernels::Backend;

/// Features that a stem reads.
pub(in crate::encoder) enum StemInput<'a, B: Backend> {
    /// Those of units, in host memory.
    Units(&'a [EncodeUnit<'a>]),
    /// Those that `Stem::features` gave, where the back end has them.
    Rows(&'a B::Tensor),
}

/// Patches `[n_patches, patch_dim]` of units, one's under another's.
///
/// # Errors
/// [`ModelError::Kernel`] if the back end has no room for them.
pub(super) fn patch_rows<B: Backend>(
    backend: &B,
    input: StemInput<'_, B>,
    patch_dim: usize,
) -> Result<B::Tensor, ModelError> {
    match input {
        StemInput::Rows(x) => Ok(x.clone()),
        StemInput::Units(units) => {
            let values: Vec<f32> = units.iter().flat_map(|p| p.values.floats()).copied().collect();
            let n_patches = values.len() / patch_dim.max(1);
            Ok(backend.upload(values, n_patches, patch_dim)?)
        }
    }
}
