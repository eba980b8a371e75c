//! A tensor as it was read: its type, its shape and its bytes, and what loaders do to it before it is packed.

use half::{bf16, f16};
use memmap2::Mmap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use triptych_core::DType;
use triptych_kernels::ops::WeightView;

/// Role of a tensor; it decides the values of a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A matrix, convolution or table.
    Matrix,
    /// A bias.
    Bias,
    /// The scale of a norm.
    Scale,
}

/// A tensor that was read. Row-major, little-endian.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    dtype: DType,
    shape: Vec<usize>,
    data: TensorBytes<'a>,
    // True in a survey: only the shape is read.
    surveyed: bool,
}

/// The bytes of a tensor.
#[derive(Clone, Debug)]
pub(super) enum TensorBytes<'a> {
    /// Part of a map that stays, or of another tensor.
    Borrowed(&'a [u8]),
    /// Computed.
    Owned(Vec<u8>),
    /// A map of its own: its pages count as memory of the process only while the tensor exists.
    Mapped(Arc<Mmap>),
}

impl Deref for TensorBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl<'a> Tensor<'a> {
    /// A tensor of these bytes.
    pub(super) fn new(dtype: DType, shape: Vec<usize>, data: TensorBytes<'a>) -> Self {
        Self { dtype, shape, data, surveyed: false }
    }

    /// The same in a survey: its bytes are not looked at.
    pub(super) fn surveyed(self) -> Self {
        Self { surveyed: true, ..self }
    }
}

