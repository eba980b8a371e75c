//! Bounds the operations on a store: concurrent operations, their bytes, and the queue before them.
//!
//! Without it a burst of large objects is a burst of memory, and a slow store a queue that grows until every request in
//! it is late. With a full queue an operation is refused at once, so that its caller can react
//! in time (Little's law; AWS Builders' Library, "Using load shedding to avoid overload"). Waits,
//! leases and pings are never queued: they are small, and the holder of a lease must be able to renew it.

use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use triptych_core::{ContentKey, EncodedItem};

/// Bytes are counted in units of this size, so that they fit a semaphore.
const UNIT: usize = 4 << 10;

/// The bounds of a [`Limited`] store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Operations in flight. Default 64; 0 is read as 1.
    pub in_flight: usize,
    /// Bytes of objects in flight. An object is counted by its length when it is written, and by `read_bytes` when it
    /// is read, since its length is not known before. One that is larger than all of it takes all of it. Default 512
    /// MiB.
    pub bytes: usize,
    /// Assumed size of a read in bytes. Default 4 MiB.
    pub read_bytes: usize,
    /// Length of the queue; an operation past it is refused. Default 1024; 0: no queue.
    pub waiting: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { in_flight: 64, bytes: 512 << 20, read_bytes: 4 << 20, waiting: 1024 }
    }
}

/// A store with bounded load.
pub struct Limited {
    store: Arc<dyn EcStore>,
    bounds: Bounds,
    operations: Semaphore,
    units: Semaphore,
    n_units: usize,
    n_waiting: AtomicUsize,
}

/// Permit of an operation, released when dropped.
struct OperationPermit<'a> {
    _permit: SemaphorePermit<'a>,
    _units: SemaphorePermit<'a>,
}

/// A position in the queue.
struct QueuePosition<'a>(&'a AtomicUsize);

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Limited {
    /// Bounds the load of `store`.
    pub fn new(store: Arc<dyn EcStore>, bounds: Bounds) -> Self {
        let most = Semaphore::MAX_PERMITS.min(u32::MAX as usize);
        let n_units = bounds.bytes.div_ceil(UNIT).clamp(1, most);
        let operations = Semaphore::new(bounds.in_flight.clamp(1, most));
        Self {
            store,
            bounds,
            operations,
            units: Semaphore::new(n_units),
            n_units,
            n_waiting: AtomicUsize::new(0),
        }
    }

    async fn permit(&self, op: Op, bytes: usize) -> Result<OperationPermit<'_>, EcError> {
        let n_units = bytes.div_ceil(UNIT).min(self.n_units);
        let n_units = u32::try_from(n_units).unwrap_or(u32::MAX);
        if let (Ok(turn), Ok(units)) = (self.operations.try_acquire(), self.units.try_acquire_many(n_units)) {
            return Ok(OperationPermit { _permit: turn, _units: units });
        }
        let limit = self.bounds.waiting;
        let before = self.n_waiting.fetch_add(1, Ordering::AcqRel);
        let _in_line = QueuePosition(&self.n_waiting);
        if before >= limit {
            return Err(EcError::Overloaded { store: self.kind(), op, limit });
        }
        // The semaphores are never closed.
        let closed = |e| EcError::unavailable(self.kind(), op, e);
        let turn = self.operations.acquire().await.map_err(closed)?;
        let units = self.units.acquire_many(n_units).await.map_err(closed)?;
        Ok(OperationPermit { _permit: turn, _units: units })
    }
}

#[async_trait]
impl EcStore for Limited {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let _permit = self.permit(Op::Put, object.len()).await?;
        self.store.put_if_absent(key, object).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let _permit = self.permit(Op::Get, self.bounds.read_bytes).await?;
        self.store.get(key).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let _permit = self.permit(Op::Heads, 0).await?;
        self.store.heads(keys).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let _permit = self.permit(Op::Delete, 0).await?;
        self.store.delete(key).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let _permit = self.permit(Op::Quarantine, 0).await?;
        self.store.quarantine(key).await
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        let _permit = self.permit(Op::Quarantine, 0).await?;
        self.store.disown(key, object).await
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
        let _permit = self.permit(Op::List, 0).await?;
        self.store.list(after, limit).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}
