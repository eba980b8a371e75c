//! Encoder rows among the token rows of a step.

use crate::error::ModelError;
use triptych_kernels::Backend;
use triptych_kernels::ops::Indices;

/// Encoder rows of a step, with all their levels.
pub(super) struct ItemRows<T> {
    /// `[n, n_levels · hidden]`.
    values: T,
    /// Rows of the step that they stand for, `[n]`.
    rows: Indices,
    hidden: usize,
}

impl<T> ItemRows<T> {
    /// Rows `values: [n, n_levels · hidden]` that stand for `rows` of a step.
    pub fn new(values: T, rows: Indices, hidden: usize) -> Self {
        Self { values, rows, hidden }
    }

    /// Puts the first level in the place of token embeddings `x: [n_tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for values that are not as many, or not as wide.
    pub fn replace<B: Backend<Tensor = T>>(
        &self,
        backend: &B,
        step: &B::Step,
        x: &mut T,
    ) -> Result<(), ModelError> {
        if backend.dims(&self.values).1 == self.hidden {
            return Ok(backend.scatter_rows(step, x, self.rows, &self.values)?);
        }
        let first = backend.columns(&self.values, 0, self.hidden)?;
        Ok(backend.scatter_rows(step, x, self.rows, &first)?)
    }

    /// Adds level `level`, from 1, to its rows of `x: [n_tokens, hidden]`.
    ///
    /// # Errors
    /// As [`Self::replace`].
    pub fn add_level<B: Backend<Tensor = T>>(
        &self,
        backend: &B,
        step: &B::Step,
        x: &mut T,
        level: usize,
    ) -> Result<(), ModelError> {
        let mut sum = backend.gather_rows(step, x, self.rows)?;
        backend.add(&mut sum, &backend.columns(&self.values, level * self.hidden, self.hidden)?)?;
        Ok(backend.scatter_rows(step, x, self.rows, &sum)?)
    }
}
