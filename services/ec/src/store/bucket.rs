//! Objects in a bucket of S3 or a compatible service, Google Cloud Storage, or Azure Blob Storage.
//!
//! **Names.** `ROOT/v1/ab/HEX` holds the object of a key, a safetensors file. There are also `ROOT/leases/…`,
//! `ROOT/tmp/…` (uploads in progress), `ROOT/quarantine/…` and `ROOT/probe/…`. `ROOT` is the setting's prefix,
//! and with a tenant `PREFIX/tenant=T`.
//!
//! **First wins** by conditional writes (`If-None-Match: *`), which every service named above has; before the first put
//! a probe writes twice, and a service that ignores the condition is refused. A small object is one conditional put. A
//! large one is uploaded in parts under a temporary name, since completing a multipart upload overwrites, and then
//! copied to its name with a condition; where a service cannot do that, it is one conditional put too.
//!
//! **Consistency.** A large object is read in concurrent ranges, all conditional on the first one's entity tag, so they
//! are of one object even if it is replaced concurrently.
//!
//! **Eviction.** The store evicts nothing; the bucket's lifecycle rules do: expire `ROOT/` after some days, the life of
//! an object, and abort incomplete uploads after one. `deploy/README.md` has both rules.
//!
//! Not for buckets that list their names in no order (S3 Express): [`EcStore::list`] pages in the order of the names.

mod conditional;
mod connect;
mod failure;
mod get;
mod leases;
mod names;
mod put;
mod setting;
mod tuning;

pub use setting::{BucketService, BucketSetting};
pub use tuning::BucketTuning;

use super::lease::{Acquired, EncodeLease};
use super::lease_clock::LeaseClock;
use super::{EcStore, Listed, Op, PutOutcome, StoreKind, check_size};
use crate::error::EcError;
use crate::object::{self, MAX_HEAD_BYTES};
use async_trait::async_trait;
use bytes::Bytes;
use conditional::ConditionalWrites;
use failure::{BucketError, is_not_found, refused_credentials};
use futures::{StreamExt, TryStreamExt, stream};
use names::Names;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// The store in a bucket.
pub struct BucketStore {
    backend: Arc<dyn ObjectStore>,
    names: Names,
    shown: String,
    limits: Limits,
    tuning: BucketTuning,
    /// Support for conditional writes, once probed.
    conditional: OnceCell<ConditionalWrites>,
    /// By entity tag.
    lease_clock: LeaseClock<Option<String>>,
}

impl fmt::Debug for BucketStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BucketStore").field("bucket", &self.shown).finish_non_exhaustive()
    }
}

impl BucketStore {
    /// The store of `setting`, with credentials from `environment`: the variables that each service's own tools read,
    /// `AWS_*`, `GOOGLE_*`, `AZURE_*`. An unreachable service is not an error. Must be called inside a tokio
    /// runtime.
    ///
    /// # Errors
    /// [`EcError::Config`] for a malformed variable, credentials that the service refuses, or a service without
    /// conditional writes.
    pub async fn open(
        setting: &BucketSetting,
        environment: impl IntoIterator<Item = (String, String)>,
        tuning: BucketTuning,
        limits: &Limits,
    ) -> Result<Self, EcError> {
        let environment: Vec<_> = environment.into_iter().collect();
        let backend = connect::connect(setting, &environment, &tuning)?;
        let names = Names::new(setting.prefix(), setting.tenant());
        let store = Self::over(backend, names, setting.to_string(), (tuning, limits.clone()));
        match store.conditional_writes(Op::Ping).await {
            Err(e @ EcError::Config { .. }) => return Err(e),
            Err(e) if let Some(code) = refused_credentials(&e) => {
                let variables = setting.service().credentials();
                let reason = format!(
                    "the service refuses the credentials ({code}); check {variables}, and this machine's clock"
                );
                return Err(EcError::Config { setting: setting.to_string(), reason });
            }
            // It may become reachable later, or this process may only read; the first put probes again.
            Err(e) => {
                tracing::info!(store = store.shown, error = %crate::error::chain(&e), "the bucket was not probed")
            }
            Ok(_) => {}
        }
        Ok(store)
    }

    /// The store over any implementation of the crate's trait, under `prefix`.
    pub fn new(backend: Arc<dyn ObjectStore>, prefix: &str, tuning: BucketTuning, limits: &Limits) -> Self {
        let shown = format!("{backend}/{prefix}");
        Self::over(backend, Names::new(prefix, None), shown, (tuning, limits.clone()))
    }

    fn over(
        backend: Arc<dyn ObjectStore>,
        names: Names,
        shown: String,
        (tuning, limits): (BucketTuning, Limits),
    ) -> Self {
        Self {
            backend,
            names,
            shown,
            limits,
            tuning,
            conditional: OnceCell::new(),
            lease_clock: LeaseClock::default(),
        }
    }

    /// The name of a key's object in the bucket, whether or not there is one. For operators, drills and tests.
    pub fn name_of(&self, key: &ContentKey) -> String {
        self.names.object(key).to_string()
    }

