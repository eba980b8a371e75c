//! The retry budget that every part of the proxy shares which sends work twice: the account of
//! [`crate::request_machine::retry_budget`] behind a lock.

use crate::request_machine::retry_budget::{RetryPolicy, RetryWindow};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

/// A shared retry budget.
#[derive(Debug)]
pub struct RetryBudget(Mutex<RetryWindow>);

impl RetryBudget {
    /// A budget that begins now.
    pub fn new(policy: RetryPolicy) -> Self {
        Self(Mutex::new(RetryWindow::new(policy, Instant::now().into_std())))
    }

    /// The account, held for one decision.
    pub fn window(&self) -> MutexGuard<'_, RetryWindow> {
        self.0.lock()
    }
}
