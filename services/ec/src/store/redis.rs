//! Objects in a Redis server, in chunks: one value of 20 MiB would block the server for 20 to 40 ms.
//!
//! `triptych:ec:{<hex>}` is the manifest, `triptych:ec:{<hex>}:<nonce>:c<i>` are the chunks; the braces put all of
//! an object into one slot of a cluster. A writer puts its chunks first, under a nonce of its own, and then the
//! manifest with `SET NX`: that is the atomic step. So the chunks of two writers never mix, and chunks without a
//! manifest are invisible and expire. Everything has a time to live, and chunks outlive their manifest.
//! A manifest whose chunk is gone (eviction, a hand) is a miss, and is removed so that the next put is stored.

mod link;
mod manifest;

use super::{EcStore, Op, PutOutcome, StoreKind, check_size, nonce};
use crate::error::EcError;
use crate::object::{self, MAX_HEAD_BYTES, ObjectError};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt, stream};
use link::{Link, LinkError};
use manifest::Manifest;
use redis::{Cmd, Value, cmd};
use std::fmt;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Largest chunk, fixed by the format.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Chunks outlive their manifest by this, so that a reader who has the manifest finds them.
const CHUNK_GRACE: Duration = Duration::from_secs(60);

/// Times and widths of a Redis store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisTuning {
    /// How long an object lives. Default 1 hour; at least a second.
    pub ttl: Duration,
    /// How long one command may take. Default 2 s (the library's own is 500 ms, too short for chunks under load).
    pub response_timeout: Duration,
    /// How long one attempt to connect may take. Default 1 s.
    pub connection_timeout: Duration,
    /// Attempts to connect again before an operation fails. Default 2.
    pub reconnects: usize,
    /// Chunks of one object on their way at once. Default 4.
    pub chunks_in_flight: usize,
}

impl Default for RedisTuning {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(3600),
            response_timeout: Duration::from_secs(2),
            connection_timeout: Duration::from_secs(1),
            reconnects: 2,
            chunks_in_flight: 4,
        }
    }
}

/// The store in a Redis server.
pub struct RedisStore {
    limits: Limits,
    tuning: RedisTuning,
    link: Link,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("server", &self.link.shown()).finish_non_exhaustive()
    }
}

impl RedisStore {
    /// A store at `url` (`redis://[user:password@]host[:port][/db]`). Connects at the first operation, and again
    /// whenever the connection was lost. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`EcError::Config`] if the URL is not one, needs TLS that was not built in, or the time to live is too
    /// short.
    pub fn new(url: &str, tuning: RedisTuning, limits: &Limits) -> Result<Self, EcError> {
        let link = Link::new(url, &tuning)?;
        if tuning.ttl < Duration::from_secs(1) {
            let reason = format!("objects must live at least a second, not {:?}", tuning.ttl);
            return Err(EcError::Config { setting: link.shown().to_owned(), reason });
        }
        Ok(Self { limits: limits.clone(), tuning, link })
    }

    /// The key of the manifest. Public for drills and tests that break things by hand.
    pub fn manifest_key(key: &ContentKey) -> String {
        format!("triptych:ec:{{{key}}}")
    }

    fn chunk_key(key: &ContentKey, nonce: u128, chunk: usize) -> String {
        format!("triptych:ec:{{{key}}}:{nonce:032x}:c{chunk}")
    }

    async fn run(&self, op: Op, key: &ContentKey, command: Cmd) -> Result<Value, EcError> {
        self.link.run(&command).await.map_err(|e| self.refine(op, Some(key), e))
    }

    fn refine(&self, op: Op, key: Option<&ContentKey>, e: LinkError) -> EcError {
        match (e, key) {
            (LinkError::TimedOut, _) => {
                EcError::TimedOut { store: StoreKind::Redis, op, limit: self.tuning.response_timeout }
            }
            (LinkError::WrongType, Some(key)) => {
                let reason = "the key holds another kind of value";
                EcError::Corrupt { key: *key, source: ObjectError::Frame { reason } }
            }
            (e, _) => EcError::unavailable(StoreKind::Redis, op, e),
        }
    }

    async fn read_manifest(&self, key: &ContentKey) -> Result<Option<(Manifest, Vec<u8>)>, EcError> {
        let raw = match self.run(Op::Get, key, Cmd::get(Self::manifest_key(key))).await? {
            Value::Nil => return Ok(None),
            value => bytes_of(value).map_err(|source| EcError::Corrupt { key: *key, source })?,
        };
        let manifest =
            Manifest::read(&raw, &self.limits).map_err(|source| EcError::Corrupt { key: *key, source })?;
        Ok(Some((manifest, raw)))
    }

