//! What a worker published and still holds in memory, for others to read: pinned while its copy in the store is being
//! written and for a while after, then for as long as there is room.
//!
//! As an [`EcStore`] it only gives: who may write is its owner alone, by [`PeerCache::place`].

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

/// Bytes that are not written yet are counted in units of this size.
const UNIT: usize = 4 << 10;

/// Sizes of a peer cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCacheSettings {
    /// Bytes of objects that are kept without need; those that are pinned come on top. Default 256 MiB.
    pub budget_bytes: usize,
    /// Bytes of objects whose copy in the store is not written; past it publishing waits. Default 256 MiB.
    pub unwritten_bytes: usize,
    /// How long an object stays pinned after its copy was written. Default 10 s.
    pub linger: Duration,
    /// How long the copy is tried to be written before it is given up. Default 60 s.
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
    /// Told of every object that is placed.
    news: Notify,
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
            news: Notify::new(),
            unwritten: Arc::new(Semaphore::new(permits)),
            n_units,
        }
    }

    /// Its sizes.
    pub fn settings(&self) -> &PeerCacheSettings {
        &self.settings
    }

    /// Waits for room for an object that is not written yet. The room is given back with the permit; an object that is
    /// larger than all of it takes all of it.
    pub async fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.n_units);
        // Closed by nobody.
        self.unwritten.clone().acquire_many_owned(units).await.ok()
    }

    /// Puts an object on the peer cache, where others can read it from now on, and pins it. One that is there already stays
    /// as it is, pinned once more.
    pub fn place(self: &Arc<Self>, key: ContentKey, object: Bytes) -> Pin {
        let bytes = object.len();
        let mut objects = self.objects();
        *objects.n_pins.entry(key).or_default() += 1;
        objects.held.insert_held(key, object, bytes);
        drop(objects);
        self.news.notify_waiters();
        Pin { peer_cache: self.clone(), key }
    }

    /// The object, if it is here.
    pub fn object(&self, key: &ContentKey) -> Option<Bytes> {
        self.objects().held.get(key)
    }

    /// The description of an object that is here.
    pub fn head(&self, key: &ContentKey) -> Option<EncodedItem> {
        let object = self.object(key)?;
        let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(&object);
        object::probe(first_bytes, object.len(), key, &self.limits).ok()
    }

    /// Whether the object is pinned: its copy in the store is being written, or was a moment ago.
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

    fn only_gives<T>(op: Op) -> Result<T, EcError> {
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
        Self::only_gives(Op::Put)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        Ok(self.object(key))
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        Ok(keys.iter().map(|key| self.head(key)).collect())
    }

    async fn delete(&self, _: &ContentKey) -> Result<bool, EcError> {
        Self::only_gives(Op::Delete)
    }

    async fn ping(&self) -> Result<(), EcError> {
        Ok(())
    }

    /// Who asks was told that it will be here, so there is no lease to look at.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        loop {
            // Before looking: what happens between looking and waiting is heard.
            let news = self.news.notified();
            if let Some(item) = self.head(key) {
                return Ok(Some(item));
            }
            if timeout_at(until, news).await.is_err() {
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
