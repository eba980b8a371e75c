//! Objects in Redis: one server, the master that sentinels name, or a cluster, with or without TLS.
//!
//! An object is in chunks: one value of 20 MiB would block the server for 20 to 40 ms. `triptych:ec:{<hex>}` is the
//! manifest, `triptych:ec:{<hex>}:<nonce>:c<i>` are the chunks, `…:lease` and `…:fence` belong to the key's lease; the
//! braces put all of a key into one slot of a cluster, and so onto one server. A writer puts its chunks first, under a
//! nonce of its own, and then the manifest, unless there is one: that is the atomic step. So the chunks of two writers
//! never mix, and chunks without a manifest are invisible and expire. Everything has a time to live, and chunks outlive
//! their manifest. The manifests are the directory: they hold each object's head, so that asking for many is one round
//! trip to a single server, and one to each node of a cluster.
//!
//! An object lost by a failover, an eviction or a restart is a miss. So is a manifest whose chunk is gone; it is
//! removed so that the next put is stored. Replication is in order, so a replica that has a manifest has its chunks.
//!
//! A user of an access list needs `~triptych:ec:* &triptych:ec:* +get +set +getrange +strlen +unlink +exists +scan
//! +eval +time +pttl +pexpire +publish +subscribe +ping`, in a cluster `+cluster|slots` too. A registry of workers
//! needs `~triptych:workers +eval +time +hset +hsetnx +hdel +hgetall +expire`.

mod dial;
mod lease;
mod link;
mod list;
mod manifest;
mod notifications;
mod options;
mod scripts;
mod sentinel;
mod setting;
mod tuning;

pub use link::{LinkError, RedisLink, RedisQuery};
pub use manifest::CHUNK_BYTES;
pub use setting::RedisSetting;
pub use tuning::RedisTuning;

use super::lease::{Acquired, EncodeLease};
use super::{EcStore, Listed, Op, PutOutcome, StoreKind, check_size, nonce};
use crate::error::EcError;
use crate::object::{self, ObjectError};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use futures::{StreamExt, TryStreamExt, stream};
use manifest::Manifest;
use notifications::KeyNotifications;
use redis::{Cmd, Pipeline, Value, cmd};
use std::fmt;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Chunks outlive their manifest by this, so that a reader who has the manifest finds them.
const CHUNK_GRACE: Duration = Duration::from_secs(60);

/// Key of the ping. In a cluster only its slot is checked.
const PING_KEY: &str = "triptych:ec:ping";

/// The store in Redis.
pub struct RedisStore {
    limits: Limits,
    tuning: RedisTuning,
    link: RedisLink,
    notifications: KeyNotifications,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("servers", &self.link.shown()).finish_non_exhaustive()
    }
}

impl RedisStore {
    /// A store at `url`, the text of a [`RedisSetting`]. Connects at the first operation, and again whenever the
    /// connection was lost. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`EcError::Config`] if the URL is not one, a certificate cannot be read, or the time to live is too short.
    pub fn new(url: &str, tuning: RedisTuning, limits: &Limits) -> Result<Self, EcError> {
        Self::open(&url.parse()?, tuning, limits)
    }

