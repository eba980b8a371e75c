//! Objects in a directory: `DIR/ab/<hex>.safetensors`, shared by every process that mounts it.
//!
//! A writer fills a file of its own under `DIR/tmp` and then links it to its name, which fails if the name is
//! taken: that is the put-if-absent, atomic on every local file system. Nothing is synced: after a power loss an
//! object may be torn, and a torn object does not verify and is encoded again, which costs less than a sync on
//! every publish. Objects are immutable and may be removed at any time, so a plain age-based cleaner is all the
//! eviction there is. File I/O blocks, so all of it runs on the blocking pool.

mod files;

use super::{EcStore, Op, PutOutcome, StoreKind, check_size};
use crate::error::EcError;
use async_trait::async_trait;
use bytes::Bytes;
use files::Files;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// The store in a directory.
#[derive(Debug)]
pub struct DiskStore {
    limits: Limits,
    files: Arc<Files>,
}

impl DiskStore {
    /// Opens the directory, makes it where it is missing, and removes what crashed writers left.
    ///
    /// # Errors
    /// [`EcError::Config`] if the directory cannot be made or written.
    pub async fn open(dir: impl Into<PathBuf>, limits: &Limits) -> Result<Self, EcError> {
        let dir = dir.into();
        let setting = format!("disk:{}", dir.display());
        let opened = tokio::task::spawn_blocking(move || Files::open(dir)).await;
        match opened.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(files) => Ok(Self { limits: limits.clone(), files: Arc::new(files) }),
            Err(e) => Err(EcError::Config { setting, reason: format!("the directory is not usable: {e}") }),
        }
    }

    /// Where the object of `key` lies, whether or not there is one.
    pub fn path_of(&self, key: &ContentKey) -> PathBuf {
        self.files.path_of(key)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.files.dir()
    }

    async fn blocking<T, F>(&self, op: Op, work: F) -> Result<T, EcError>
    where
        T: Send + 'static,
        F: FnOnce(&Files) -> io::Result<T> + Send + 'static,
    {
        let files = self.files.clone();
        let done = tokio::task::spawn_blocking(move || work(&files)).await;
        done.unwrap_or_else(|e| Err(io::Error::other(e)))
            .map_err(|e| EcError::unavailable(StoreKind::Disk, op, e))
    }
}

#[async_trait]
impl EcStore for DiskStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Disk
    }

    fn describe(&self) -> String {
        format!("disk:{}", self.dir().display())
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        let key = *key;
        self.blocking(Op::Put, move |files| files.put(&key, &object)).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let (key, limits) = (*key, self.limits.clone());
        let read = self.blocking(Op::Get, move |files| files.read(&key, &limits)).await?;
        read.map_err(|source| EcError::Corrupt { key, source })
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let (keys, limits) = (keys.to_vec(), self.limits.clone());
        let read = move |files: &Files| keys.iter().map(|key| files.head(key, &limits)).collect();
        self.blocking(Op::Heads, read).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let key = *key;
        self.blocking(Op::Delete, move |files| files.delete(&key)).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let key = *key;
        self.blocking(Op::Quarantine, move |files| files.quarantine(&key)).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.blocking(Op::Ping, Files::check_writable).await
    }
}
