//! Leases as small objects that are written on condition of what was read.
//!
//! A lease says for how long it was taken; when that time began nobody says, because no two clocks agree. An asker
//! begins to count when it first sees the lease as it is (every renewal changes it), so it waits longer than needed but
//! never takes over what is alive, whatever the clocks show. A lease that was taken long ago by the service's own clock,
//! as far as ours can tell with [`ALLOWANCE`], need not be waited for again. A holder counts from before it asked, so for
//! it the lease always ends first.
//!
//! A lease that is given back stays as an object that says so, and keeps its token; the lifecycle rule removes it. A new
//! one starts at the milliseconds of the clock, above all that were counted up from an earlier start.

use super::BucketStore;
use super::failure::{Failed, is_conflict};
use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Op};
use bytes::Bytes;
use object_store::{ObjectMeta, PutMode, PutOptions, PutPayload, UpdateVersion};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};
use triptych_core::{ContentKey, EncodedItem};

/// How far the service's clock and ours may be apart, with the second that HTTP rounds its times to.
const ALLOWANCE: Duration = Duration::from_secs(3);
/// More than any lease has.
const MAX_LEASE_BYTES: usize = 1 << 10;
/// How often a lease that changes while it is taken is looked at again.
const ATTEMPTS: usize = 3;
/// Above this many, what was seen of leases long ago is forgotten.
const MAX_SEEN: usize = 4096;
/// No lease is taken for longer.
const MAX_TTL: Duration = Duration::from_secs(3600);
/// The first and the longest pause of [`BucketStore::wait_for`].
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// A lease as it lies in the bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    token: u64,
    ttl_ms: u64,
    /// Drawn for each grant, so that a holder whose answer was lost knows its own.
    holder: String,
    /// Grows with each renewal, so that each has another entity tag.
    renewals: u64,
    /// Given back.
    free: bool,
}

struct Found {
    record: Record,
    version: UpdateVersion,
    age: Duration,
}

impl Found {
    /// Time left, unless anyone may take it.
    fn left(&self) -> Option<Duration> {
        let ttl = Duration::from_millis(self.record.ttl_ms).min(MAX_TTL);
        ttl.checked_sub(self.age).filter(|left| !self.record.free && !left.is_zero())
    }
}

/// What this process remembers of leases, by its own clock.
#[derive(Debug, Default)]
pub(super) struct Clocks(Mutex<Memory>);

#[derive(Debug, Default)]
struct Memory {
    /// The entity tag of each lease that was seen, and since when it is that.
    seen: HashMap<ContentKey, (Option<String>, Instant)>,
    /// Until when the leases that were granted here last.
    granted: HashMap<ContentKey, (u64, Instant)>,
}

impl Clocks {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long the lease of a key has certainly been as it is.
    fn age(&self, key: &ContentKey, meta: &ObjectMeta) -> Duration {
        let now = Instant::now();
        let mut memory = self.memory();
        if memory.seen.len() > MAX_SEEN {
            memory.seen.retain(|_, (_, since)| now.duration_since(*since) < MAX_TTL);
        }
        let (tag, since) = memory.seen.entry(*key).or_insert_with(|| (meta.e_tag.clone(), now));
        if *tag != meta.e_tag {
            (*tag, *since) = (meta.e_tag.clone(), now);
        }
        let by_service = SystemTime::now().duration_since(meta.last_modified.into()).unwrap_or_default();
        now.duration_since(*since).max(by_service.saturating_sub(ALLOWANCE))
    }

    fn forget(&self, key: &ContentKey) {
        let mut memory = self.memory();
        memory.seen.remove(key);
        memory.granted.remove(key);
    }

    fn granted(&self, lease: &EncodeLease, until: Instant) {
        let mut memory = self.memory();
        if memory.granted.len() > MAX_SEEN {
            let now = Instant::now();
            memory.granted.retain(|_, (_, until)| *until > now);
        }
        memory.granted.insert(lease.key, (lease.token, until));
    }

