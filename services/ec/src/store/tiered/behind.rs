//! Writes beside the caller: copies of objects on their way to other tiers, within a bound on their number and bytes.
//!
//! Each is a task of its own that waits for its turn, tries, pauses and tries again. It can be revoked while it is not
//! in the middle of a try: whoever deletes an object must not find it written again a moment later.

use super::TierState;
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use triptych_core::ContentKey;

use crate::error::{EcError, chain};
use crate::store::Op;

/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Bounds of the writes beside the callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BehindBounds {
    /// Objects that wait or are being written. Default 4096.
    pub entries: usize,
    /// Their bytes together. Default 512 MiB.
    pub bytes: usize,
    /// Written at once. Default 8; 0 is read as 1.
    pub at_once: usize,
    /// How long a write is tried again before it is given up. Default 60 s; zero: one try.
    pub keep_trying: Duration,
}

impl Default for BehindBounds {
    fn default() -> Self {
        Self { entries: 4096, bytes: 512 << 20, at_once: 8, keep_trying: Duration::from_secs(60) }
    }
}

/// One copy to be written.
pub(super) struct Copy {
    pub(super) key: ContentKey,
    pub(super) object: Bytes,
    pub(super) tier: Arc<TierState>,
}

/// The writes under way.
pub(super) struct Behind(Arc<Shared>);

struct Shared {
    bounds: BehindBounds,
    turns: Semaphore,
    jobs: Mutex<Jobs>,
    /// Told whenever a job ends.
    ended: Notify,
}

#[derive(Default)]
struct Jobs {
    under_way: HashMap<(ContentKey, usize), Job>,
    /// Of the objects under way.
    bytes: usize,
}

struct Job {
    object: Bytes,
    revoked: CancellationToken,
}

/// A place among the jobs; given back however the task ends.
struct Place {
    shared: Arc<Shared>,
    id: (ContentKey, usize),
    revoked: CancellationToken,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut jobs = self.shared.jobs();
        if let Some(job) = jobs.under_way.remove(&self.id) {
            jobs.bytes = jobs.bytes.saturating_sub(job.object.len());
        }
        drop(jobs);
        self.shared.ended.notify_waiters();
    }
}

impl Behind {
    pub(super) fn new(bounds: BehindBounds) -> Self {
        let turns = Semaphore::new(bounds.at_once.clamp(1, Semaphore::MAX_PERMITS));
        Self(Arc::new(Shared { bounds, turns, jobs: Mutex::default(), ended: Notify::new() }))
    }

    /// Takes a copy, unless there is no room: then it is the caller's again. One that is on its way already is not
    /// taken twice.
    pub(super) fn push(&self, copy: Copy) -> Result<(), Copy> {
        let id = (copy.key, copy.tier.place);
        let revoked = CancellationToken::new();
        let mut jobs = self.0.jobs();
        if jobs.under_way.contains_key(&id) {
            return Ok(());
        }
        let bytes = jobs.bytes.saturating_add(copy.object.len());
        if jobs.under_way.len() >= self.0.bounds.entries || bytes > self.0.bounds.bytes {
            return Err(copy);
        }
        jobs.bytes = bytes;
        jobs.under_way.insert(id, Job { object: copy.object.clone(), revoked: revoked.clone() });
        drop(jobs);
        let place = Place { shared: self.0.clone(), id, revoked };
        tokio::spawn(place.work(copy));
        Ok(())
    }

    /// Stops the writes of a key, or only those of these very bytes, and waits for those in the middle of a try.
    pub(super) async fn revoke(&self, key: &ContentKey, only: Option<&Bytes>) {
        loop {
            let ended = self.0.ended.notified();
            let mut n = 0;
            for ((of, _), job) in &self.0.jobs().under_way {
                if of == key && only.is_none_or(|bytes| *bytes == job.object) {
                    job.revoked.cancel();
                    n += 1;
                }
            }
            if n == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Waits until nothing is under way. False: the time is up before.
    pub(super) async fn flush(&self, until: Instant) -> bool {
        loop {
            let ended = self.0.ended.notified();
            if self.0.jobs().under_way.is_empty() {
                return true;
            }
            if timeout_at(until, ended).await.is_err() {
                return false;
            }
        }
    }

    /// Objects under way and their bytes.
    pub(super) fn under_way(&self) -> (usize, usize) {
        let jobs = self.0.jobs();
        (jobs.under_way.len(), jobs.bytes)
    }
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    async fn work(self, copy: Copy) {
        let give_up = Instant::now() + self.shared.bounds.keep_trying;
        let (mut pause, longest) = PAUSES;
        loop {
            let turn = self.revoked.run_until_cancelled(self.shared.turns.acquire()).await;
            let Some(Ok(turn)) = turn else { return };
            let put = copy.tier.ask(Op::Put, copy.tier.store.put_if_absent(&copy.key, copy.object.clone()));
            let e = match put.await {
                Ok(_) => return,
                Err(e) => e,
            };
            drop(turn);
            let again = e.is_retryable() || matches!(e, EcError::Overloaded { .. });
            if !again || Instant::now() + pause > give_up {
                let tier = copy.tier.store.describe();
                tracing::warn!(key = ?copy.key, tier, error = %chain(&e), "gave up writing a copy behind");
                return;
            }
            if self.revoked.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
            pause = (pause * 2).min(longest);
        }
    }
}
