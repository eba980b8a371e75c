//! Objects in a directory: `DIR/ab/<hex>.safetensors`, shared by every process that mounts it.
//!
//! A writer fills a file of its own under `DIR/tmp` and then links it to its name, which fails if the name is taken:
//! that is the put-if-absent, atomic on every local file system. Nothing is synced: after a power loss an object may be
//! torn, and a torn object does not verify and is encoded again, which costs less than a sync on every publish. Objects
//! are immutable and may be removed at any time, also by hand. With a budget, objects are evicted ([`budget`]); without
//! one, everything stays until it is removed, for instance by `triptych ec gc`. File I/O blocks, so all of it runs on
//! the blocking pool.

mod budget;
mod entry;
mod files;
mod leases;
mod leftovers;
mod lock;

use super::lease::{Acquired, EncodeLease};
use super::{Access, EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy, check_size};
use crate::error::EcError;
use crate::settings::text::split_mib;
use async_trait::async_trait;
use bytes::Bytes;
use files::Files;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use triptych_core::limits::Limits;
use triptych_core::{Backoff, ContentKey, EncodedItem};

/// Pauses between polls of a wait.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(50));

/// Directory and budget of a disk store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSetting {
    /// The directory.
    pub dir: PathBuf,
    /// Most bytes of all objects; `None`: unlimited.
    pub budget_bytes: Option<u64>,
}

impl DiskSetting {
    /// Reads `disk:DIR[?mib=N]`.
    ///
    /// # Errors
    /// [`EcError::Config`] for anything else.
    pub fn parse(text: &str) -> Result<Self, EcError> {
        let (place, budget_bytes) = split_mib(text)?;
        match place.strip_prefix("disk:") {
            Some(dir) if !dir.is_empty() => Ok(Self { dir: dir.into(), budget_bytes }),
            _ => Err(EcError::Config {
                setting: text.to_owned(),
                reason: "`disk:` needs a directory, as in `disk:/var/lib/triptych/ec`".into(),
            }),
        }
    }
}

impl fmt::Display for DiskSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "disk:{}", self.dir.display())?;
        self.budget_bytes.map_or(Ok(()), |n| write!(f, "?mib={}", n >> 20))
    }
}

/// The store in a directory.
#[derive(Debug)]
pub struct DiskStore {
    limits: Limits,
    files: Arc<Files>,
}

impl DiskStore {
    /// Opens the directory without a budget, see [`Self::with_budget`].
    ///
    /// # Errors
    /// [`EcError::Config`] if the directory cannot be created or written.
    pub async fn open(dir: impl Into<PathBuf>, limits: &Limits) -> Result<Self, EcError> {
        Self::with_budget(&DiskSetting { dir: dir.into(), budget_bytes: None }, limits).await
    }

    /// Opens or creates the directory, removes leftovers of crashed writers, and evicts down to the budget. An object
    /// over the budget is refused like one over the limit. Processes that share the directory should have the same
    /// budget; one without does not evict.
    ///
    /// # Errors
    /// [`EcError::Config`] if the directory cannot be created or written.
    pub async fn with_budget(setting: &DiskSetting, limits: &Limits) -> Result<Self, EcError> {
        Self::open_for(setting, limits, Access::Create).await
    }

    /// Opens the directory for a use; one that is to be read is not tidied.
    ///
    /// # Errors
    /// [`EcError::Config`] if the directory cannot be used so; [`EcError::NoStore`] if it must be there and is not.
    pub async fn open_for(setting: &DiskSetting, limits: &Limits, access: Access) -> Result<Self, EcError> {
        let DiskSetting { dir, budget_bytes } = setting.clone();
        let opened = tokio::task::spawn_blocking(move || match access {
            Access::Existing | Access::ReadOnly if !dir.is_dir() => Ok(None),
            _ => Files::open(dir, budget_bytes, access).map(Some),
        });
        let opened = opened.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        let opened = opened.map_err(|e| EcError::Config {
            setting: setting.to_string(),
            reason: format!("the directory is not usable: {e}"),
        })?;
        let no_store =
            || EcError::NoStore { store: StoreKind::Disk, place: setting.dir.display().to_string() };
        let files = opened.ok_or_else(no_store)?;
        let budget = budget_bytes.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        let limits = Limits { max_object_bytes: limits.max_object_bytes.min(budget), ..limits.clone() };
        Ok(Self { limits, files: Arc::new(files) })
    }

    /// Path of the object of `key`, whether or not it exists.
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
        let setting = DiskSetting { dir: self.dir().to_owned(), budget_bytes: self.files.budget_bytes() };
        setting.to_string()
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
    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let key = *key;
        self.blocking(Op::Lease, move |files| files.leases().acquire(&key, ttl)).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let lease = *lease;
        self.blocking(Op::Lease, move |files| files.leases().renew(&lease, ttl)).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let lease = *lease;
        self.blocking(Op::Lease, move |files| files.leases().release(&lease)).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        let mut pauses = BACKOFF.pauses();
        loop {
            let (key, limits) = (*key, self.limits.clone());
            // The lease is read first: its holder stores the object before the release.
            let look = move |files: &Files| Ok((files.leases().is_held(&key)?, files.head(&key, &limits)?));
            let left = until.saturating_duration_since(Instant::now());
            match self.blocking(Op::Wait, look).await? {
                (_, Some(item)) => return Ok(Some(item)),
                (true, None) if !left.is_zero() => sleep(pauses.next_pause().min(left)).await,
                _ => return Ok(None),
            }
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let after = after.copied();
        self.blocking(Op::List, move |files| files.list(after.as_ref(), limit)).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.blocking(Op::List, move |files| files.leftovers(tidy)).await
    }
}
