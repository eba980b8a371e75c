//! A sub-layer with its norm and the residual stream around it.

use super::Loader;
use crate::error::ModelError;
use crate::spec::{NormPlacement, StackSpec};
use triptych_kernels::Backend;

/// The norm of a sub-layer, and its placement.
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

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::DType;
    use triptych_kernels::ops::{NormKind, WeightView};
    use triptych_kernels::reference::ReferenceBackend;

    type Tensor = <ReferenceBackend as Backend>::Tensor;

    /// `f(x) = x` around a row of (3, 4), whose root mean square is 3.5355.
    fn check(placement: NormPlacement, expect: [f32; 2]) {
        let backend = ReferenceBackend::new();
        let ones = [1.0f32.to_le_bytes(), 1.0f32.to_le_bytes()].concat();
        let scale = WeightView { dtype: DType::F32, shape: &[2], data: &ones };
        let norm = backend.load_norm(NormKind::Rms, scale, None, 0.0).expect("a norm");
        let x = backend.upload(vec![3.0, 4.0], 1, 2).expect("a row");
        let residual: Residual<ReferenceBackend> = Residual { norm, placement };
        let identity = |input: &Tensor, residual: &_| {
            let mut sum = input.clone();
            backend.add(&mut sum, residual)?;
            Ok(sum)
        };
        let y = residual.around(&backend, &x, identity).expect("a row");
        let y = backend.download(&y).expect("values");
        assert!(y.iter().zip(expect).all(|(a, e)| (a - e).abs() < 1e-4), "{placement:?}: {y:?}");
    }

    #[test]
    fn the_norm_sits_where_the_spec_says() {
        check(NormPlacement::Pre, [3.0 + 0.848_53, 4.0 + 1.131_37]);
        check(NormPlacement::Post, [0.848_53, 1.131_37]);
    }
}
