//! Write-behind: background copies of objects to other tiers, with bounds on their number and bytes.
//!
//! Each copy is a task of its own that waits for a permit, writes, and retries with backoff. It can be revoked between
//! two attempts, so that a deleted object is not written again a moment later.

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

use crate::error::chain;
use crate::store::Op;

/// Pauses between attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));

/// Bounds of pending copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteBehindBounds {
    /// Most pending copies. Default 4096.
    pub entries: usize,
    /// Most bytes of pending copies. Default 512 MiB.
    pub bytes: usize,
    /// Concurrent writes. Default 8; 0 is read as 1.
    pub at_once: usize,
    /// Time after which a failing write is abandoned. Default 60 s; zero: one attempt.
    pub keep_trying: Duration,
}

impl Default for WriteBehindBounds {
    fn default() -> Self {
        Self { entries: 4096, bytes: 512 << 20, at_once: 8, keep_trying: Duration::from_secs(60) }
    }
}

/// A copy to write.
pub(super) struct PendingCopy {
    pub(super) key: ContentKey,
    pub(super) object: Bytes,
    pub(super) tier: Arc<TierState>,
}

/// The pending copies.
pub(super) struct WriteBehind(Arc<WriteBehindState>);

struct WriteBehindState {
    bounds: WriteBehindBounds,
    turns: Semaphore,
    copies: Mutex<PendingCopies>,
    /// Notified whenever a copy ends.
    ended: Notify,
}

#[derive(Default)]
struct PendingCopies {
    by_id: HashMap<(ContentKey, usize), PendingEntry>,
    /// Bytes of all pending copies.
    bytes: usize,
}

struct PendingEntry {
    object: Bytes,
    revoked: CancellationToken,
}

/// Task of a pending copy; dropping it removes the entry.
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

    /// Takes a copy, or returns it if there is no capacity. A copy that is pending already is not taken twice.
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
        // Not in a drain's task group: the drain calls [`Self::flush`], which waits for these tasks within its timeout.
        tokio::spawn(task.work(copy));
        Ok(())
    }

    /// Revokes the copies of a key, or only those with exactly these bytes, and waits for writes in progress.
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

    /// Waits until no copy is pending. False: at the deadline some are.
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

    /// Number of pending copies and their bytes.
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
            if !e.may_pass() || Instant::now() + pause > give_up {
                let tier = copy.tier.store.describe();
                tracing::warn!(key = ?copy.key, tier, error = %chain(&e), "write-behind copy abandoned");
                return;
            }
            if self.revoked.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
        }
    }
}
