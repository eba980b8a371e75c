//! A sub-layer with its norm and the residual stream around it.

use super::Loader;
use crate::error::ModelError;
use crate::spec::{NormPlacement, StackSpec};
use triptych_kernels::Backend;

/// The norm of a sub-layer, and where it sits.
pub struct Residual<B: Backend> {
    norm: B::Norm,
    placement: NormPlacement,
}

impl<B: Backend> Residual<B> {
    /// Loads the norm `name` of a stack's layer.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, name: &str, stack: &StackSpec) -> Result<Self, ModelError> {
        Ok(Self { norm: loader.norm(name, stack.norm, stack.hidden)?, placement: stack.placement })
    }

    /// Runs `sub_layer(input, residual)`, which must return its result plus `residual`.
    /// `x` and the result are `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// Those of `sub_layer` and of the norm.
    pub fn around(
        &self,
        backend: &B,
        x: &B::Tensor,
        sub_layer: impl FnOnce(&B::Tensor, &B::Tensor) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        match self.placement {
            NormPlacement::Pre => sub_layer(&backend.norm(x, &self.norm)?, x),
            NormPlacement::Post => Ok(backend.norm(&sub_layer(x, x)?, &self.norm)?),
        }
    }
}
