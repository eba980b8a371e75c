//! A store that refuses to be changed, for whoever only looks at it.

use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::{ContentKey, EncodedItem};

/// A store without its writes: each is [`EcError::ReadOnly`]. Acquiring a lease is a write too.
pub struct ReadOnly {
    store: Arc<dyn EcStore>,
}

impl ReadOnly {
    /// Wraps a store.
    pub fn new(store: Arc<dyn EcStore>) -> Self {
        Self { store }
    }

    fn refuse<T>(&self, op: Op) -> Result<T, EcError> {
        Err(EcError::ReadOnly { store: self.kind(), op })
    }
}

#[async_trait]
impl EcStore for ReadOnly {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, _key: &ContentKey, _object: Bytes) -> Result<PutOutcome, EcError> {
        self.refuse(Op::Put)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        self.store.get(key).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        self.store.heads(keys).await
    }

    async fn delete(&self, _key: &ContentKey) -> Result<bool, EcError> {
        self.refuse(Op::Delete)
    }

    async fn quarantine(&self, _key: &ContentKey) -> Result<bool, EcError> {
        self.refuse(Op::Quarantine)
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.store.ping().await
    }

    async fn acquire(&self, _key: &ContentKey, _ttl: Duration) -> Result<Acquired, EcError> {
        self.refuse(Op::Lease)
    }

    async fn renew(&self, _lease: &EncodeLease, _ttl: Duration) -> Result<bool, EcError> {
        self.refuse(Op::Lease)
    }

    async fn release(&self, _lease: &EncodeLease) -> Result<bool, EcError> {
        self.refuse(Op::Lease)
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        self.store.wait(key, patience).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.store.list(after, limit).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        match tidy {
            Tidy::Count => self.store.leftovers(tidy).await,
            Tidy::Remove => self.refuse(Op::Delete),
        }
    }
}
