//! Feed-forward blocks, plain and gated.

use super::{Adapted, AdaptedLinear, LinearShape, Loader};
use crate::error::ModelError;
use crate::spec::{FeedForwardKind, FeedForwardSpec, StackNames, StackSpec};
use triptych_kernels::Backend;
use triptych_kernels::ops::Activation;

/// A feed-forward block with its weights.
pub struct FeedForward<B: Backend> {
    // Plain: the inner matrix. Gated: gate and up side by side.
    inner: AdaptedLinear<B>,
    outer: AdaptedLinear<B>,
    // Of the values between them.
    inner_norm: Option<B::Norm>,
    spec: FeedForwardSpec,
}

impl<B: Backend> FeedForward<B> {
    /// Loads the block of a layer.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, names: &StackNames, stack: &StackSpec) -> Result<Self, ModelError> {
        Self::load_gated(loader, names, stack, 1.0)
    }

    /// Loads the block of a layer whose output a gate multiplies with `factor`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_gated(
        loader: &Loader<'_, B>,
        names: &StackNames,
        stack: &StackSpec,
        factor: f32,
    ) -> Result<Self, ModelError> {
        let FeedForwardSpec { width, bias, kind, .. } = stack.feed_forward;
        let into = [width, stack.hidden];
        let out_of = [stack.hidden, width];
        let outer = LinearShape { name: names.feed_forward_outer, shape: &out_of, bias };
        let outer = loader.pack_adapted(&[loader.stored(&outer)?.scaled(factor)])?;
        let inner = match kind {
            FeedForwardKind::UpGate => {
                let name = names.feed_forward_inner.first().copied().unwrap_or_default();
                let both = loader.stored(&LinearShape { name, shape: &[2 * width, stack.hidden], bias })?;
                loader.pack_adapted(&[both.outputs(width..2 * width), both.outputs(0..width)])?
            }
            FeedForwardKind::GateUp => {
                let name = names.feed_forward_inner.first().copied().unwrap_or_default();
                loader.adapted(&[LinearShape { name, shape: &[2 * width, stack.hidden], bias }])?
            }
            FeedForwardKind::Plain | FeedForwardKind::Gated => {
                let inner: Vec<LinearShape<'_>> = names
                    .feed_forward_inner
                    .iter()
                    .map(|&name| LinearShape { name, shape: &into, bias })
                    .collect();
                loader.adapted(&inner)?
            }
        };
        Ok(Self { inner, outer, inner_norm: None, spec: stack.feed_forward })
    }

    /// The block with a norm of its inner values, `[width]`.
    #[must_use]
    pub fn with_inner_norm(self, norm: B::Norm) -> Self {
        Self { inner_norm: Some(norm), ..self }
    }

    /// The block applied to `x`, plus `residual` if there is one. All are `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn forward<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        x: &B::Tensor,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        let on: Adapted<'_, B> = on.into();
        let activation = self.spec.activation;
        let mut inner = match self.spec.kind {
            FeedForwardKind::Plain => on.linear(x, &self.inner, activation, None)?,
            FeedForwardKind::Gated | FeedForwardKind::UpGate | FeedForwardKind::GateUp => {
                on.backend.gate(&on.linear(x, &self.inner, Activation::None, None)?, activation)?
            }
        };
        if let Some(norm) = &self.inner_norm {
            inner = on.backend.norm(&inner, norm)?;
        }
        on.linear(&inner, &self.outer, Activation::None, residual)
    }
}
