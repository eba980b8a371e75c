//! One tier: its store, its timeout and its circuit breaker.

use super::breaker::Breaker;
use crate::error::{EcError, chain};
use crate::store::{EcStore, Op, Scope};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// A tier and its health.
pub(super) struct TierState {
    pub(super) store: Arc<dyn EcStore>,
    pub(super) scope: Scope,
    /// Position among the tiers; 0 is asked first.
    pub(super) tier_idx: usize,
    timeout: Duration,
    pub(super) breaker: Breaker,
}

impl TierState {
    pub(super) fn new(store: Arc<dyn EcStore>, scope: Scope, tier_idx: usize, timeout: Duration) -> Self {
        Self { store, scope, tier_idx, timeout, breaker: Breaker::default() }
    }

    /// Runs one operation within the timeout, and records its outcome in the breaker.
    pub(super) async fn ask<T>(
        &self,
        op: Op,
        answer: impl Future<Output = Result<T, EcError>>,
    ) -> Result<T, EcError> {
        let limit = self.timeout;
        let late = EcError::TimedOut { store: self.store.kind(), op, limit };
        let result = timeout(limit, answer).await.unwrap_or(Err(late));
        match &result {
            Err(e) if e.is_retryable() => {
                if self.breaker.fails(Instant::now()) {
                    let tier = self.store.describe();
                    tracing::warn!(tier, error = %chain(e), "a tier does not answer; circuit breaker open");
                }
            }
            _ => self.breaker.works(),
        }
        result
    }
}
