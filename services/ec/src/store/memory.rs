//! Objects in memory of this process, within a byte budget; [`crate::policy`] decides the eviction.
//!
//! Several processes share one through [`crate::server`] and [`super::remote`].

use super::lease::{Acquired, EncodeLease, LeaseTable};
use super::{EcStore, Listed, PutOutcome, StoreKind, check_size};
use crate::cache::ByteCache;
use crate::error::EcError;
use crate::object::{self, MAX_HEAD_BYTES};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Default budget: 1 GiB.
pub const DEFAULT_BUDGET_BYTES: usize = 1 << 30;

/// The in-process store.
#[derive(Debug)]
pub struct MemoryStore {
    limits: Limits,
    budget_bytes: usize,
    objects: Mutex<ByteCache<Bytes>>,
    leases: Mutex<LeaseTable>,
    /// Notified of every stored object and every released lease.
    changed: Notify,
}

impl MemoryStore {
    /// An empty store that keeps at most `budget_bytes` of objects. An object over the budget is refused like one
    /// over the limit.
    pub fn new(budget_bytes: usize, limits: &Limits) -> Self {
        let limits = Limits { max_object_bytes: limits.max_object_bytes.min(budget_bytes), ..limits.clone() };
        let objects = Mutex::new(ByteCache::new(budget_bytes));
        Self { limits, budget_bytes, objects, leases: Mutex::default(), changed: Notify::new() }
    }

    /// Bytes of the objects that it holds.
    pub fn used_bytes(&self) -> usize {
        self.objects().used()
    }

    /// Number of the objects that it holds.
    pub fn n_objects(&self) -> usize {
        self.objects().len()
    }

    fn leases(&self) -> MutexGuard<'_, LeaseTable> {
        self.leases.lock()
    }

    fn head(&self, key: &ContentKey) -> Option<EncodedItem> {
        let object = self.objects().get(key)?;
        let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(&object);
        object::probe(first_bytes, object.len(), key, &self.limits).ok()
    }

    fn objects(&self) -> MutexGuard<'_, ByteCache<Bytes>> {
        self.objects.lock()
    }
}

#[async_trait]
impl EcStore for MemoryStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Memory
    }

    fn describe(&self) -> String {
        format!("memory, {} MiB", self.budget_bytes >> 20)
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        let bytes = object.len();
        let stored = self.objects().insert(*key, object, bytes);
        self.changed.notify_waiters();
        Ok(if stored { PutOutcome::Stored } else { PutOutcome::AlreadyThere })
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        Ok(self.objects().get(key))
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        Ok(keys.iter().map(|key| self.head(key)).collect())
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        Ok(self.objects().remove(key).is_some())
    }

    async fn ping(&self) -> Result<(), EcError> {
        Ok(())
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        Ok(self.leases().acquire(key, ttl, Instant::now()))
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        Ok(self.leases().renew(lease, ttl, Instant::now()))
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let released = self.leases().release(lease, Instant::now());
        self.changed.notify_waiters();
        Ok(released)
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        loop {
            // Created before the check, so that a notification between the check and the wait is not lost.
            let changed = self.changed.notified();
            if let Some(item) = self.head(key) {
                return Ok(Some(item));
            }
            if !self.leases().is_held(key, Instant::now()) || timeout_at(until, changed).await.is_err() {
                return Ok(None);
            }
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let mut listed = self.objects().list(|key, object| (after < Some(key)).then_some(object.len()));
        listed.sort_unstable();
        listed.truncate(limit);
        let listed = listed.into_iter().map(|(key, len)| Listed { key, len: len as u64, stored: None });
        Ok(listed.collect())
    }
}
