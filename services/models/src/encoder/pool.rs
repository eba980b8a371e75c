//! Means of rows one after another, as the sums that a norm of another epsilon makes the same of.
//!
//! A norm of a sum of `n` rows is that of their mean if `eps` is `n²` times as much.

use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::spec::{EncoderSpec, NormSpec};
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The norm behind the layers, of sums where rows are averaged.
pub(super) fn norm_of_sums(spec: &EncoderSpec) -> NormSpec {
    let n = spec.extras.pooled.unwrap_or(1) as f32;
    let norm = spec.stack.norm;
    NormSpec { eps: norm.eps * n * n, ..norm }
}

/// Adds the rows of units that are averaged to a step, and any rows for padding up to `n_tokens` output rows; `None` where no
/// rows are averaged.
///
/// # Errors
/// [`KernelError`] if the step has no room for them.
pub(super) fn stage(
    spec: &EncoderSpec,
    builder: &mut StageBuilder,
    units: &[EncodeUnit<'_>],
    n_tokens: usize,
) -> Result<Option<Indices>, KernelError> {
    let Some(n) = spec.extras.pooled else { return Ok(None) };
    let n = n.max(1);
    let mut rows = Vec::with_capacity(n_tokens * spec.merged_rows());
    let mut first = 0;
    for unit in units {
        rows.extend(first as u32..(first + unit.n_rows() / n * n) as u32);
        first += unit.n_rows();
    }
    rows.resize(rows.len().max(n_tokens * spec.merged_rows()), 0);
    builder.indices(&rows).map(Some)
}

/// Sums of the rows of `x: [n_rows, hidden]` that are averaged: `[rows.len() / n, hidden]`.
///
/// # Errors
/// [`ModelError::Kernel`] for a row that is not there.
pub(super) fn sums<B: Backend>(
    spec: &EncoderSpec,
    backend: &B,
    step: &B::Step,
    (x, rows): (&B::Tensor, Indices),
) -> Result<B::Tensor, ModelError> {
    let hidden = spec.stack.hidden;
    let n = spec.extras.pooled.unwrap_or(1).max(1);
    let joined = backend.merge_rows(backend.gather_rows(step, x, rows)?, n)?;
    let mut sum = backend.columns(&joined, 0, hidden)?;
    for i in 1..n {
        backend.add(&mut sum, &backend.columns(&joined, i * hidden, hidden)?)?;
    }
    Ok(sum)
}
