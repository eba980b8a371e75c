//! Objects in memory that the processes of one host share: a slab file, mapped once by each of them.
//!
//! The file lies in `/dev/shm`, or on any mount that the processes share, so containers that mount the same volume
//! share it too. The first process creates it, in the size of its setting; objects and leases are lost with the host,
//! and a lost object is a miss. Reading is one copy out of the slab, writing one copy in, both without a lock:
//! [`object_table`] explains why no torn object is returned. Objects are copied, not borrowed: borrowed memory would
//! have to be pinned, and Rust must not reference bytes that another process can change.
//!
//! When the slab is full, [`crate::policy`] decides the eviction. Unfinished writes and leases of a dead process are
//! freed ([`owners`]).

mod object_table;
mod layout;
mod leases;
mod map;
mod owners;
mod pages;
mod slab;
mod words;

use super::lease::{Acquired, EncodeLease};
use super::{Access, EcStore, Listed, Op, PutOutcome, StoreKind, check_size};
use crate::error::EcError;
use crate::object::{self, MAX_HEAD_BYTES, ObjectError};
use crate::settings::text::split_mib;
use async_trait::async_trait;
use bytes::Bytes;
use layout::{Field, PAGE_BYTES};
use leases::{Asker, Grant};
use object_table::{Extent, IsAlive, NewObject};
use pages::Damaged;
use slab::{Slab, now_ms};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, sleep};
use triptych_core::limits::Limits;
use triptych_core::{Backoff, ContentKey, EncodedItem};
use words::Words;

/// Default size: 1 GiB.
pub const DEFAULT_BYTES: u64 = 1 << 30;
/// Folder of slabs that are given by name.
const SHM_DIR: &str = "/dev/shm";
/// Timeout of the lock, which is held for milliseconds unless its holder is suspended.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// Timeout of a put while writes of others fill the whole slab.
const ROOM_LIMIT: Duration = Duration::from_secs(2);
/// Bytes above which objects are copied on a blocking thread.
const INLINE_BYTES: usize = 256 << 10;
/// Attempts, of [`LOCK_LIMIT`] each, to free the slot of a failed put.
const MAX_GIVE_BACKS: usize = 60;
/// Keys looked up under one acquisition of the lock.
const KEYS_AT_ONCE: usize = 64;
/// Attempts of a read whose object is evicted and stored again concurrently.
const READS: usize = 3;
/// Pauses between polls of a wait.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
/// Interval at which a wait checks the lease without events.
const LEASE_LOOK: Duration = Duration::from_millis(100);

/// Path and initial size of a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmSetting {
    /// The file.
    pub path: PathBuf,
    /// Size of the whole slab in bytes.
    pub size_bytes: u64,
}

impl ShmSetting {
    /// Reads `shm[:NAME_OR_PATH][?mib=N]`; a name without `/` lies in `/dev/shm`, and where there is none it is
    /// `triptych-ec-UID`.
    ///
    /// # Errors
    /// [`EcError::Config`] for anything else.
    pub fn parse(text: &str) -> Result<Self, EcError> {
        let (place, size) = split_mib(text)?;
        let path = match place.strip_prefix("shm").map(|rest| rest.strip_prefix(':').ok_or(rest)) {
            Some(Err("")) => default_path(),
            Some(Ok(name)) if !name.is_empty() && !name.ends_with('/') => Path::new(SHM_DIR).join(name),
            _ => {
                let reason =
                    "`shm:` needs a name or a path, as in `shm:triptych` or `shm:/mnt/shared/triptych`";
                return Err(EcError::Config { setting: text.to_owned(), reason: reason.into() });
            }
        };
        Ok(Self { path, size_bytes: size.unwrap_or(DEFAULT_BYTES) })
    }
}

impl Default for ShmSetting {
    fn default() -> Self {
        Self { path: default_path(), size_bytes: DEFAULT_BYTES }
    }
}

impl fmt::Display for ShmSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shm:{}?mib={}", self.path.display(), self.size_bytes >> 20)
    }
}

/// One slab for each user, since a slab is private to its user.
fn default_path() -> PathBuf {
    Path::new(SHM_DIR).join(format!("triptych-ec-{}", rustix::process::getuid().as_raw()))
}

/// The store in a slab.
#[derive(Debug)]
pub struct ShmStore {
    limits: Limits,
    slab: Arc<Slab>,
}

impl ShmStore {
    /// Maps the slab, or creates it.
    ///
    /// # Errors
    /// [`EcError::Config`] if it cannot be made there, or what is there is no slab of this version.
    pub async fn open(setting: &ShmSetting, limits: &Limits) -> Result<Self, EcError> {
        Self::open_for(setting, limits, Access::Create).await
    }

