//! Writes beside the caller: copies of objects on their way to other tiers, within a bound on their number and bytes.
//!
//! Each is a task of its own that waits for its turn, tries, pauses and tries again. It can be revoked while it is not
//! in the middle of a try: whoever deletes an object must not find it written again a moment later.

use super::tier::TierState;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use triptych_core::{Backoff, ContentKey};

use crate::error::{EcError, chain};
use crate::store::Op;

/// Pauses between attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));

/// Bounds of the writes beside the callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteBehindBounds {
    /// Objects that wait or are being written. Default 4096.
    pub entries: usize,
    /// Their bytes together. Default 512 MiB.
    pub bytes: usize,
    /// Written at once. Default 8; 0 is read as 1.
    pub at_once: usize,
    /// How long a write is tried again before it is given up. Default 60 s; zero: one try.
    pub keep_trying: Duration,
}

impl Default for WriteBehindBounds {
    fn default() -> Self {
        Self { entries: 4096, bytes: 512 << 20, at_once: 8, keep_trying: Duration::from_secs(60) }
    }
}

/// One copy to be written.
pub(super) struct PendingCopy {
    pub(super) key: ContentKey,
    pub(super) object: Bytes,
    pub(super) tier: Arc<TierState>,
}

/// The writes under way.
pub(super) struct WriteBehind(Arc<WriteBehindState>);

struct WriteBehindState {
    bounds: WriteBehindBounds,
    turns: Semaphore,
    copies: Mutex<PendingCopies>,
    /// Told whenever a entry ends.
    ended: Notify,
}

#[derive(Default)]
struct PendingCopies {
    by_id: HashMap<(ContentKey, usize), PendingEntry>,
    /// Of the objects under way.
    bytes: usize,
}

struct PendingEntry {
    object: Bytes,
    revoked: CancellationToken,
}

/// A task among the copies; given back however the task ends.
struct CopyTask {
    shared: Arc<WriteBehindState>,
    id: (ContentKey, usize),
    revoked: CancellationToken,
}

impl Drop for CopyTask {
    fn drop(&mut self) {
        let mut copies = self.shared.copies();
        if let Some(entry) = copies.by_id.remove(&self.id) {
            copies.bytes = copies.bytes.saturating_sub(entry.object.len());
        }
        drop(copies);
        self.shared.ended.notify_waiters();
    }
}

impl WriteBehind {
    pub(super) fn new(bounds: WriteBehindBounds) -> Self {
        let turns = Semaphore::new(bounds.at_once.clamp(1, Semaphore::MAX_PERMITS));
        Self(Arc::new(WriteBehindState { bounds, turns, copies: Mutex::default(), ended: Notify::new() }))
    }

    /// Takes a copy, unless there is no room: then it is the caller's again. One that is on its way already is not
    /// taken twice.
    pub(super) fn push(&self, copy: PendingCopy) -> Result<(), PendingCopy> {
        let id = (copy.key, copy.tier.tier_idx);
        let revoked = CancellationToken::new();
        let mut copies = self.0.copies();
        if copies.by_id.contains_key(&id) {
            return Ok(());
        }
        let bytes = copies.bytes.saturating_add(copy.object.len());
        if copies.by_id.len() >= self.0.bounds.entries || bytes > self.0.bounds.bytes {
            return Err(copy);
        }
        copies.bytes = bytes;
        copies.by_id.insert(id, PendingEntry { object: copy.object.clone(), revoked: revoked.clone() });
        drop(copies);
        let task = CopyTask { shared: self.0.clone(), id, revoked };
        tokio::spawn(task.work(copy));
        Ok(())
    }

    /// Stops the writes of a key, or only those of these very bytes, and waits for those in the middle of a try.
    pub(super) async fn revoke(&self, key: &ContentKey, only: Option<&Bytes>) {
        loop {
            let ended = self.0.ended.notified();
            let mut n = 0;
            for ((of, _), entry) in &self.0.copies().by_id {
                if of == key && only.is_none_or(|bytes| *bytes == entry.object) {
                    entry.revoked.cancel();
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
            if self.0.copies().by_id.is_empty() {
                return true;
            }
            if timeout_at(until, ended).await.is_err() {
                return false;
            }
        }
    }

    /// Objects under way and their bytes.
    pub(super) fn pending(&self) -> (usize, usize) {
        let copies = self.0.copies();
        (copies.by_id.len(), copies.bytes)
    }
}

impl WriteBehindState {
    fn copies(&self) -> MutexGuard<'_, PendingCopies> {
        self.copies.lock()
    }
}

impl CopyTask {
    async fn work(self, copy: PendingCopy) {
        let give_up = Instant::now() + self.shared.bounds.keep_trying;
        let mut pauses = BACKOFF.pauses();
        loop {
            let turn = self.revoked.run_until_cancelled(self.shared.turns.acquire()).await;
            let Some(Ok(turn)) = turn else { return };
            let put = copy.tier.ask(Op::Put, copy.tier.store.put_if_absent(&copy.key, copy.object.clone()));
            let e = match put.await {
                Ok(_) => return,
                Err(e) => e,
            };
            drop(turn);
            let pause = pauses.next_pause();
            let again = e.is_retryable() || matches!(e, EcError::Overloaded { .. });
            if !again || Instant::now() + pause > give_up {
                let tier = copy.tier.store.describe();
                tracing::warn!(key = ?copy.key, tier, error = %chain(&e), "gave up writing a copy behind");
                return;
            }
            if self.revoked.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
        }
    }
}
