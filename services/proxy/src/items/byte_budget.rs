//! The bytes that the items of one request may still take, all together.

use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::{Failure, FailureClass};

/// Bytes that the items of one request may still take, all together.
#[derive(Debug)]
pub struct ByteBudget {
    left: AtomicUsize,
    limit: usize,
}

impl ByteBudget {
    /// A budget of this many bytes.
    pub fn new(limit: usize) -> Self {
        Self { left: AtomicUsize::new(limit), limit }
    }

    /// Takes some.
    ///
    /// # Errors
    /// TooLarge, with the limit.
    pub fn take(&self, len: usize) -> Result<(), Failure> {
        let taken = self.left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(len));
        taken.map(|_| ()).map_err(|_| {
            let message = format!("the items have more than {} bytes together, the limit", self.limit);
            Failure::new(FailureClass::TooLarge, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_shared_and_ends() {
        let budget = ByteBudget::new(10);
        assert!(budget.take(6).is_ok());
        assert!(budget.take(5).unwrap_err().message.contains("10 bytes"));
        assert!(budget.take(4).is_ok());
    }
}