    /// Maps the slab for a use.
    ///
    /// # Errors
    /// As [`Self::open`], and [`EcError::NoStore`] if it must be there and is not.
    pub async fn open_for(setting: &ShmSetting, limits: &Limits, access: Access) -> Result<Self, EcError> {
        let (path, size) = (setting.path.clone(), setting.size_bytes);
        let opened = tokio::task::spawn_blocking(move || Slab::open(&path, size, access)).await;
        let slab = opened.unwrap_or_else(|e| Err(std::io::Error::other(e))).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound if access != Access::Create => {
                EcError::NoStore { store: StoreKind::Shm, place: setting.path.display().to_string() }
            }
            _ => EcError::Config {
                setting: setting.to_string(),
                reason: format!(
                    "the slab cannot be used: {e}; name another file, or remove this one while no process uses it"
                ),
            },
        })?;
        let capacity = slab.geometry().capacity();
        let fits = (setting.size_bytes / 8 * 7..=setting.size_bytes).contains(&(capacity as u64));
        if access == Access::Create && !fits {
            tracing::warn!(path = %setting.path.display(), asked_mib = setting.size_bytes >> 20,
                mib = capacity >> 20, "the slab was made in another size, which stays");
        }
        let limits = Limits { max_object_bytes: limits.max_object_bytes.min(capacity), ..limits.clone() };
        Ok(Self { limits, slab: Arc::new(slab) })
    }

    /// Bytes that objects can take together.
    pub fn capacity(&self) -> usize {
        self.slab.geometry().capacity()
    }

    /// Bytes of the pages that objects have, and of those that are being written.
    pub fn used_bytes(&self) -> usize {
        let free = usize::try_from(self.slab.words().field(Field::FreePages)).unwrap_or(usize::MAX);
        self.capacity().saturating_sub(free.saturating_mul(PAGE_BYTES))
    }

    /// Objects evicted since the creation, by all processes.
    pub fn n_evicted(&self) -> u64 {
        self.slab.words().field(Field::Evicted)
    }

    async fn change<T>(
        &self,
        op: Op,
        work: impl Fn(&Words<'_>, IsAlive<'_>) -> Result<T, Damaged>,
    ) -> Result<T, EcError> {
        change(&self.slab, op, work).await
    }

    /// The object of a key; a use of it, unless the slab is only read.
    fn find(&self, words: &Words<'_>, key: &ContentKey) -> Result<Option<Extent>, Damaged> {
        if self.slab.is_read_only() { words.peek(key) } else { words.find(key) }
    }

    async fn read(&self, key: &ContentKey) -> Result<Option<Vec<u8>>, EcError> {
        for _ in 0..READS {
            let Some(extent) = self.change(Op::Get, |words, _| self.find(words, key)).await? else {
                return Ok(None);
            };
            let limit = self.limits.max_object_bytes;
            if extent.len > limit {
                let source = ObjectError::TooLarge { limit, actual: extent.len };
                return Err(EcError::Corrupt { key: *key, source });
            }
            let copied = if extent.len <= INLINE_BYTES {
                copy_out(&self.slab, &extent, usize::MAX)
            } else {
                let slab = self.slab.clone();
                let copied = tokio::task::spawn_blocking(move || copy_out(&slab, &extent, usize::MAX)).await;
                copied.map_err(|e| EcError::unavailable(StoreKind::Shm, Op::Get, e))?
            };
            if copied.is_some() {
                return Ok(copied);
            }
        }
        Ok(None)
    }
}

/// Runs `work` on the object table as soon as the lock is free.
async fn change<T>(
    slab: &Slab,
    op: Op,
    work: impl Fn(&Words<'_>, IsAlive<'_>) -> Result<T, Damaged>,
) -> Result<T, EcError> {
    let until = Instant::now() + LOCK_LIMIT;
    for n_tries in 0_u32.. {
        match slab.try_change(&work) {
            Ok(Some(done)) => return Ok(done),
            Ok(None) if Instant::now() >= until => break,
            Ok(None) if n_tries < 16 => tokio::task::yield_now().await,
            Ok(None) => sleep(Duration::from_millis(1)).await,
            Err(e) => return Err(EcError::unavailable(StoreKind::Shm, op, e)),
        }
    }
    Err(EcError::TimedOut { store: StoreKind::Shm, op, limit: LOCK_LIMIT })
}

/// The first `n` bytes, unless the slot was reused concurrently.
fn copy_out(slab: &Slab, extent: &Extent, n: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; extent.len.min(n)];
    slab.words().copy_out(&extent.pages, &mut bytes);
    slab.words().is_still(extent).then_some(bytes)
}

