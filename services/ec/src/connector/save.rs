//! Publishing an output: write-through to the store, or write-behind from the peer cache.

use super::load::INLINE_BYTES;
use super::types::{Publish, Published};
use super::worker::WorkerState;
use crate::error::{EcError, chain};
use crate::object::{self, ObjectError};
use crate::store::peer::PeerCache;
use crate::store::{Op, PutOutcome};
use crate::traced::beside;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument;
use triptych_core::{Backoff, ContentKey, EncodedItem, EncoderOutput};

/// Pauses between attempts to write the store's copy.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// An object to publish.
struct PendingObject {
    item: EncodedItem,
    object: Bytes,
    started: Instant,
}

impl WorkerState {
    pub(super) async fn save(self: Arc<Self>, output: EncoderOutput) -> Result<Published, EcError> {
        let (started, item) = (Instant::now(), output.item().clone());
        self.state.lock().local.insert(output.clone());
        self.saved.notify_waiters();
        let mac_keys = self.settings.mac_keys.clone();
        let object = if output.rows().len() <= INLINE_BYTES {
            object::encode_signed(&output, &mac_keys)
        } else {
            let failed = |e| EcError::unavailable(self.store.kind(), Op::Put, e);
            spawn_blocking(move || object::encode_signed(&output, &mac_keys)).await.map_err(failed)?
        };
        self.send(PendingObject { item, object, started }).await
    }

    /// Publishes an output again, unless it is in the store or being written there.
    pub(super) async fn save_again(self: Arc<Self>, key: &ContentKey) -> Result<Option<Published>, EcError> {
        let started = Instant::now();
        if let Publish::WriteBehind(peer_cache) = &self.settings.publish
            && let (Some(item), Some(object)) = (peer_cache.head(key), peer_cache.object(key))
        {
            let pinned = peer_cache.is_pinned(key);
            if pinned || matches!(self.store.heads(&[*key]).await?.as_slice(), [Some(_)]) {
                let (outcome, bytes, took) = (PutOutcome::AlreadyThere, object.len(), started.elapsed());
                return Ok(Some(Published { item, outcome, bytes, in_peer_cache: true, took }));
            }
            return self.send(PendingObject { item, object, started }).await.map(Some);
        }
        let Some(output) = self.state.lock().local.get(key) else { return Ok(None) };
        if let Some(Some(item)) = self.store.heads(&[*key]).await?.pop() {
            let (outcome, bytes) = (PutOutcome::AlreadyThere, output.rows().len());
            let took = started.elapsed();
            return Ok(Some(Published { item, outcome, bytes, in_peer_cache: false, took }));
        }
        self.save(output).await.map(Some)
    }

    async fn send(self: &Arc<Self>, pending: PendingObject) -> Result<Published, EcError> {
        let bytes = pending.object.len();
        let Publish::WriteBehind(peer_cache) = &self.settings.publish else {
            let started = pending.started;
            let (item, outcome) = self.put(pending.item, pending.object).await?;
            return Ok(Published { item, outcome, bytes, in_peer_cache: false, took: started.elapsed() });
        };
        let stopping = || EcError::unavailable(self.store.kind(), Op::Put, "this worker is stopping");
        let room = peer_cache.room(bytes).await.ok_or_else(stopping)?;
        let (item, took) = (pending.item.clone(), pending.started.elapsed());
        let work = self.clone().write_behind(peer_cache.clone(), pending, room);
        self.tasks.spawn_on(work, &self.runtime);
        Ok(Published { item, outcome: PutOutcome::Stored, bytes, in_peer_cache: true, took })
    }

    /// Puts the object into the peer cache; the future writes the store's copy, and keeps the object pinned for a
    /// while.
    fn write_behind(
        self: Arc<Self>,
        peer_cache: Arc<PeerCache>,
        pending: PendingObject,
        room: OwnedSemaphorePermit,
    ) -> impl Future<Output = ()> {
        let pin = peer_cache.place(pending.item.key, pending.object.clone());
        // Part of the request's trace, though the request does not wait for it.
        let span = beside("ec write-behind");
        async move {
            self.keep_putting(pending, peer_cache.settings().keep_trying).instrument(span).await;
            drop(room);
            let linger = sleep(peer_cache.settings().linger);
            self.closing.run_until_cancelled(linger).await;
            drop(pin);
        }
    }

    /// Retries until the store has the object. One that it never takes is a miss once the peer cache evicts it, and is
    /// encoded again.
    async fn keep_putting(&self, pending: PendingObject, keep_trying: Duration) {
        let PendingObject { item, object, .. } = pending;
        let give_up = Instant::now() + keep_trying;
        let mut pauses = BACKOFF.pauses();
        loop {
            let limit = self.settings.save_timeout;
            let put = timeout(limit, self.put(item.clone(), object.clone())).await;
            let e = match put.unwrap_or(Err(EcError::TimedOut {
                store: self.store.kind(),
                op: Op::Put,
                limit,
            })) {
                Ok(_) => return,
                Err(e) => e,
            };
            let pause = pauses.next_pause();
            if !e.may_pass() || self.closing.is_cancelled() || Instant::now() + pause > give_up {
                tracing::warn!(key = ?item.key, error = %chain(&e), "write-behind of an output abandoned");
                return;
            }
            sleep(pause).await;
        }
    }

    /// Puts the object. An existing object must be of the same item, or it is quarantined and replaced.
    async fn put(&self, item: EncodedItem, object: Bytes) -> Result<(EncodedItem, PutOutcome), EcError> {
        const ATTEMPTS: u32 = 3;
        for _ in 0..ATTEMPTS {
            if self.store.put_if_absent(&item.key, object.clone()).await? == PutOutcome::Stored {
                return Ok((item, PutOutcome::Stored));
            }
            if let Some(Some(found)) = self.store.heads(&[item.key]).await?.pop()
                && is_same(&item, &found)
            {
                return Ok((found, PutOutcome::AlreadyThere));
            }
            tracing::warn!(key = ?item.key, "the stored object is not of this item; replacing it");
            self.store.quarantine(&item.key).await?;
        }
        let source = ObjectError::Frame { reason: "it is replaced by other objects repeatedly" };
        Err(EcError::Corrupt { key: item.key, source })
    }
}

/// Everything but the checksum: two encoders may round differently, and each object verifies by itself.
fn is_same(ours: &EncodedItem, found: &EncodedItem) -> bool {
    EncodedItem { checksum: ours.checksum, ..found.clone() } == *ours
}
