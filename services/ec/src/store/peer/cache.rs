//! The outputs that a worker published and holds in memory for its peers: pinned while the store's copy is being
//! written and for a while after, then kept within the budget.
//!
//! As an [`EcStore`] it is read-only: only its owner writes, by [`PeerCache::place`].

use crate::cache::ByteCache;
use crate::error::EcError;
use crate::object::{self, MAX_HEAD_BYTES};
use crate::store::{EcStore, Listed, Op, PutOutcome, StoreKind};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Unit in bytes in which unwritten objects are counted.
const UNIT: usize = 4 << 10;

/// Sizes of a peer cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCacheSettings {
    /// Bytes of unpinned objects; pinned ones are not counted. Default 256 MiB.
    pub budget_bytes: usize,
    /// Bytes of objects without a copy in the store; past it publishing waits. Default 256 MiB.
    pub unwritten_bytes: usize,
    /// Time that an object stays pinned after its copy was written. Default 10 s.
    pub linger: Duration,
    /// Time after which a failing copy is abandoned. Default 60 s.
    pub keep_trying: Duration,
}

impl Default for PeerCacheSettings {
    fn default() -> Self {
        Self {
            budget_bytes: 256 << 20,
            unwritten_bytes: 256 << 20,
            linger: Duration::from_secs(10),
            keep_trying: Duration::from_secs(60),
        }
    }
}

/// The peer cache.
pub struct PeerCache {
    settings: PeerCacheSettings,
    limits: Limits,
    objects: Mutex<Objects>,
    /// Notified of every placed object.
    placed: Notify,
    unwritten: Arc<Semaphore>,
    n_units: u32,
}

struct Objects {
    held: ByteCache<Bytes>,
    /// Never zero.
    n_pins: HashMap<ContentKey, usize>,
}

/// Keeps an object on the peer cache until it is dropped.
pub struct Pin {
    peer_cache: Arc<PeerCache>,
    key: ContentKey,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut objects = self.peer_cache.objects();
        let Objects { held, n_pins } = &mut *objects;
        if let Some(n) = n_pins.get_mut(&self.key) {
            *n -= 1;
            if *n == 0 {
                n_pins.remove(&self.key);
                held.release(&self.key);
            }
        }
    }
}

impl PeerCache {
    /// An empty peer cache.
    pub fn new(settings: PeerCacheSettings, limits: &Limits) -> Self {
        let n_units = u32::try_from(settings.unwritten_bytes.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX);
        let permits = usize::try_from(n_units).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let objects = Objects { held: ByteCache::new(settings.budget_bytes), n_pins: HashMap::new() };
        Self {
            settings,
            limits: limits.clone(),
            objects: Mutex::new(objects),
            placed: Notify::new(),
            unwritten: Arc::new(Semaphore::new(permits)),
            n_units,
        }
    }

    /// Its sizes.
    pub fn settings(&self) -> &PeerCacheSettings {
        &self.settings
    }

    /// Waits for capacity for an unwritten object, which the permit releases. An object larger than the whole capacity
    /// takes all of it.
    pub async fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.n_units);
        // Closed by nobody.
        self.unwritten.clone().acquire_many_owned(units).await.ok()
    }

    /// Puts an object on the peer cache, where others can read it from now on, and pins it. One that is there already
    /// stays as it is, pinned once more.
    pub fn place(self: &Arc<Self>, key: ContentKey, object: Bytes) -> Pin {
        let bytes = object.len();
        let mut objects = self.objects();
        *objects.n_pins.entry(key).or_default() += 1;
        objects.held.insert_held(key, object, bytes);
        drop(objects);
        self.placed.notify_waiters();
        Pin { peer_cache: self.clone(), key }
    }

    /// The object, if it is cached.
    pub fn object(&self, key: &ContentKey) -> Option<Bytes> {
        self.objects().held.get(key)
    }

    /// Metadata of a cached object.
    pub fn head(&self, key: &ContentKey) -> Option<EncodedItem> {
        let object = self.object(key)?;
        let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(&object);
        object::probe(first_bytes, object.len(), key, &self.limits).ok()
    }

    /// True if the object is pinned: its copy in the store is being written, or was a moment ago.
    pub fn is_pinned(&self, key: &ContentKey) -> bool {
        self.objects().n_pins.contains_key(key)
    }

    /// Takes an object off, pinned or not.
    pub fn remove(&self, key: &ContentKey) -> bool {
        self.objects().held.remove(key).is_some()
    }

    /// Bytes of the objects that it holds.
    pub fn used_bytes(&self) -> usize {
        self.objects().held.used()
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock()
    }

    fn read_only<T>(op: Op) -> Result<T, EcError> {
        Err(EcError::Unsupported { store: StoreKind::Peer, op })
    }
}

#[async_trait]
impl EcStore for PeerCache {
    fn kind(&self) -> StoreKind {
        StoreKind::Peer
    }

    fn describe(&self) -> String {
        format!("outputs of this worker, {} MiB", self.settings.budget_bytes >> 20)
    }

    async fn put_if_absent(&self, _: &ContentKey, _: Bytes) -> Result<PutOutcome, EcError> {
        Self::read_only(Op::Put)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        Ok(self.object(key))
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        Ok(keys.iter().map(|key| self.head(key)).collect())
    }

    async fn delete(&self, _: &ContentKey) -> Result<bool, EcError> {
        Self::read_only(Op::Delete)
    }

    async fn ping(&self) -> Result<(), EcError> {
        Ok(())
    }

    /// A caller expects the object here, so no lease is checked.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        loop {
            // Created before the check, so that a notification between the check and the wait is not lost.
            let placed = self.placed.notified();
            if let Some(item) = self.head(key) {
                return Ok(Some(item));
            }
            if timeout_at(until, placed).await.is_err() {
                return Ok(None);
            }
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let mut listed = self.objects().held.list(|key, object| (after < Some(key)).then_some(object.len()));
        listed.sort_unstable();
        listed.truncate(limit);
        let listed = listed.into_iter().map(|(key, len)| Listed { key, len: len as u64, stored: None });
        Ok(listed.collect())
    }
}