    async fn write_chunks(&self, key: &ContentKey, nonce: u128, object: &Bytes) -> Result<(), EcError> {
        let seconds = (self.tuning.ttl + CHUNK_GRACE).as_secs();
        let write = |i: usize| {
            let chunk = object.slice(i * CHUNK_BYTES..object.len().min((i + 1) * CHUNK_BYTES));
            async move {
                let mut set = cmd("SET");
                set.arg(Self::chunk_key(key, nonce, i)).arg(&chunk[..]).arg("EX").arg(seconds);
                self.run(Op::Put, key, set).await.map(drop)
            }
        };
        stream::iter(0..object.len().div_ceil(CHUNK_BYTES))
            .map(write)
            .buffer_unordered(self.tuning.chunks_in_flight.max(1))
            .try_collect()
            .await
    }

    /// The chunks in a row; `None` if one of them is gone.
    async fn read_chunks(&self, key: &ContentKey, manifest: &Manifest) -> Result<Option<Bytes>, EcError> {
        let mut chunks = stream::iter(0..manifest.n_chunks())
            .map(|i| self.run(Op::Get, key, Cmd::get(Self::chunk_key(key, manifest.nonce, i))))
            .buffered(self.tuning.chunks_in_flight.max(1));
        let corrupt = |source| EcError::Corrupt { key: *key, source };
        let mut object = BytesMut::with_capacity(manifest.len);
        while let Some(value) = chunks.try_next().await? {
            if value == Value::Nil {
                return Ok(None);
            }
            let chunk = bytes_of(value).map_err(corrupt)?;
            if chunk.len() != CHUNK_BYTES.min(manifest.len - object.len()) {
                return Err(corrupt(ObjectError::Frame { reason: "a chunk has the wrong length" }));
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
            self.run(Op::Delete, key, unlink).await?;
        }
        Ok(())
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
        if self.run(Op::Put, key, Cmd::exists(&name)).await? != Value::Int(0) {
            return Ok(PutOutcome::AlreadyThere);
        }
        let first_bytes = object.slice(..object.len().min(MAX_HEAD_BYTES));
        let manifest = Manifest { len: object.len(), nonce: nonce(), first_bytes };
        self.write_chunks(key, manifest.nonce, &object).await?;
        let mut set = cmd("SET");
        set.arg(&name).arg(manifest.write()).arg("NX").arg("EX").arg(self.tuning.ttl.as_secs());
        if self.run(Op::Put, key, set).await? != Value::Nil {
            return Ok(PutOutcome::Stored);
        }
        if let Err(e) = self.remove_chunks(key, &manifest).await {
            tracing::debug!(?key, error = %e, "chunks of a lost race are left to expire");
        }
        Ok(PutOutcome::AlreadyThere)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let Some((manifest, raw)) = self.read_manifest(key).await? else { return Ok(None) };
        let object = self.read_chunks(key, &manifest).await?;
        if object.is_none() {
            tracing::warn!(?key, "a chunk is gone; removing the rest of the object");
            self.run(Op::Get, key, remove_if_same(&Self::manifest_key(key), &raw)).await?;
            self.remove_chunks(key, &manifest).await?;
        }
        Ok(object)
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = keys.iter().map(Self::manifest_key).collect();
        let answer = self.link.run(&Cmd::mget(names)).await.map_err(|e| self.refine(Op::Heads, None, e))?;
        let Value::Array(values) = answer else {
            return Err(EcError::unavailable(StoreKind::Redis, Op::Heads, "the answer to MGET is no list"));
        };
        let read = |(key, value): (&ContentKey, Value)| {
            let manifest = Manifest::read(&bytes_of(value).ok()?, &self.limits).ok()?;
            object::probe(&manifest.first_bytes, manifest.len, key, &self.limits).ok()
        };
        let mut heads: Vec<_> = keys.iter().zip(values).map(read).collect();
        heads.resize(keys.len(), None);
        Ok(heads)
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let name = Self::manifest_key(key);
        let removed = match self.read_manifest(key).await {
            Ok(None) => return Ok(false),
            Ok(Some((manifest, raw))) => {
                let removed = self.run(Op::Delete, key, remove_if_same(&name, &raw)).await?;
                self.remove_chunks(key, &manifest).await?;
                removed
            }
            Err(EcError::Corrupt { .. }) => self.run(Op::Delete, key, Cmd::unlink(name)).await?,
            Err(e) => return Err(e),
        };
        Ok(removed != Value::Int(0))
    }

    async fn ping(&self) -> Result<(), EcError> {
        let answer = self.link.run(&cmd("PING")).await;
        answer.map(drop).map_err(|e| self.refine(Op::Ping, None, e))
    }
}

/// Removes a key while it still holds what was read from it: what another writer put there since stays.
fn remove_if_same(name: &str, raw: &[u8]) -> Cmd {
    let script = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) else return 0 end";
    let mut eval = cmd("EVAL");
    eval.arg(script).arg(1).arg(name).arg(raw);
    eval
}

fn bytes_of(value: Value) -> Result<Vec<u8>, ObjectError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        _ => Err(ObjectError::Frame { reason: "the value is no string" }),
    }
}
