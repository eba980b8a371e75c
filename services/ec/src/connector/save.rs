//! How publishing goes: into the store, or onto the shelf with the store's copy following.

use super::load::INLINE_BYTES;
use super::state::lock;
use super::worker::Shared;
use super::{Publish, Published};
use crate::error::{EcError, chain};
use crate::object::{self, ObjectError};
use crate::store::peer::Shelf;
use crate::store::{Op, PutOutcome};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use triptych_core::{ContentKey, EncodedItem, EncoderOutput};

/// The first and the longest pause between two tries to write the store's copy behind.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// An object that is to be published.
struct Parcel {
    item: EncodedItem,
    object: Bytes,
    started: Instant,
}

impl Shared {
    pub(super) async fn save(self: Arc<Self>, output: EncoderOutput) -> Result<Published, EcError> {
        let (started, item) = (Instant::now(), output.item().clone());
        lock(&self.state).local.insert(output.clone());
        self.saved.notify_waiters();
        let mac_keys = self.settings.mac_keys.clone();
        let object = if output.rows().len() <= INLINE_BYTES {
            object::encode_signed(&output, &mac_keys)
        } else {
            let failed = |e| EcError::unavailable(self.store.kind(), Op::Put, e);
            spawn_blocking(move || object::encode_signed(&output, &mac_keys)).await.map_err(failed)?
        };
        self.send(Parcel { item, object, started }).await
    }

    /// Publishes what is still here, unless it is in the store or on its way there.
    pub(super) async fn save_again(self: Arc<Self>, key: &ContentKey) -> Result<Option<Published>, EcError> {
        let started = Instant::now();
        if let Publish::Behind(shelf) = &self.settings.publish
            && let (Some(item), Some(object)) = (shelf.head(key), shelf.object(key))
        {
            let pinned = shelf.is_pinned(key);
            if pinned || matches!(self.store.heads(&[*key]).await?.as_slice(), [Some(_)]) {
                let (outcome, bytes, took) = (PutOutcome::AlreadyThere, object.len(), started.elapsed());
                return Ok(Some(Published { item, outcome, bytes, on_shelf: true, took }));
            }
            return self.send(Parcel { item, object, started }).await.map(Some);
        }
        let Some(output) = lock(&self.state).local.get(key) else { return Ok(None) };
        if let Some(Some(item)) = self.store.heads(&[*key]).await?.pop() {
            let (outcome, bytes) = (PutOutcome::AlreadyThere, output.rows().len());
            let took = started.elapsed();
            return Ok(Some(Published { item, outcome, bytes, on_shelf: false, took }));
        }
        self.save(output).await.map(Some)
    }

    async fn send(self: &Arc<Self>, parcel: Parcel) -> Result<Published, EcError> {
        let bytes = parcel.object.len();
        let Publish::Behind(shelf) = &self.settings.publish else {
            let started = parcel.started;
            let (item, outcome) = self.put(parcel.item, parcel.object).await?;
            return Ok(Published { item, outcome, bytes, on_shelf: false, took: started.elapsed() });
        };
        let stopping = || EcError::unavailable(self.store.kind(), Op::Put, "this worker is stopping");
        let room = shelf.room(bytes).await.ok_or_else(stopping)?;
        let (item, took) = (parcel.item.clone(), parcel.started.elapsed());
        let work = self.clone().write_behind(shelf.clone(), parcel, room);
        self.tasks.spawn_on(work, &self.runtime);
        Ok(Published { item, outcome: PutOutcome::Stored, bytes, on_shelf: true, took })
    }

    /// Puts the object on the shelf at once; the future writes the store's copy, and keeps the object pinned for a while.
    fn write_behind(
        self: Arc<Self>,
        shelf: Arc<Shelf>,
        parcel: Parcel,
        room: OwnedSemaphorePermit,
    ) -> impl Future<Output = ()> {
        let pin = shelf.place(parcel.item.key, parcel.object.clone());
        async move {
            self.keep_putting(parcel, shelf.settings().keep_trying).await;
            drop(room);
            let linger = sleep(shelf.settings().linger);
            self.closing.run_until_cancelled(linger).await;
            drop(pin);
        }
    }

    /// Tries until the store has the object. One that it never takes is a miss once it is off the shelf, and is encoded
    /// again.
    async fn keep_putting(&self, parcel: Parcel, keep_trying: Duration) {
        let Parcel { item, object, .. } = parcel;
        let give_up = Instant::now() + keep_trying;
        let (mut pause, longest) = PAUSES;
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
            let again = e.is_retryable() || matches!(e, EcError::Overloaded { .. });
            if !again || self.closing.is_cancelled() || Instant::now() + pause > give_up {
                tracing::warn!(key = ?item.key, error = %chain(&e), "gave up writing an output behind");
                return;
            }
            sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Puts the object; what is there instead must read as the same item, or makes room for it.
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
            tracing::warn!(key = ?item.key, "what the store holds is not this item; replacing it");
            self.store.quarantine(&item.key).await?;
        }
        let source = ObjectError::Frame { reason: "something else takes its place again and again" };
        Err(EcError::Corrupt { key: item.key, source })
    }
}

/// Everything but the checksum: two encoders may round differently, and each object verifies by itself.
fn is_same(ours: &EncodedItem, found: &EncodedItem) -> bool {
    EncodedItem { checksum: ours.checksum, ..found.clone() } == *ours
}
