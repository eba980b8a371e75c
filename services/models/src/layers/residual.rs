//! A sub-layer with its norm and the residual stream around it.

use super::Loader;
use crate::error::ModelError;
use crate::spec::{NormPlacement, StackSpec};
use triptych_kernels::Backend;

/// The norms of a sub-layer, and their placement.
pub struct Residual<B: Backend> {
    norm: B::Norm,
    placement: Placement<B>,
}

/// Placement of the norms of a sub-layer.
enum Placement<B: Backend> {
    Pre,
    Post,
    ResPost,
    /// With the second norm.
    Sandwich(B::Norm),
}

impl<B: Backend> Residual<B> {
    /// Loads the norm `name` of the attention of a stack's layer, and the second one where there are two.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn of_attention(loader: &Loader<'_, B>, name: &str, stack: &StackSpec) -> Result<Self, ModelError> {
        Self::load(loader, [name, stack.placement.second_names()[0]], stack)
    }

    /// Loads the norm `name` of the feed-forward of a stack's layer, and the second one where there are two.
    ///
    /// # Errors
    /// As [`Self::of_attention`].
    pub fn of_feed_forward(
        loader: &Loader<'_, B>,
        name: &str,
        stack: &StackSpec,
    ) -> Result<Self, ModelError> {
        Self::load(loader, [name, stack.placement.second_names()[1]], stack)
    }

    fn load(loader: &Loader<'_, B>, names: [&str; 2], stack: &StackSpec) -> Result<Self, ModelError> {
        let load = |name| loader.norm(name, stack.norm, stack.hidden);
        let placement = match stack.placement {
            NormPlacement::Pre => Placement::Pre,
            NormPlacement::Post => Placement::Post,
            NormPlacement::ResPost => Placement::ResPost,
            NormPlacement::Sandwich { .. } => Placement::Sandwich(load(names[1])?),
        };
        Ok(Self { norm: load(names[0])?, placement })
    }

    /// Runs `sub_layer(input, residual)`, which must return its result plus `residual`, if there is one.
    /// `x` and the result are `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// Those of `sub_layer` and of the norm.
    pub fn around(
        &self,
        backend: &B,
        x: &B::Tensor,
        sub_layer: impl FnOnce(&B::Tensor, Option<&B::Tensor>) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        match &self.placement {
            Placement::Pre => sub_layer(&backend.norm(x, &self.norm)?, Some(x)),
            Placement::Post => Ok(backend.norm(&sub_layer(x, Some(x))?, &self.norm)?),
            Placement::ResPost => {
                let mut sum = backend.norm(&sub_layer(x, None)?, &self.norm)?;
                backend.add(&mut sum, x)?;
                Ok(sum)
            }
            Placement::Sandwich(second) => {
                let inner = sub_layer(&backend.norm(x, &self.norm)?, None)?;
                let mut sum = backend.norm(&inner, second)?;
                backend.add(&mut sum, x)?;
                Ok(sum)
            }
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

    type Norm = <ReferenceBackend as Backend>::Norm;

    /// `f(x) = x` around a row of (3, 4), whose root mean square is 3.5355.
    fn check(name: &str, placement: impl FnOnce(Norm) -> Placement<ReferenceBackend>, expect: [f32; 2]) {
        let backend = ReferenceBackend::new();
        let ones = [1.0f32.to_le_bytes(), 1.0f32.to_le_bytes()].concat();
        let scale = WeightView { dtype: DType::F32, shape: &[2], data: &ones };
        let load = || backend.load_norm(NormKind::Rms, scale, None, 0.0).expect("a norm");
        let x = backend.upload(vec![3.0, 4.0], 1, 2).expect("a row");
        let residual: Residual<ReferenceBackend> = Residual { norm: load(), placement: placement(load()) };
        let identity = |input: &Tensor, residual: Option<&Tensor>| {
            let mut sum = input.clone();
            residual.map_or(Ok(()), |residual| backend.add(&mut sum, residual))?;
            Ok(sum)
        };
        let y = residual.around(&backend, &x, identity).expect("a row");
        let y = backend.download(&y).expect("values");
        assert!(y.iter().zip(expect).all(|(a, e)| (a - e).abs() < 1e-4), "{name}: {y:?}");
    }

    #[test]
    fn the_norm_sits_where_the_spec_says() {
        check("pre", |_| Placement::Pre, [3.0 + 0.848_53, 4.0 + 1.131_37]);
        check("post", |_| Placement::Post, [0.848_53, 1.131_37]);
        check("res-post", |_| Placement::ResPost, [3.0 + 0.848_53, 4.0 + 1.131_37]);
        // The second norm finds nothing to change.
        check("sandwich", Placement::Sandwich, [3.0 + 0.848_53, 4.0 + 1.131_37]);
    }
}