/// Runs in a task of its own, so that it completes if its caller is cancelled.
async fn put(slab: Arc<Slab>, key: ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
    let (owner, len) = (slab.owner(), object.len());
    let until = Instant::now() + ROOM_LIMIT;
    let extent = loop {
        let reserve = |words: &Words<'_>, is_alive: IsAlive<'_>| {
            let new = NewObject { key, len, owner, now_ms: now_ms() };
            if words.has(&key)? { Ok(None) } else { words.reserve(&new, is_alive).map(Some) }
        };
        match change(&slab, Op::Put, reserve).await? {
            None => return Ok(PutOutcome::AlreadyThere),
            Some(Some(extent)) => break extent,
            Some(None) if Instant::now() < until => sleep(Duration::from_millis(2)).await,
            Some(None) => {
                let why = "the whole slab is taken by objects that are being written";
                return Err(EcError::unavailable(StoreKind::Shm, Op::Put, why));
            }
        }
    };
    if len <= INLINE_BYTES {
        slab.words().copy_in(&extent.pages, &object);
    } else {
        let (to, pages) = (slab.clone(), extent.pages.clone());
        let copied = tokio::task::spawn_blocking(move || to.words().copy_in(&pages, &object)).await;
        if let Err(e) = copied {
            change(&slab, Op::Put, |words, _| words.abandon(&extent)).await?;
            return Err(EcError::unavailable(StoreKind::Shm, Op::Put, e));
        }
    }
    match change(&slab, Op::Put, |words, _| words.publish(&extent)).await {
        Ok(true) => Ok(PutOutcome::Stored),
        Ok(false) => Ok(PutOutcome::AlreadyThere),
        Err(e) => {
            // The lock was held for seconds: the slot is freed once it is available. Not in a drain's task group: if
            // the task is aborted, the slot is freed with the process.
            tokio::spawn(async move {
                for _ in 0..MAX_GIVE_BACKS {
                    if change(&slab, Op::Put, |words, _| words.abandon(&extent)).await.is_ok() {
                        return;
                    }
                }
            });
            Err(e)
        }
    }
}

#[async_trait]
impl EcStore for ShmStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Shm
    }

    fn describe(&self) -> String {
        format!("shm:{}, {} MiB", self.slab.path().display(), self.capacity() >> 20)
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        // Not in a drain's task group: the caller waits for it, and the slot of an aborted put is freed with the
        // process.
        let task = tokio::spawn(put(self.slab.clone(), *key, object));
        task.await.unwrap_or_else(|e| Err(EcError::unavailable(StoreKind::Shm, Op::Put, e)))
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        Ok(self.read(key).await?.map(Bytes::from))
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let mut heads = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_AT_ONCE) {
            let find =
                |words: &Words<'_>, _: IsAlive<'_>| some.iter().map(|key| self.find(words, key)).collect();
            let found: Vec<Option<Extent>> = self.change(Op::Heads, find).await?;
            heads.extend(some.iter().zip(found).map(|(key, extent)| {
                let extent = extent?;
                // One that is evicted at this moment is as good as a miss.
                let bytes = copy_out(&self.slab, &extent, MAX_HEAD_BYTES)?;
                object::probe(&bytes, extent.len, key, &self.limits).ok()
            }));
        }
        Ok(heads)
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.change(Op::Delete, |words, _| words.remove(key)).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.change(Op::Ping, |_, _| Ok(())).await?;
        self.slab.check_place().map_err(|e| EcError::unavailable(StoreKind::Shm, Op::Ping, e))
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let asker = Asker { owner: self.slab.owner(), now_ms: now_ms(), ttl_ms: millis(ttl) };
        let grant = self.change(Op::Lease, |words, is_alive| Ok(words.acquire_lease(key, &asker, is_alive)));
        match grant.await? {
            Grant::Granted { token } => Ok(Acquired::Granted(EncodeLease { key: *key, token })),
            Grant::Held { left_ms } => Ok(Acquired::Held { left: Duration::from_millis(left_ms) }),
            Grant::Full => Err(EcError::unavailable(StoreKind::Shm, Op::Lease, "the lease table is full")),
        }
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let (now, ttl) = (now_ms(), millis(ttl));
        self.change(Op::Lease, |words, _| Ok(words.renew_lease(&lease.key, lease.token, now, ttl))).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let now = now_ms();
        self.change(Op::Lease, |words, _| Ok(words.release_lease(&lease.key, lease.token, now))).await
    }

    /// Polls the slab's event counter, and the object only when that changes.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        loop {
            let events = self.slab.words().field(Field::Events);
            if let Some(item) = self.heads(std::slice::from_ref(key)).await?.pop().flatten() {
                return Ok(Some(item));
            }
            let is_leased =
                |words: &Words<'_>, is_alive: IsAlive<'_>| Ok(words.is_leased(key, now_ms(), is_alive));
            if !self.change(Op::Wait, is_leased).await? {
                return Ok(None);
            }
            let look = until.min(Instant::now() + LEASE_LOOK);
            let mut pauses = BACKOFF.pauses();
            while self.slab.words().field(Field::Events) == events && Instant::now() < look {
                sleep(pauses.next_pause().min(look.saturating_duration_since(Instant::now()))).await;
            }
            if Instant::now() >= until {
                return Ok(self.heads(std::slice::from_ref(key)).await?.pop().flatten());
            }
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let mut entries = self.change(Op::List, |words, _| Ok(words.entries(after))).await?;
        entries.sort_unstable();
        entries.truncate(limit);
        let listed = entries.into_iter().map(|entry| Listed {
            key: entry.key,
            len: entry.len,
            stored: SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(entry.stored_ms)),
        });
        Ok(listed.collect())
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
