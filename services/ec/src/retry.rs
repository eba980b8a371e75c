//! Retries of failed operations, with limits on the attempts and on the time of each.
//!
//! Retries are bounded for each operation, and by a budget for all of them: at most a fifth of the operations, so that
//! an unavailable store does not get three times the load (Google's SRE book, "Handling Overload"; gRPC's retry
//! throttling).
//!
//! Every operation of a store is idempotent: a put that took place is `AlreadyThere` the second time, and a removal
//! finds nothing.

use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{sleep, timeout};
use triptych_core::{Backoff, ContentKey, EncodedItem};

/// Limits of the attempts of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts in total. Default 3; 0 is read as 1.
    pub attempts: u32,
    /// Timeout of one attempt. Default 10 s.
    pub attempt_timeout: Duration,
    /// Pause before the second attempt; it doubles from there. Default 20 ms.
    pub first_pause: Duration,
    /// Longest pause. Default 500 ms.
    pub max_pause: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 3,
            attempt_timeout: Duration::from_secs(10),
            first_pause: Duration::from_millis(20),
            max_pause: Duration::from_millis(500),
        }
    }
}

/// Budget of retries, as a token bucket: each operation adds a fraction of a token, each retry takes one. Cheap to
/// clone; clones share the bucket.
#[derive(Clone, Debug)]
pub struct RetryBudget(Arc<TokenBucket>);

#[derive(Debug)]
struct TokenBucket {
    /// In thousandths of a token; never more than `most`.
    level: AtomicU64,
    most: u64,
    part: u64,
}

impl RetryBudget {
    /// A full bucket of `burst` retries, refilled by `percent` of the operations.
    pub fn new(burst: u32, percent: u32) -> Self {
        let most = u64::from(burst) * 1000;
        Self(Arc::new(TokenBucket { level: AtomicU64::new(most), most, part: u64::from(percent) * 10 }))
    }

    /// Counts an operation.
    pub fn deposit(&self) {
        let TokenBucket { level, most, part } = &*self.0;
        // Fails only for a closure that gives `None`.
        let _ = level.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| Some((n + part).min(*most)));
    }

    /// Takes a token. False if there is none: no retry.
    pub fn withdraw(&self) -> bool {
        let level = &self.0.level;
        level.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1000)).is_ok()
    }
}

impl Default for RetryBudget {
    /// A burst of ten, and 20 % of the operations.
    fn default() -> Self {
        Self::new(10, 20)
    }
}

/// A store that retries.
pub struct Retrying {
    store: Arc<dyn EcStore>,
    policy: RetryPolicy,
    budget: RetryBudget,
}

impl Retrying {
    /// Retries the operations of `store`.
    pub fn new(store: Arc<dyn EcStore>, policy: RetryPolicy) -> Self {
        Self::with_budget(store, policy, RetryBudget::default())
    }

    /// Retries within a budget that stores may share.
    pub fn with_budget(store: Arc<dyn EcStore>, policy: RetryPolicy, budget: RetryBudget) -> Self {
        Self { store, policy, budget }
    }

    async fn retry<T, F>(&self, op: Op, attempt: impl Fn() -> F) -> Result<T, EcError>
    where
        F: Future<Output = Result<T, EcError>>,
    {
        let limit = self.policy.attempt_timeout;
        let mut pauses = Backoff::new(self.policy.first_pause, self.policy.max_pause).pauses();
        let mut left = self.policy.attempts.max(1);
        self.budget.deposit();
        loop {
            left -= 1;
            let ended = timeout(limit, attempt()).await;
            let result = ended.unwrap_or(Err(EcError::TimedOut { store: self.kind(), op, limit }));
            match result {
                Err(e) if e.is_retryable() && left > 0 && self.budget.withdraw() => {
                    tracing::debug!(%op, error = %e, left, "retrying");
                    sleep(pauses.next_pause()).await;
                }
                result => return result,
            }
        }
    }
}

#[async_trait]
impl EcStore for Retrying {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        self.retry(Op::Put, || self.store.put_if_absent(key, object.clone())).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        self.retry(Op::Get, || self.store.get(key)).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        self.retry(Op::Heads, || self.store.heads(keys)).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.retry(Op::Delete, || self.store.delete(key)).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.retry(Op::Quarantine, || self.store.quarantine(key)).await
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        self.retry(Op::Quarantine, || self.store.disown(key, object)).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.retry(Op::Ping, || self.store.ping()).await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        self.retry(Op::Lease, || self.store.acquire(key, ttl)).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.retry(Op::Lease, || self.store.renew(lease, ttl)).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.retry(Op::Lease, || self.store.release(lease)).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        // The caller waits again by itself.
        self.store.wait(key, patience).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.retry(Op::List, || self.store.list(after, limit)).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}