    /// As [`Self::new`], from a setting. Its time to live goes before that of `tuning`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn open(setting: &RedisSetting, tuning: RedisTuning, limits: &Limits) -> Result<Self, EcError> {
        let tuning = RedisTuning { ttl: setting.ttl().unwrap_or(tuning.ttl), ..tuning };
        if tuning.ttl < Duration::from_secs(1) {
            return Err(setting.wrong(format!("objects must live at least a second, not {:?}", tuning.ttl)));
        }
        let link = RedisLink::new(setting, &tuning)?;
        Ok(Self { limits: limits.clone(), tuning, link, notifications: KeyNotifications::new() })
    }

    /// The key of the manifest. Public for drills and tests that break things by hand.
    pub fn manifest_key(key: &ContentKey) -> String {
        format!("triptych:ec:{{{key}}}")
    }

    fn chunk_key(key: &ContentKey, nonce: u128, chunk: usize) -> String {
        format!("triptych:ec:{{{key}}}:{nonce:032x}:c{chunk}")
    }

    /// Runs a command on a key.
    async fn run(&self, op: Op, key: &ContentKey, command: &Cmd) -> Result<Value, EcError> {
        let answer = self.link.run(&Self::manifest_key(key), command).await;
        answer.map_err(|e| self.refine(op, Some(key), e))
    }

    fn refine(&self, op: Op, key: Option<&ContentKey>, e: LinkError) -> EcError {
        match (e, key) {
            (LinkError::TimedOut(limit), _) => EcError::TimedOut { store: StoreKind::Redis, op, limit },
            (LinkError::WrongType, Some(key)) => {
                let reason = "the key holds another kind of value";
                EcError::Corrupt { key: *key, source: ObjectError::Frame { reason } }
            }
            (e, _) => EcError::unavailable(StoreKind::Redis, op, e),
        }
    }

    async fn read_manifest(&self, key: &ContentKey) -> Result<Option<Manifest>, EcError> {
        let corrupt = |source| EcError::Corrupt { key: *key, source };
        let raw = bytes_of(self.run(Op::Get, key, &get_manifest(key)).await?).map_err(corrupt)?;
        if raw.is_empty() {
            return Ok(None);
        }
        Manifest::read(&raw, &self.limits).map(Some).map_err(corrupt)
    }

    async fn write_chunks(&self, key: &ContentKey, nonce: u128, object: &Bytes) -> Result<(), EcError> {
        let seconds = self.tuning.ttl.saturating_add(CHUNK_GRACE).as_secs();
        let write = |i: usize| {
            let chunk = object.slice(i * CHUNK_BYTES..object.len().min((i + 1) * CHUNK_BYTES));
            async move {
                let mut set = cmd("SET");
                set.arg(Self::chunk_key(key, nonce, i)).arg(&chunk[..]).arg("EX").arg(seconds);
                self.run(Op::Put, key, &set).await.map(drop)
            }
        };
        stream::iter(0..object.len().div_ceil(CHUNK_BYTES))
            .map(write)
            .buffer_unordered(self.tuning.chunks_in_flight.max(1))
            .try_collect()
            .await
    }

    /// The concatenated chunks; `None` if one is gone.
    async fn read_chunks(&self, key: &ContentKey, manifest: &Manifest) -> Result<Option<Bytes>, EcError> {
        let read = |i: usize| async move {
            // One byte more than there may be, so that a chunk that is too long is seen and not read.
            let chunk = Cmd::getrange(Self::chunk_key(key, manifest.nonce, i), 0, CHUNK_BYTES as isize);
            self.run(Op::Get, key, &chunk).await
        };
        let mut chunks =
            stream::iter(0..manifest.n_chunks()).map(read).buffered(self.tuning.chunks_in_flight.max(1));
        let corrupt = |source| EcError::Corrupt { key: *key, source };
        let mut object = BytesMut::new();
        while let Some(value) = chunks.try_next().await? {
            let chunk = bytes_of(value).map_err(corrupt)?;
            if chunk.is_empty() {
                return Ok(None);
            }
            if chunk.len() != CHUNK_BYTES.min(manifest.len - object.len()) {
                return Err(corrupt(ObjectError::Frame { reason: "a chunk has the wrong length" }));
            }
            if object.is_empty() {
                // The first chunk is there and whole, so the rest is likely to be.
                object.reserve(manifest.len);
            }
            object.extend_from_slice(&chunk);
        }
        Ok(Some(object.freeze()))
    }

    async fn remove_chunks(&self, key: &ContentKey, manifest: &Manifest) -> Result<(), EcError> {
        let mut unlink = cmd("UNLINK");
        for i in 0..manifest.n_chunks() {
            unlink.arg(Self::chunk_key(key, manifest.nonce, i));
        }
        if manifest.n_chunks() > 0 {
            self.run(Op::Delete, key, &unlink).await?;
        }
        Ok(())
    }

    /// Removes a manifest, unless another writer has replaced it, and its chunks. Returns true if it existed.
    async fn remove(&self, key: &ContentKey, manifest: &Manifest) -> Result<bool, EcError> {
        let start = manifest.write();
        let remove = scripts::remove_if_same(&Self::manifest_key(key), &start[..Manifest::OWN_BYTES]);
        let removed = self.run(Op::Delete, key, &remove).await?;
        self.remove_chunks(key, manifest).await?;
        Ok(removed != Value::Int(0))
    }

    /// The metadata in a reply to [`get_manifest`].
    fn head(&self, key: &ContentKey, answer: Value) -> Option<EncodedItem> {
        let manifest = Manifest::read(&bytes_of(answer).ok()?, &self.limits).ok()?;
        object::probe(&manifest.first_bytes, manifest.len, key, &self.limits).ok()
    }

    /// Asks each key's node. Nodes that do not answer count as misses, as long as one answers.
    async fn heads_in_cluster(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let limit = self.tuning.head_timeout;
        let late = |_| EcError::TimedOut { store: StoreKind::Redis, op: Op::Heads, limit };
        let asked = keys.iter().map(|key| async move {
            let head = get_manifest(key);
            timeout(limit, self.run(Op::Heads, key, &head)).await.unwrap_or_else(|e| Err(late(e)))
        });
        let (mut heads, mut n_answers, mut failed) = (Vec::with_capacity(keys.len()), 0, None);
        for (key, answer) in keys.iter().zip(join_all(asked).await) {
            n_answers += usize::from(!matches!(&answer, Err(e) if e.is_retryable()));
            heads.push(match answer {
                Ok(value) => self.head(key, value),
                Err(e) => {
                    failed = e.is_retryable().then_some(e).or(failed);
                    None
                }
            });
        }
        match failed {
            Some(e) if n_answers == 0 => Err(e),
            Some(e) => {
                tracing::debug!(error = %e, n_answers, n_keys = keys.len(), "nodes that do not answer count as misses");
                Ok(heads)
            }
            None => Ok(heads),
        }
    }
}

