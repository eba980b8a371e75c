//! Counts and times the operations of a store.
//!
//! What is done with the numbers is the observer's matter, so this crate knows no metrics library.

use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Listed, PutOutcome, StoreKind};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, EncodedItem};

/// Where an encoder output was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// The rows that a worker keeps itself.
    Local,
    /// A store.
    Store(StoreKind),
}

impl Tier {
    /// The word used in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Store(kind) => kind.as_str(),
        }
    }
}

/// Receives what happens. Called on the path of every operation: must not block and must not panic.
pub trait EcObserver: Send + Sync {
    /// An output was found.
    fn hit(&self, tier: Tier);
    /// An output was not found.
    fn miss(&self, tier: Tier);
    /// An object did not verify and was quarantined.
    fn corrupt(&self, tier: Tier);
    /// An object of `bytes` was stored.
    fn published(&self, bytes: usize, took: Duration);
    /// An object of `bytes` was read.
    fn loaded(&self, bytes: usize, took: Duration);
}

/// Observes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl EcObserver for NoObserver {
    fn hit(&self, _: Tier) {}
    fn miss(&self, _: Tier) {}
    fn corrupt(&self, _: Tier) {}
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
}

/// A store whose operations are observed. Corrupt objects are counted where they are quarantined, which whoever
/// finds one does exactly once.
pub struct Metered {
    store: Arc<dyn EcStore>,
    observer: Arc<dyn EcObserver>,
}

impl Metered {
    /// Observes `store`.
    pub fn new(store: Arc<dyn EcStore>, observer: Arc<dyn EcObserver>) -> Self {
        Self { store, observer }
    }

    fn tier(&self) -> Tier {
        Tier::Store(self.store.kind())
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
        let (bytes, started) = (object.len(), Instant::now());
        let outcome = self.store.put_if_absent(key, object).await?;
        if outcome == PutOutcome::Stored {
            self.observer.published(bytes, started.elapsed());
        }
        Ok(outcome)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let started = Instant::now();
        let object = self.store.get(key).await?;
        match &object {
            Some(object) => {
                self.observer.hit(self.tier());
                self.observer.loaded(object.len(), started.elapsed());
            }
            None => self.observer.miss(self.tier()),
        }
        Ok(object)
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let heads = self.store.heads(keys).await?;
        for head in &heads {
            match head {
                Some(_) => self.observer.hit(self.tier()),
                None => self.observer.miss(self.tier()),
            }
        }
        Ok(heads)
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.store.delete(key).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.observer.corrupt(self.tier());
        self.store.quarantine(key).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.store.ping().await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        self.store.acquire(key, ttl).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.store.renew(lease, ttl).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.store.release(lease).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        self.store.wait(key, patience).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.store.list(after, limit).await
    }
}
