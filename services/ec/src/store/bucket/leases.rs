//! Leases as small objects, updated by conditional writes.
//!
//! A lease records its duration but not its start, because clocks differ: every renewal changes the object, and whoever
//! looks counts how long it did not change ([`crate::store::lease_clock`]).
//!
//! A released lease stays as an object that is marked free and keeps its token; the lifecycle rule removes it. A new
//! one starts at the milliseconds of the clock, above all tokens counted from an earlier start.

use super::BucketStore;
use super::failure::{BucketError, is_conflict};
use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::lease_clock::MAX_TTL;
use crate::store::{EcStore, Op};
use bytes::Bytes;
use object_store::{PutMode, PutOptions, PutPayload, UpdateVersion};
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};
use triptych_core::{Backoff, ContentKey, EncodedItem};

/// Largest lease object in bytes.
const MAX_LEASE_BYTES: usize = 1 << 10;
/// Attempts to acquire a lease that changes concurrently.
const ATTEMPTS: usize = 3;
/// Pauses between polls of [`BucketStore::wait_for`].
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));

/// A lease object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LeaseRecord {
    token: u64,
    ttl_ms: u64,
    /// Random for each grant, so that a holder recognizes its own after a lost reply.
    holder: String,
    /// Grows with each renewal, so that each has another entity tag.
    renewals: u64,
    /// Released.
    free: bool,
}

struct FoundLease {
    record: LeaseRecord,
    version: UpdateVersion,
    age: Duration,
}

impl FoundLease {
    /// Time left; `None` if it is free or expired.
    fn left(&self) -> Option<Duration> {
        let ttl = Duration::from_millis(self.record.ttl_ms).min(MAX_TTL);
        ttl.checked_sub(self.age).filter(|left| !self.record.free && !left.is_zero())
    }
}

impl BucketStore {
    pub(super) async fn take_lease(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, BucketError> {
        let (start, ttl) = (Instant::now(), ttl.min(MAX_TTL));
        let holder = format!("{:032x}", crate::store::nonce());
        let record = |token| LeaseRecord {
            token,
            ttl_ms: millis(ttl),
            holder: holder.clone(),
            renewals: 0,
            free: false,
        };
        let grant = |token| {
            let lease = EncodeLease { key: *key, token };
            self.lease_clock.granted(&lease, start + ttl, start);
            Ok(Acquired::Granted(lease))
        };
        // Most keys were never leased before.
        let new = record(since_epoch_ms());
        if self.write_lease(key, &new, PutMode::Create).await? {
            return grant(new.token);
        }
        for _ in 0..ATTEMPTS {
            let Some(found) = self.read_lease(key).await? else {
                let new = record(since_epoch_ms());
                if self.write_lease(key, &new, PutMode::Create).await? {
                    return grant(new.token);
                }
                continue;
            };
            if found.record.holder == holder {
                // The answer was lost, and what was asked again found itself.
                return grant(found.record.token);
            }
            if let Some(left) = found.left() {
                return Ok(Acquired::Held { left });
            }
            let next = record(found.record.token.saturating_add(1));
            if self.write_lease(key, &next, PutMode::Update(found.version)).await? {
                return grant(next.token);
            }
        }
        // Others acquired it between the read and the write each time.
        Ok(Acquired::Held { left: ttl })
    }

    pub(super) async fn keep_lease(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, BucketError> {
        let (start, ttl) = (Instant::now(), ttl.min(MAX_TTL));
        if self.lease_clock.has_ended(lease, Instant::now()) {
            return Ok(false);
        }
        let changed = |record: &LeaseRecord| LeaseRecord {
            ttl_ms: millis(ttl),
            renewals: record.renewals.saturating_add(1),
            ..record.clone()
        };
        let kept = self.change_lease(lease, changed).await?;
        if kept {
            self.lease_clock.granted(lease, start + ttl, start);
        }
        Ok(kept)
    }

    pub(super) async fn give_lease_back(&self, lease: &EncodeLease) -> Result<bool, BucketError> {
        let ended = self.lease_clock.has_ended(lease, Instant::now());
        let released =
            self.change_lease(lease, |record| LeaseRecord { free: true, ..record.clone() }).await?;
        self.lease_clock.forget(&lease.key);
        Ok(released && !ended)
    }

    /// See [`EcStore::wait`]: polls the object and its lease with growing pauses.
    pub(super) async fn wait_for(
        &self,
        key: &ContentKey,
        patience: Duration,
    ) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        let mut pauses = BACKOFF.pauses();
        loop {
            let lease = self.within(Op::Wait, self.read_lease(key)).await?;
            // Read after the lease, so that an object stored before the release is seen.
            if let Some(Some(item)) = self.heads(std::slice::from_ref(key)).await?.pop() {
                return Ok(Some(item));
            }
            let left = until.saturating_duration_since(Instant::now());
            let held = lease.and_then(|found| found.left());
            let Some(ends) = held.filter(|_| !left.is_zero()) else { return Ok(None) };
            sleep(pauses.next_pause().min(left).min(ends)).await;
        }
    }

    /// Updates the record of a lease if this holder still has it.
    async fn change_lease(
        &self,
        lease: &EncodeLease,
        change: impl Fn(&LeaseRecord) -> LeaseRecord + Send,
    ) -> Result<bool, BucketError> {
        let mut wanted = None;
        for _ in 0..ATTEMPTS {
            let Some(found) = self.read_lease(&lease.key).await? else { return Ok(false) };
            if wanted.as_ref() == Some(&found.record) {
                // The reply was lost, but the write took place.
                return Ok(true);
            }
            if found.record.token != lease.token || found.record.free {
                return Ok(false);
            }
            let record = change(&found.record);
            if self.write_lease(&lease.key, &record, PutMode::Update(found.version)).await? {
                return Ok(true);
            }
            wanted = Some(record);
        }
        Ok(false)
    }

    async fn read_lease(&self, key: &ContentKey) -> Result<Option<FoundLease>, BucketError> {
        let name = self.names.lease(key);
        let Some((bytes, meta)) = self.first_bytes_and_meta(&name, MAX_LEASE_BYTES).await? else {
            return Ok(None);
        };
        let by_service = SystemTime::now().duration_since(meta.last_modified.into()).unwrap_or_default();
        let age = self.lease_clock.age(key, meta.e_tag.clone(), by_service, Instant::now());
        // A malformed object counts as a free lease with an unknown token.
        let record = serde_json::from_slice(&bytes).unwrap_or_else(|_| LeaseRecord {
            token: since_epoch_ms(),
            ttl_ms: 0,
            holder: String::new(),
            renewals: 0,
            free: true,
        });
        let version = UpdateVersion { e_tag: meta.e_tag, version: meta.version };
        Ok(Some(FoundLease { record, version, age }))
    }

    /// True if it was written; false if the condition failed.
    async fn write_lease(
        &self,
        key: &ContentKey,
        record: &LeaseRecord,
        mode: PutMode,
    ) -> Result<bool, BucketError> {
        let bytes = Bytes::from(serde_json::to_vec(record).expect("numbers and text always serialize"));
        let options = PutOptions { mode, ..PutOptions::default() };
        match self.backend.put_opts(&self.names.lease(key), PutPayload::from(bytes), options).await {
            Ok(_) => Ok(true),
            Err(e) if is_conflict(&e) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds of this machine's clock, as a start for tokens.
fn since_epoch_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, millis).max(1)
}