#[async_trait]
impl EcStore for RedisStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Redis
    }

    fn describe(&self) -> String {
        self.link.shown().to_owned()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        let name = Self::manifest_key(key);
        match self.run(Op::Put, key, &Cmd::strlen(&name)).await {
            Ok(Value::Int(0)) => {}
            Ok(_) | Err(EcError::Corrupt { .. }) => return Ok(PutOutcome::AlreadyThere),
            Err(e) => return Err(e),
        }
        let first_bytes = object.slice(..object::head_bytes(&object));
        let manifest = Manifest { len: object.len(), nonce: nonce(), first_bytes };
        self.write_chunks(key, manifest.nonce, &object).await?;
        let publish =
            scripts::publish(&name, &manifest.write(), Manifest::OWN_BYTES, self.tuning.ttl, key.as_bytes());
        if self.run(Op::Put, key, &publish).await? == Value::Int(1) {
            return Ok(PutOutcome::Stored);
        }
        if let Err(e) = self.remove_chunks(key, &manifest).await {
            tracing::debug!(?key, error = %e, "chunks of a lost race are left to expire");
        }
        Ok(PutOutcome::AlreadyThere)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let Some(manifest) = self.read_manifest(key).await? else { return Ok(None) };
        let object = self.read_chunks(key, &manifest).await?;
        if object.is_none() {
            tracing::warn!(?key, "a chunk is gone; removing the rest of the object");
            if let Err(e) = self.remove(key, &manifest).await {
                tracing::debug!(?key, error = %e, "the rest of an object is left to the next reader");
            }
        }
        Ok(object)
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut asked = Pipeline::with_capacity(keys.len());
        for key in keys {
            asked.add_command(get_manifest(key));
        }
        match self.link.run_all(&asked).await.map_err(|e| self.refine(Op::Heads, None, e))? {
            Some(answers) if answers.len() == keys.len() => {
                Ok(keys.iter().zip(answers).map(|(key, answer)| self.head(key, answer)).collect())
            }
            Some(_) => Err(EcError::unavailable(StoreKind::Redis, Op::Heads, "not every key has a reply")),
            None => self.heads_in_cluster(keys).await,
        }
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        match self.read_manifest(key).await {
            Ok(None) => Ok(false),
            Ok(Some(manifest)) => self.remove(key, &manifest).await,
            Err(EcError::Corrupt { .. }) => {
                let unlink = Cmd::unlink(Self::manifest_key(key));
                Ok(self.run(Op::Delete, key, &unlink).await? != Value::Int(0))
            }
            Err(e) => Err(e),
        }
    }

    async fn ping(&self) -> Result<(), EcError> {
        let answer = self.link.run(PING_KEY, &Cmd::exists(PING_KEY)).await;
        answer.map(drop).map_err(|e| self.refine(Op::Ping, None, e))
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        self.take_lease(key, ttl).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.keep_lease(lease, ttl).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.give_lease_back(lease).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        let mut waiting = self.notifications.wait_for(key, self.link.dialer());
        loop {
            let notified = waiting.notified();
            if let Some(item) = self.heads(std::slice::from_ref(key)).await?.pop().flatten() {
                return Ok(Some(item));
            }
            let is_held = self.run(Op::Wait, key, &Cmd::exists(Self::lease_key(key))).await? != Value::Int(0);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !is_held {
                // Between the two polls the object may have been stored and the lease released.
                return Ok(self.heads(std::slice::from_ref(key)).await?.pop().flatten());
            }
            waiting.until_next_poll(notified, left).await;
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.page(after, limit).await
    }
}

/// Reads at most the bytes of a manifest. An empty reply means that there is none.
fn get_manifest(key: &ContentKey) -> Cmd {
    Cmd::getrange(RedisStore::manifest_key(key), 0, Manifest::MAX_BYTES as isize)
}

fn bytes_of(value: Value) -> Result<Vec<u8>, ObjectError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        _ => Err(ObjectError::Frame { reason: "the value is no string" }),
    }
}
