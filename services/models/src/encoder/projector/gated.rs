//! A norm with an activation and a gated feed-forward behind the linear layers of a projector.
//!
//! No op of a back end is an activation by itself: normalised values are the gate of ones beside them, which is exact.

use crate::encoder::stem::joined;
use crate::error::ModelError;
use crate::layers::{Adapted, AdaptedLinear, LinearShape, Loader};
use crate::spec::GatedSpec;
use triptych_core::DType;
use triptych_kernels::ops::{Activation, Indices, StageBuilder, WeightView};
use triptych_kernels::{Backend, KernelError};

/// The block with its weights.
pub(super) struct Gated<B: Backend> {
    norm: B::Norm,
    normed: Activation,
    // One row of ones.
    ones: B::Table,
    // Gate and up side by side.
    inner: AdaptedLinear<B>,
    outer: AdaptedLinear<B>,
    activation: Activation,
}

/// Rows of values and of ones in a step.
#[derive(Debug)]
pub(in crate::encoder) struct StagedGate {
    /// The first row of a table, once for each row.
    ones: Indices,
    /// Places of values, and of ones, in rows of both in turn.
    places: [Indices; 2],
}

impl StagedGate {
    /// Adds the places of `n_rows` rows to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn new(builder: &mut StageBuilder, n_rows: usize) -> Result<Self, KernelError> {
        let in_turn = |first: usize| (0..n_rows).map(|row| (2 * row + first) as u32).collect::<Vec<_>>();
        let places = [builder.indices(&in_turn(0))?, builder.indices(&in_turn(1))?];
        Ok(Self { ones: builder.indices(&vec![0; n_rows])?, places })
    }
}

impl<B: Backend> Gated<B> {
    /// Loads the block of rows of `width`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &GatedSpec, width: usize) -> Result<Self, ModelError> {
        let [norm, gate, up, outer] = spec.names;
        let into = [spec.width, width];
        let inner = [gate, up].map(|name| LinearShape { name, shape: &into, bias: false });
        let outer = LinearShape { name: outer, shape: &[width, spec.width], bias: false };
        let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), width).flatten().collect();
        let ones = WeightView { dtype: DType::F32, shape: &[1, width], data: &ones };
        Ok(Self {
            norm: loader.norm(norm, spec.norm, width)?,
            normed: spec.normed,
            ones: loader.backend().load_table(ones, 1.0)?,
            inner: loader.adapted(&inner)?,
            outer: loader.adapted(&[outer])?,
            activation: spec.activation,
        })
    }

    /// The block applied to `x: [n_rows, width]`, the rows that were staged.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width or another number of rows.
    pub fn forward(
        &self,
        on: Adapted<'_, B>,
        step: &B::Step,
        x: B::Tensor,
        staged: &StagedGate,
    ) -> Result<B::Tensor, ModelError> {
        let Adapted { backend, .. } = on;
        let ones = backend.embed(step, &self.ones, staged.ones)?;
        let both = joined(backend, step, vec![backend.norm(&x, &self.norm)?, ones], &staged.places)?;
        let x = backend.gate(&backend.merge_rows(both, 2)?, self.normed)?;
        let inner = on.linear(&x, &self.inner, Activation::None, None)?;
        let inner = backend.gate(&inner, self.activation)?;
        on.linear(&inner, &self.outer, Activation::None, None)
    }
}