impl Tensor<'_> {
    /// The tensor as a back end takes it.
    pub fn view(&self) -> WeightView<'_> {
        WeightView { dtype: self.dtype, shape: &self.shape, data: &self.data }
    }

    /// Rows of the outermost dimension.
    pub fn n_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or_default()
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// The elements as f32, row-major; zeros in a survey.
    pub fn values(&self) -> Vec<f32> {
        if self.surveyed {
            return vec![0.0; self.shape.iter().product()];
        }
        match self.dtype {
            DType::F32 => self.data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => self.data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            DType::Bf16 => self.data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            // No tensor of a checkpoint is opened as one: see `StoredWeights::tensor`.
            DType::I8 | DType::F8 => vec![f32::NAN; self.shape.iter().product()],
        }
    }

    /// Every element times `factor`, in f32; as it is for a factor of 1.
    #[must_use]
    pub fn scaled(self, factor: f32) -> Self {
        if factor == 1.0 || self.surveyed {
            return self;
        }
        let data = self.values().iter().flat_map(|v| (v * factor).to_le_bytes()).collect();
        Self { dtype: DType::F32, shape: self.shape, data: TensorBytes::Owned(data), surveyed: false }
    }

    /// Every element plus 1, in f32.
    #[must_use]
    pub fn plus_one(self) -> Self {
        let data = self.values().iter().flat_map(|v| (v + 1.0).to_le_bytes()).collect();
        Self { dtype: DType::F32, data: TensorBytes::Owned(data), ..self }
    }

    /// Rows `rows` of the outermost dimension, which must exist.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Tensor<'_> {
        let n_rows = self.shape.first().copied().unwrap_or_default();
        let row_bytes = self.data.len().checked_div(n_rows).unwrap_or_default();
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let data = TensorBytes::Borrowed(&self.data[rows.start * row_bytes..rows.end * row_bytes]);
        Tensor { dtype: self.dtype, shape, data, surveyed: self.surveyed }
    }

    /// Element `idx` of the outermost dimension, which must exist, without that dimension.
    #[must_use]
    pub fn element(&self, idx: usize) -> Tensor<'_> {
        let mut element = self.rows(idx..idx + 1);
        element.shape.remove(0);
        element
    }

    /// Columns `columns` of a matrix, which must exist, in that order: `[n_rows, columns.len()]`.
    #[must_use]
    pub fn columns(&self, columns: impl Iterator<Item = usize>) -> Tensor<'static> {
        let n_rows = self.shape.first().copied().unwrap_or_default();
        let size = self.dtype.size();
        let row_bytes = self.data.len().checked_div(n_rows).unwrap_or_default().max(size);
        let columns: Vec<usize> = columns.collect();
        let mut data = Vec::with_capacity(n_rows * columns.len() * size);
        for row in self.data.chunks_exact(row_bytes) {
            for column in &columns {
                data.extend_from_slice(&row[column * size..(column + 1) * size]);
            }
        }
        let shape = vec![n_rows, columns.len()];
        Tensor { dtype: self.dtype, shape, data: TensorBytes::Owned(data), surveyed: self.surveyed }
    }

    /// A matrix `[n, m]` as `[m, n]`.
    #[must_use]
    pub fn transposed(&self) -> Tensor<'static> {
        let (n_rows, width) = match self.shape[..] {
            [n_rows, width] => (n_rows, width),
            _ => (1, self.shape.iter().product()),
        };
        let size = self.dtype.size();
        let data = match size {
            _ if self.surveyed => Vec::new(),
            2 => transposed(self.data.as_chunks::<2>().0, [n_rows, width]),
            4 => transposed(self.data.as_chunks::<4>().0, [n_rows, width]),
            _ => transposed(self.data.as_chunks::<1>().0, [n_rows, width]),
        };
        Tensor {
            dtype: self.dtype,
            shape: vec![width, n_rows],
            data: TensorBytes::Owned(data),
            surveyed: self.surveyed,
        }
    }

    /// The same elements as `[n, width]`; `width` must divide their number.
    #[must_use]
    pub fn in_rows(mut self, width: usize) -> Self {
        let n_elements: usize = self.shape.iter().product();
        self.shape = vec![n_elements.checked_div(width).unwrap_or_default(), width];
        self
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn owned(&self) -> Tensor<'static> {
        let shape = self.shape.clone();
        let data = TensorBytes::Owned(self.data.to_vec());
        Tensor { dtype: self.dtype, shape, data, surveyed: self.surveyed }
    }

    /// The tensor in f32, each row of the first dimension multiplied by its factor; `factors: [n_rows]`.
    #[must_use]
    pub fn times(&self, factors: &[f32]) -> Tensor<'static> {
        // A survey reads no elements: of a published encoder they are gigabytes.
        let mut values = if self.surveyed { Vec::new() } else { self.values() };
        let width = self.shape.iter().skip(1).product::<usize>().max(1);
        for (row, factor) in values.chunks_mut(width).zip(factors) {
            row.iter_mut().for_each(|v| *v *= factor);
        }
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor {
            dtype: DType::F32,
            shape: self.shape.clone(),
            data: TensorBytes::Owned(data),
            surveyed: self.surveyed,
        }
    }

    /// The same elements without dimensions of 1: `[1, n]` as `[n]`.
    #[must_use]
    pub fn squeezed(mut self) -> Self {
        self.shape.retain(|n| *n != 1);
        self
    }
}

/// Elements `[n_rows, width]` as `[width, n_rows]`, by tiles that stay in the first cache.
fn transposed<const N: usize>(from: &[[u8; N]], [n_rows, width]: [usize; 2]) -> Vec<u8> {
    const TILE: usize = 32;
    let mut to = vec![[0; N]; n_rows * width];
    for first_row in (0..n_rows).step_by(TILE) {
        for first in (0..width).step_by(TILE) {
            for row in first_row..(first_row + TILE).min(n_rows) {
                for column in first..(first + TILE).min(width) {
                    to[column * n_rows + row] = from[row * width + column];
                }
            }
        }
    }
    to.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_multiplies_nothing() {
        let stored = Tensor::new(DType::F32, vec![2, 2], TensorBytes::Owned(vec![0; 16]));
        let times = |tensor: Tensor<'_>| tensor.times(&[2.0, 3.0]);
        let surveyed = times(stored.clone().surveyed());
        assert_eq!((times(stored).data.len(), surveyed.data.len()), (16, 0));
        assert_eq!((surveyed.rows(1..2).values(), surveyed.shape), (vec![0.0; 2], vec![2, 2]));
    }
}
