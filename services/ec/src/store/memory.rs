//! Objects in this process, within a budget of bytes; the least recently used are dropped.
//!
//! Several processes share one through [`crate::server`] and [`super::remote`].

use super::{EcStore, PutOutcome, StoreKind, check_size};
use crate::error::EcError;
use crate::lru::ByteLru;
use crate::object::{self, MAX_HEAD_BYTES};
use async_trait::async_trait;
use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, PoisonError};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Budget where nothing else is said: 1 GiB.
pub const DEFAULT_BUDGET_BYTES: usize = 1 << 30;

/// The in-process store.
#[derive(Debug)]
pub struct MemoryStore {
    limits: Limits,
    budget_bytes: usize,
    objects: Mutex<ByteLru<Bytes>>,
}

impl MemoryStore {
    /// An empty store that keeps at most `budget_bytes` of objects. An object over the budget is refused like one
    /// over the limit.
    pub fn new(budget_bytes: usize, limits: &Limits) -> Self {
        let limits = Limits { max_object_bytes: limits.max_object_bytes.min(budget_bytes), ..limits.clone() };
        Self { limits, budget_bytes, objects: Mutex::new(ByteLru::new(budget_bytes)) }
    }

    /// Bytes of the objects that it holds.
    pub fn used_bytes(&self) -> usize {
        self.objects().used()
    }

    /// Number of the objects that it holds.
    pub fn n_objects(&self) -> usize {
        self.objects().len()
    }

    fn objects(&self) -> MutexGuard<'_, ByteLru<Bytes>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
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
        Ok(if stored { PutOutcome::Stored } else { PutOutcome::AlreadyThere })
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        Ok(self.objects().get(key))
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let read = |key: &ContentKey| {
            let object = self.objects().get(key)?;
            let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(&object);
            object::probe(first_bytes, object.len(), key, &self.limits).ok()
        };
        Ok(keys.iter().map(read).collect())
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        Ok(self.objects().remove(key).is_some())
    }

    async fn ping(&self) -> Result<(), EcError> {
        Ok(())
    }
}
