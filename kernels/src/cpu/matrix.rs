//! The activation of the CPU back end.

use std::sync::Arc;

/// `[n_tokens, width]`, row-major f32. A clone shares the values until one of the two is written.
#[derive(Clone, Debug)]
pub struct CpuTensor {
    /// As many as `n_tokens · width`.
    data: Arc<Vec<f32>>,
    n_tokens: usize,
    width: usize,
}

impl CpuTensor {
    /// Takes values, as many as the dimensions say.
    pub(super) fn new(data: Vec<f32>, n_tokens: usize, width: usize) -> Self {
        assert_eq!(Some(data.len()), n_tokens.checked_mul(width), "the caller checked the number of values");
        Self { data: Arc::new(data), n_tokens, width }
    }

    /// `(n_tokens, width)`.
    pub(super) fn dims(&self) -> (usize, usize) {
        (self.n_tokens, self.width)
    }

    /// The values.
    pub(super) fn data(&self) -> &[f32] {
        &self.data
    }

    /// The values; copies them if a clone shares them.
    pub(super) fn into_values(self) -> Vec<f32> {
        Arc::unwrap_or_clone(self.data)
    }

    /// The values, to write; copies them if a clone shares them.
    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        Arc::<Vec<f32>>::make_mut(&mut self.data)
    }

    /// One row.
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..][..self.width]
    }

    /// The same values with other dimensions.
    pub(super) fn reshape(self, n_tokens: usize, width: usize) -> Self {
        assert_eq!(Some(self.data.len()), n_tokens.checked_mul(width), "the caller checked the dimensions");
        Self { n_tokens, width, ..self }
    }
}
