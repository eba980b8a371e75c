//! One tier: its store and its timeout.

use crate::error::EcError;
use crate::store::{EcStore, Op, Scope};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// A tier and its timeout.
pub(super) struct TierState {
    pub(super) store: Arc<dyn EcStore>,
    pub(super) scope: Scope,
    /// Position among the tiers; 0 is asked first.
    pub(super) tier_idx: usize,
    timeout: Duration,
}

impl TierState {
    pub(super) fn new(store: Arc<dyn EcStore>, scope: Scope, tier_idx: usize, timeout: Duration) -> Self {
        Self { store, scope, tier_idx, timeout }
    }

    /// Runs one operation within the timeout.
    pub(super) async fn ask<T>(
        &self,
        op: Op,
        answer: impl Future<Output = Result<T, EcError>>,
    ) -> Result<T, EcError> {
        let limit = self.timeout;
        let late = EcError::TimedOut { store: self.store.kind(), op, limit };
        timeout(limit, answer).await.unwrap_or(Err(late))
    }
}
