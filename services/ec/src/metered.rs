//! Counts and times the operations of a store.
//!
//! An observer exports the numbers, so this crate knows no metrics library.

use crate::breaker::BreakerState;
use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, EncodedItem};

/// CacheTier in which an encoder output was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheTier {
    /// The worker's local cache.
    Local,
    /// A store.
    Store(StoreKind),
}

impl CacheTier {
    /// Label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Store(kind) => kind.as_str(),
        }
    }
}

/// Outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Done, or found.
    Ok,
    /// No object.
    Miss,
    /// The key had an object already.
    AlreadyThere,
    /// The lease is held by another.
    Held,
    /// The store was unreachable or overloaded.
    Unavailable,
    /// Timeout.
    TimedOut,
    /// The bytes are no valid object.
    Corrupt,
    /// Refused: too large, or not something this store does.
    Refused,
    /// Cancelled by its caller.
    Dropped,
}

impl Outcome {
    /// Label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Miss => "miss",
            Self::AlreadyThere => "already_there",
            Self::Held => "held",
            Self::Unavailable => "unavailable",
            Self::TimedOut => "timed_out",
            Self::Corrupt => "corrupt",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
        }
    }

    /// The outcome of a failed operation.
    pub(crate) fn of_error(e: &EcError) -> Self {
        match e {
            EcError::Unavailable { .. } | EcError::Overloaded { .. } | EcError::CircuitOpen { .. } => {
                Self::Unavailable
            }
            EcError::TimedOut { .. } => Self::TimedOut,
            EcError::Corrupt { .. } => Self::Corrupt,
            EcError::TooLarge { .. }
            | EcError::Unsupported { .. }
            | EcError::ReadOnly { .. }
            | EcError::NoStore { .. }
            | EcError::Config { .. } => Self::Refused,
        }
    }
}

/// One operation of a store, after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Kind of the store.
    pub tier: CacheTier,
    /// The operation.
    pub op: Op,
    /// Its outcome.
    pub outcome: Outcome,
    /// Bytes of the object that was written or read; zero where none was.
    pub bytes: usize,
    /// Duration of the call.
    pub took: Duration,
}

/// Receives events of stores. Called on the path of every operation, from any thread: must not block or panic.
pub trait EcObserver: Send + Sync {
    /// An output was found.
    fn hit(&self, tier: CacheTier);
    /// An output was not found.
    fn miss(&self, tier: CacheTier);
    /// An object did not verify and was quarantined.
    fn corrupt(&self, tier: CacheTier);
    /// An object of `bytes` was stored.
    fn published(&self, bytes: usize, took: Duration);
    /// An object of `bytes` was read.
    fn loaded(&self, bytes: usize, took: Duration);
    /// An operation ended.
    fn operation(&self, _operation: Operation) {}
    /// The circuit breaker of a store has this state from here on.
    fn breaker(&self, _tier: CacheTier, _state: BreakerState) {}
}

/// Observes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl EcObserver for NoObserver {
    fn hit(&self, _: CacheTier) {}
    fn miss(&self, _: CacheTier) {}
    fn corrupt(&self, _: CacheTier) {}
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
}

/// A store whose operations are observed. Corrupt objects are counted where they are quarantined, which
/// happens exactly once.
pub struct Metered {
    store: Arc<dyn EcStore>,
    observer: Arc<dyn EcObserver>,
}

/// An operation in progress; reported when dropped.
struct Watch<'a> {
    observer: &'a dyn EcObserver,
    started: Instant,
    operation: Operation,
}

impl Watch<'_> {
    fn ended<T>(&mut self, result: &Result<T, EcError>, outcome: impl Fn(&T) -> Outcome) {
        self.operation.outcome = result.as_ref().map_or_else(Outcome::of_error, outcome);
    }

    fn took(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.operation.took = self.took();
        self.observer.operation(self.operation);
    }
}

impl Metered {
    /// Observes `store`.
    pub fn new(store: Arc<dyn EcStore>, observer: Arc<dyn EcObserver>) -> Self {
        Self { store, observer }
    }

    fn tier(&self) -> CacheTier {
        CacheTier::Store(self.store.kind())
    }

    fn watch(&self, op: Op) -> Watch<'_> {
        let (tier, outcome) = (self.tier(), Outcome::Dropped);
        let operation = Operation { tier, op, outcome, bytes: 0, took: Duration::ZERO };
        Watch { observer: &*self.observer, started: Instant::now(), operation }
    }

    /// Observes an operation that returns true if there was an object.
    async fn found(
        &self,
        op: Op,
        answer: impl Future<Output = Result<bool, EcError>>,
    ) -> Result<bool, EcError> {
        let mut watch = self.watch(op);
        let found = answer.await;
        watch.ended(&found, |found| if *found { Outcome::Ok } else { Outcome::Miss });
        found
    }
}

#[async_trait]
impl EcStore for Metered {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let (bytes, mut watch) = (object.len(), self.watch(Op::Put));
        let put = self.store.put_if_absent(key, object).await;
        watch.ended(&put, |put| match put {
            PutOutcome::Stored => Outcome::Ok,
            PutOutcome::AlreadyThere => Outcome::AlreadyThere,
        });
        if matches!(put, Ok(PutOutcome::Stored)) {
            watch.operation.bytes = bytes;
            self.observer.published(bytes, watch.took());
        }
        put
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let mut watch = self.watch(Op::Get);
        let got = self.store.get(key).await;
        watch.ended(&got, |object| if object.is_some() { Outcome::Ok } else { Outcome::Miss });
        match &got {
            Ok(Some(object)) => {
                watch.operation.bytes = object.len();
                self.observer.hit(self.tier());
                self.observer.loaded(object.len(), watch.took());
            }
            Ok(None) => self.observer.miss(self.tier()),
            Err(_) => {}
        }
        got
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let mut watch = self.watch(Op::Heads);
        let heads = self.store.heads(keys).await;
        watch.ended(&heads, |_| Outcome::Ok);
        for head in heads.iter().flatten() {
            match head {
                Some(_) => self.observer.hit(self.tier()),
                None => self.observer.miss(self.tier()),
            }
        }
        heads
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.found(Op::Delete, self.store.delete(key)).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.observer.corrupt(self.tier());
        self.found(Op::Quarantine, self.store.quarantine(key)).await
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        self.observer.corrupt(self.tier());
        self.found(Op::Quarantine, self.store.disown(key, object)).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        let mut watch = self.watch(Op::Ping);
        let answer = self.store.ping().await;
        watch.ended(&answer, |()| Outcome::Ok);
        answer
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let mut watch = self.watch(Op::Lease);
        let acquired = self.store.acquire(key, ttl).await;
        watch.ended(&acquired, |acquired| match acquired {
            Acquired::Granted(_) => Outcome::Ok,
            Acquired::Held { .. } => Outcome::Held,
        });
        acquired
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.found(Op::Lease, self.store.renew(lease, ttl)).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.found(Op::Lease, self.store.release(lease)).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let mut watch = self.watch(Op::Wait);
        let item = self.store.wait(key, patience).await;
        watch.ended(&item, |item| if item.is_some() { Outcome::Ok } else { Outcome::Miss });
        item
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let mut watch = self.watch(Op::List);
        let page = self.store.list(after, limit).await;
        watch.ended(&page, |_| Outcome::Ok);
        page
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}