    /// Whether a lease that was granted here has ended; one of another process is asked for at the service only.
    fn has_ended(&self, lease: &EncodeLease) -> bool {
        let granted = self.memory().granted.get(&lease.key).copied();
        granted.is_some_and(|(token, until)| token == lease.token && until <= Instant::now())
    }
}

impl BucketStore {
    pub(super) async fn take_lease(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, Failed> {
        let (start, ttl) = (Instant::now(), ttl.min(MAX_TTL));
        let holder = format!("{:032x}", crate::store::nonce());
        let record =
            |token| Record { token, ttl_ms: millis(ttl), holder: holder.clone(), renewals: 0, free: false };
        let grant = |token| {
            let lease = EncodeLease { key: *key, token };
            self.clocks.granted(&lease, start + ttl);
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
        // Others took it in between, each time.
        Ok(Acquired::Held { left: ttl })
    }

    pub(super) async fn keep_lease(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, Failed> {
        let (start, ttl) = (Instant::now(), ttl.min(MAX_TTL));
        if self.clocks.has_ended(lease) {
            return Ok(false);
        }
        let changed = |record: &Record| Record {
            ttl_ms: millis(ttl),
            renewals: record.renewals.saturating_add(1),
            ..record.clone()
        };
        let kept = self.change_lease(lease, changed).await?;
        if kept {
            self.clocks.granted(lease, start + ttl);
        }
        Ok(kept)
    }

    pub(super) async fn give_lease_back(&self, lease: &EncodeLease) -> Result<bool, Failed> {
        let ended = self.clocks.has_ended(lease);
        let released = self.change_lease(lease, |record| Record { free: true, ..record.clone() }).await?;
        self.clocks.forget(&lease.key);
        Ok(released && !ended)
    }

    /// See [`EcStore::wait`]: asks with growing pauses for the object and for its lease.
    pub(super) async fn wait_for(
        &self,
        key: &ContentKey,
        patience: Duration,
    ) -> Result<Option<EncodedItem>, EcError> {
        let until = Instant::now() + patience;
        let (mut pause, longest) = PAUSES;
        loop {
            let lease = self.within(Op::Wait, self.read_lease(key)).await?;
            // After the lease: what its last holder stored before giving it back is seen.
            if let Some(Some(item)) = self.heads(std::slice::from_ref(key)).await?.pop() {
                return Ok(Some(item));
            }
            let left = until.saturating_duration_since(Instant::now());
            let held = lease.and_then(|found| found.left());
            let Some(ends) = held.filter(|_| !left.is_zero()) else { return Ok(None) };
            sleep(pause.min(left).min(ends)).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Changes the record of a lease that is still its holder's.
    async fn change_lease(
        &self,
        lease: &EncodeLease,
        change: impl Fn(&Record) -> Record + Send,
    ) -> Result<bool, Failed> {
        let mut wanted = None;
        for _ in 0..ATTEMPTS {
            let Some(found) = self.read_lease(&lease.key).await? else { return Ok(false) };
            if wanted.as_ref() == Some(&found.record) {
                // The answer was lost, but it is done.
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

    async fn read_lease(&self, key: &ContentKey) -> Result<Option<Found>, Failed> {
        let name = self.names.lease(key);
        let Some((bytes, meta)) = self.first_bytes_and_meta(&name, MAX_LEASE_BYTES).await? else {
            return Ok(None);
        };
        let age = self.clocks.age(key, &meta);
        // What is no lease is as good as one that was given back, and has had any token.
        let record = serde_json::from_slice(&bytes).unwrap_or_else(|_| Record {
            token: since_epoch_ms(),
            ttl_ms: 0,
            holder: String::new(),
            renewals: 0,
            free: true,
        });
        let version = UpdateVersion { e_tag: meta.e_tag, version: meta.version };
        Ok(Some(Found { record, version, age }))
    }

    /// Whether it was written, or the condition did not hold.
    async fn write_lease(&self, key: &ContentKey, record: &Record, mode: PutMode) -> Result<bool, Failed> {
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

/// By the clock of this machine: a start for counting tokens, nothing that is compared.
fn since_epoch_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, millis).max(1)
}
