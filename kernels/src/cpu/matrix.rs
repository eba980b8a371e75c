//! The activation of the CPU back end.
//!
//! A thread keeps the values of large tensors that are gone for the next ones ([`Kept`]): [`unwritten`].

use super::kept::Kept;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static KEPT: RefCell<Kept<Vec<f32>>> = const { RefCell::new(Kept::new()) };
}

/// `n` values, whatever they are: for a result of which every value will be written.
pub(super) fn unwritten(n: usize) -> Vec<f32> {
    let found = KEPT.try_with(|kept| kept.borrow_mut().take(n));
    let Ok(Some(mut values)) = found else { return vec![0.0; n] };
    values.resize(n, 0.0);
    values
}

/// `n` zeros: for a result of which some values will be written.
pub(super) fn zeroed(n: usize) -> Vec<f32> {
    let found = KEPT.try_with(|kept| kept.borrow_mut().take(n));
    let Ok(Some(mut values)) = found else { return vec![0.0; n] };
    values.clear();
    values.resize(n, 0.0);
    values
}

/// Keeps what a later tensor can use, and lets go of the oldest for it.
fn keep(values: Vec<f32>) {
    // A thread that ends keeps nothing.
    let _ = KEPT.try_with(|kept| kept.borrow_mut().keep(values));
}

/// Values that are kept when they are dropped.
#[derive(Clone, Debug)]
struct Values(Vec<f32>);

impl Drop for Values {
    fn drop(&mut self) {
        keep(std::mem::take(&mut self.0));
    }
}

/// `[n_tokens, width]`, row-major f32. A clone shares the values until one of the two is written.
#[derive(Clone, Debug)]
pub struct CpuTensor {
    /// As many as `n_tokens · width`.
    data: Arc<Values>,
    n_tokens: usize,
    width: usize,
}

impl CpuTensor {
    /// Takes values, as many as the dimensions say.
    pub(super) fn new(data: Vec<f32>, n_tokens: usize, width: usize) -> Self {
        assert_eq!(Some(data.len()), n_tokens.checked_mul(width), "the caller checked the number of values");
        Self { data: Arc::new(Values(data)), n_tokens, width }
    }

    /// `(n_tokens, width)`.
    pub(super) fn dims(&self) -> (usize, usize) {
        (self.n_tokens, self.width)
    }

    /// The values.
    pub(super) fn data(&self) -> &[f32] {
        &self.data.0
    }

    /// The values; copies them if a clone shares them.
    pub(super) fn into_values(self) -> Vec<f32> {
        std::mem::take(&mut Arc::unwrap_or_clone(self.data).0)
    }

    /// The values, to write; copies them if a clone shares them.
    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut Arc::<Values>::make_mut(&mut self.data).0
    }

    /// One row.
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.data.0[row * self.width..][..self.width]
    }

    /// The same values with other dimensions.
    pub(super) fn reshape(self, n_tokens: usize, width: usize) -> Self {
        assert_eq!(Some(self.data.0.len()), n_tokens.checked_mul(width), "the caller checked the dimensions");
        Self { n_tokens, width, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kept::{KEPT_VALUES, WORTH_KEEPING};
    use super::*;

    /// Address of the values of a fresh tensor, which is dropped afterwards.
    fn place(n: usize) -> *const f32 {
        CpuTensor::new(unwritten(n), n, 1).data().as_ptr()
    }

    #[test]
    fn a_large_tensor_lies_where_one_about_as_long_was() {
        let n = 4 * WORTH_KEEPING;
        let first = place(n);
        assert_eq!(place(n), first);
        assert_eq!(place(n / 2), first, "half as long");
        // What is lent is nobody else's, and what was taken out of a tensor is its owner's.
        let lent = CpuTensor::new(unwritten(n / 2), n / 2, 1);
        let clone = lent.clone();
        assert_ne!(place(n / 2), first);
        drop(lent);
        assert_ne!(place(n / 2), first, "a clone still reads it");
        let values = clone.into_values();
        assert_eq!((values.as_ptr(), values.len()), (first, n / 2));
        assert_ne!(place(n / 2), first);
    }

    #[test]
    fn a_thread_keeps_no_more_than_its_share() {
        for i in 0..20 {
            drop(CpuTensor::new(vec![0.0; (1 << 20) + i * WORTH_KEEPING], (1 << 20) + i * WORTH_KEEPING, 1));
        }
        let kept = KEPT.with(|kept| kept.borrow().n_values());
        assert!(kept <= KEPT_VALUES && kept > KEPT_VALUES / 2, "{kept} values");
    }
}