    /// Runs an operation within its timeout.
    async fn within<T>(
        &self,
        op: Op,
        work: impl Future<Output = Result<T, BucketError>> + Send,
    ) -> Result<T, EcError> {
        let limit = match op {
            Op::Put | Op::Get => self.tuning.transfer_timeout,
            // A few requests, one after the other.
            _ => self.tuning.response_timeout * 2,
        };
        match timeout(limit, work).await {
            Ok(done) => done.map_err(|e| e.refine(op, self.tuning.response_timeout)),
            Err(_) => Err(EcError::TimedOut { store: StoreKind::Object, op, limit }),
        }
    }

    /// Support for conditional writes; probed the first time.
    async fn conditional_writes(&self, op: Op) -> Result<ConditionalWrites, EcError> {
        let ask = self
            .conditional
            .get_or_try_init(|| conditional::probe(&*self.backend, [self.names.probe(), self.names.probe()]));
        let conditional = *self.within(op, ask).await?;
        if conditional.first_wins {
            return Ok(conditional);
        }
        let reason = "the service ignores conditional writes (If-None-Match, If-Match), without which two writers of a \
                      key cannot be told apart; AWS S3, Google Cloud Storage, Azure, R2, MinIO, SeaweedFS and Ceph have them";
        Err(EcError::Config { setting: self.shown.clone(), reason: reason.into() })
    }

    async fn remove(&self, key: &ContentKey) -> Result<bool, BucketError> {
        let name = self.names.object(key);
        // S3 reports every deletion as successful.
        match self.backend.head(&name).await {
            Err(e) if is_not_found(&e) => return Ok(false),
            other => other?,
        };
        match self.backend.delete(&name).await {
            Err(e) if is_not_found(&e) => Ok(false),
            other => Ok(other.map(|()| true)?),
        }
    }

    async fn set_aside(&self, key: &ContentKey) -> Result<bool, BucketError> {
        let aside = self.names.quarantined(key);
        match self.backend.copy(&self.names.object(key), &aside).await {
            Err(e) if is_not_found(&e) => return Ok(false),
            // The copy only helps the operator; the removal is what matters.
            Err(e) => {
                tracing::warn!(?key, error = %e, "an object that does not verify is removed without a copy in quarantine")
            }
            Ok(()) => {}
        }
        self.remove(key).await
    }

    /// Metadata of an object; `None` if there is none or it is malformed.
    async fn head(&self, key: &ContentKey) -> Result<Option<EncodedItem>, BucketError> {
        let Some((first_bytes, len)) = self.first_bytes(&self.names.object(key), MAX_HEAD_BYTES).await?
        else {
            return Ok(None);
        };
        Ok(object::probe(&first_bytes, len, key, &self.limits).ok())
    }

    async fn heads_of(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, BucketError> {
        let heads: Vec<_> = keys.iter().map(|key| self.head(key)).collect();
        stream::iter(heads).buffered(self.tuning.heads_in_flight.max(1)).try_collect().await
    }

    async fn page(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, BucketError> {
        let prefix = self.names.objects();
        let all = match after {
            Some(key) => self.backend.list_with_offset(Some(&prefix), &self.names.object(key)),
            None => self.backend.list(Some(&prefix)),
        };
        let listed = |meta: ObjectMeta| {
            let key = self.names.key_of(&meta.location)?;
            Some(Listed { key, len: meta.size, stored: Some(meta.last_modified.into()) })
        };
        // A service that does not know where a list starts begins at the first name.
        let listed = |meta| listed(meta).filter(|listed| after < Some(&listed.key));
        let page = all.try_filter_map(|meta| futures::future::ready(Ok(listed(meta))));
        Ok(page.take(limit).try_collect().await?)
    }

    /// Lists names after every object: an existing bucket with list permission returns none.
    async fn probe_list(&self) -> Result<(), BucketError> {
        let mut nothing =
            self.backend.list_with_offset(Some(&self.names.objects()), &self.names.after_all_objects());
        match nothing.next().await {
            Some(Err(e)) => Err(e.into()),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl EcStore for BucketStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Object
    }

    fn describe(&self) -> String {
        self.shown.clone()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        let conditional = self.conditional_writes(Op::Put).await?;
        self.within(Op::Put, self.put(&self.names.object(key), object, conditional)).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let read = self.within(Op::Get, self.read(&self.names.object(key))).await?;
        read.map_err(|source| EcError::Corrupt { key: *key, source })
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        self.within(Op::Heads, self.heads_of(keys)).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.within(Op::Delete, self.remove(key)).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.within(Op::Quarantine, self.set_aside(key)).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.within(Op::Ping, self.probe_list()).await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        self.conditional_writes(Op::Lease).await?;
        self.within(Op::Lease, self.take_lease(key, ttl)).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.within(Op::Lease, self.keep_lease(lease, ttl)).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.within(Op::Lease, self.give_lease_back(lease)).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        self.wait_for(key, patience).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.within(Op::List, self.page(after, limit)).await
    }
}
