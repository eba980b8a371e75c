//! Tensors of the library as matrices, and its errors as those of an op.

use std::fmt;

use candle_core::{Device, Tensor};

use crate::check::Dims;
use crate::ops::{KernelError, Result};

/// Gives the library's errors the name of the op.
pub(super) trait InOp<T> {
    fn op(self, op: &'static str) -> Result<T>;
}

impl<T, E: fmt::Display> InOp<T> for std::result::Result<T, E> {
    fn op(self, op: &'static str) -> Result<T> {
        self.map_err(|error| KernelError::Library { op, message: error.to_string() })
    }
}

/// `(n_tokens, width)`; every tensor of this back end has two dimensions.
pub(super) fn dims(x: &Tensor) -> Dims {
    x.dims2().unwrap_or((0, 0))
}

/// A tensor `[rows, columns]`.
pub(super) fn matrix(op: &'static str, values: Vec<f32>, dims: Dims) -> Result<Tensor> {
    Tensor::from_vec(values, dims, &Device::Cpu).op(op)
}

/// A tensor `[n]`.
pub(super) fn vector(op: &'static str, values: Vec<f32>) -> Result<Tensor> {
    let n = values.len();
    Tensor::from_vec(values, n, &Device::Cpu).op(op)
}

/// Zeros `[rows, columns]`.
pub(super) fn zeros(op: &'static str, dims: Dims) -> Result<Tensor> {
    matrix(op, vec![0.0; dims.0 * dims.1], dims)
}

/// The values, row-major.
pub(super) fn values(op: &'static str, x: &Tensor) -> Result<Vec<f32>> {
    // The library panics on an empty part of a tensor.
    if x.elem_count() == 0 {
        return Ok(Vec::new());
    }
    x.flatten_all().and_then(|x| x.to_vec1::<f32>()).op(op)
}
