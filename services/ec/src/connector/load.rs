//! Loading an item: from the hinted peers, then from the store; repeated while the item is in encoding.
//!
//! Only objects that do not verify, or are of another key or encoder, are removed from the store. A difference from the
//! announced metadata is for the request to handle: the object may be right and the announcement wrong.

use super::types::{ItemHint, LoadError};
use super::worker::WorkerState;
use crate::error::{EcError, chain};
use crate::metered::CacheTier;
use crate::object::{self, ObjectError};
use crate::store::StoreKind;
use crate::store::peer::Peers;
use crate::traced::{Place, ended, read};
use bytes::Bytes;
use futures::future::{Either, select};
use futures::stream::{FuturesUnordered, StreamExt};
use std::pin::pin;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::Instrument;
use triptych_core::{EncodedItem, EncoderOutput};

/// Longest single wait for an item in encoding; between two waits the load checks that a request still wants it.
const WAIT_SLICE: Duration = Duration::from_secs(1);
/// Pause after a wait that ended early without the item.
const PAUSE: Duration = Duration::from_millis(50);
/// Consecutive store failures after which the wait for a pending item ends.
const FAILURES: u32 = 3;
/// Objects up to this many bytes are hashed on the async worker: a hand-over to another thread takes longer.
pub(super) const INLINE_BYTES: usize = 64 << 10;

/// Progress of the wait for an item in encoding.
#[derive(Default)]
struct PendingWait {
    failures_in_a_row: u32,
    /// Consecutive reports that the item exists.
    found_in_a_row: u32,
    /// Time since which nobody encodes it, as far as the store knows.
    orphan_since: Option<Instant>,
}

impl WorkerState {
    /// Loads an item, and waits for it while it is in encoding.
    pub(super) async fn load(&self, item: &EncodedItem) -> Result<EncoderOutput, LoadError> {
        let started = Instant::now();
        let mut pending = PendingWait::default();
        loop {
            let encoded_here = self.saved.notified();
            if let Some(output) = self.state.lock().local.get(&item.key) {
                return Ok(output);
            }
            let hint = self.hint(item);
            let limit = match (hint.pending, hint.until) {
                (false, _) => self.settings.load_timeout,
                (true, None) => self.settings.pending_timeout,
                (true, Some(until)) => until.saturating_duration_since(started),
            };
            let until = started + limit;
            let late = LoadError::TimedOut { limit };
            let Ok(result) = timeout_at(until, self.load_now(item, &hint)).await else { return Err(late) };
            let e = match result {
                Ok(output) => return Ok(output),
                Err(e) => e,
            };
            // Another request may have reported since that it is in encoding.
            if !self.hint(item).pending || pending.is_over(&e) {
                return Err(e);
            }
            let event = async {
                tokio::select! {
                    () = encoded_here => None,
                    found = self.wait_for(item, &hint) => Some(found),
                }
            };
            let Ok(found) = timeout_at(until, event).await else { return Err(late) };
            match found {
                Some(false) if self.is_orphan(&mut pending) => return Err(LoadError::Missing),
                Some(found) => pending.store_reported(found).await,
                // Some item was encoded in this process; the next round checks at once whether it was this one, so
                // notifications of others cost no pause.
                None => {}
            }
            if self.closing.is_cancelled() || !self.state.lock().local.is_held(&item.key) {
                return Err(LoadError::Unavailable { detail: "no request waits for it any more".into() });
            }
        }
    }

    /// Merged location hints. An item without a checksum is in encoding, whatever the hints say.
    fn hint(&self, item: &EncodedItem) -> ItemHint {
        let hint = self.state.lock().hint(&item.key);
        ItemHint { pending: hint.pending || item.is_pending(), ..hint }
    }

    /// Records a wait that ended early. True if nobody has encoded the item for too long.
    fn is_orphan(&self, pending: &mut PendingWait) -> bool {
        let since = *pending.orphan_since.get_or_insert_with(Instant::now);
        since.elapsed() >= self.settings.orphan_grace
    }

    /// One slice of the wait for the store or a peer to have the item. False: nobody encodes it, as far as the store
    /// knows.
    async fn wait_for(&self, item: &EncodedItem, hint: &ItemHint) -> bool {
        let started = Instant::now();
        let at_peers = pin!(self.wait_at_peers(item, hint));
        let at_store = pin!(self.store.wait(&item.key, WAIT_SLICE));
        match select(at_store, at_peers).await {
            Either::Right(((), _)) | Either::Left((Ok(Some(_)), _)) => true,
            Either::Left((answer, at_peers)) => {
                // An unavailable store does not know who encodes the item.
                let full = answer.is_err() || started.elapsed() >= WAIT_SLICE / 2;
                let rest = if full { WAIT_SLICE.saturating_sub(started.elapsed()) } else { PAUSE };
                timeout(rest, at_peers).await.is_ok() || full
            }
        }
    }

    /// Completes when a peer has the item; never, if none does.
    async fn wait_at_peers(&self, item: &EncodedItem, hint: &ItemHint) {
        if let Some(peers) = &self.settings.peers {
            let waits = hint.peers.iter().map(|peer| peers.wait(peer, &item.key, WAIT_SLICE));
            let mut waits: FuturesUnordered<_> = waits.collect();
            while let Some(found) = waits.next().await {
                if matches!(found, Ok(Some(_))) {
                    return;
                }
            }
        }
        std::future::pending().await
    }

    async fn load_now(&self, item: &EncodedItem, hint: &ItemHint) -> Result<EncoderOutput, LoadError> {
        let gone = |e: tokio::sync::AcquireError| LoadError::Unavailable { detail: e.to_string() };
        // Held through reading and verifying, since both hold the object's bytes.
        let _turn = self.turns.acquire().await.map_err(gone)?;
        if let Some(peers) = &self.settings.peers {
            for peer in &hint.peers {
                if let Some(output) = self.load_from_peer(peers, peer, item).await {
                    return Ok(output);
                }
            }
        }
        self.load_from_store(item).await
    }

    /// The output from a peer, if the peer has it and it verifies.
    async fn load_from_peer(&self, peers: &Peers, peer: &str, item: &EncodedItem) -> Option<EncoderOutput> {
        let (tier, started) = (CacheTier::Store(StoreKind::Peer), Instant::now());
        let span = Place::at(StoreKind::Peer, peer).span("get", std::slice::from_ref(&item.key));
        let got = peers.get(peer, &item.key).instrument(span.clone()).await;
        ended(&span, &got, read);
        drop(span);
        match got {
            Ok(Some(object)) => {
                let bytes = object.len();
                match self.decode(object, item).await {
                    Ok(output) => {
                        self.observer.hit(tier);
                        self.observer.loaded(bytes, started.elapsed());
                        return Some(output);
                    }
                    Err(e) => {
                        tracing::warn!(key = ?item.key, peer, error = %e, "output of a peer does not verify");
                        self.observer.corrupt(tier);
                        peers.forget(peer);
                    }
                }
            }
            Ok(None) => self.observer.miss(tier),
            Err(e) => tracing::debug!(key = ?item.key, peer, error = %chain(&e), "a peer does not answer"),
        }
        None
    }

    /// Gets and verifies. A copy that does not verify is quarantined, and the next copy behind it is read instead.
    async fn load_from_store(&self, item: &EncodedItem) -> Result<EncoderOutput, LoadError> {
        const COPIES: usize = 3;
        let mut corrupt = None;
        for _ in 0..COPIES {
            let (detail, object) = match self.store.get(&item.key).await {
                Ok(None) => break,
                Ok(Some(object)) => match self.decode(object.clone(), item).await {
                    Ok(output) => return Ok(output),
                    Err(e @ LoadError::Unavailable { .. }) => return Err(e),
                    Err(e) => (e, Some(object)),
                },
                Err(EcError::TimedOut { limit, .. }) => return Err(LoadError::TimedOut { limit }),
                Err(e @ EcError::Corrupt { .. }) => (LoadError::Corrupt { detail: chain(&e) }, None),
                Err(e) => return Err(LoadError::Unavailable { detail: chain(&e) }),
            };
            self.disown(item, &detail, object).await;
            corrupt = Some(detail);
        }
        Err(corrupt.unwrap_or(LoadError::Missing))
    }

    async fn disown(&self, item: &EncodedItem, why: &LoadError, object: Option<Bytes>) {
        tracing::warn!(key = ?item.key, %why, "quarantining an encoder output");
        let done = match object {
            Some(object) => self.store.disown(&item.key, &object).await,
            None => self.store.quarantine(&item.key).await,
        };
        if let Err(e) = done {
            tracing::warn!(key = ?item.key, error = %chain(&e), "could not quarantine");
        }
    }

    /// Decodes and verifies rows of the expected key and encoder.
    async fn decode(&self, object: Bytes, item: &EncodedItem) -> Result<EncoderOutput, LoadError> {
        let (key, fingerprint) = (item.key, item.fingerprint);
        let (limits, mac_keys) = (self.settings.limits.clone(), self.settings.mac_keys.clone());
        let inline = object.len() <= INLINE_BYTES;
        let decode = move || {
            let output = object::decode_signed(object, &key, &limits, &mac_keys)?;
            match output.item().fingerprint == fingerprint {
                true => Ok(output),
                false => Err(ObjectError::NotAsAnnounced { field: "fingerprint" }),
            }
        };
        let decoded = match inline {
            true => decode(),
            false => {
                let panicked = |e: tokio::task::JoinError| LoadError::Unavailable { detail: e.to_string() };
                spawn_blocking(decode).await.map_err(panicked)?
            }
        };
        decoded.map_err(|e| LoadError::Corrupt { detail: chain(&e) })
    }
}

impl PendingWait {
    /// Records a report of the store or a peer that the item exists or not.
    async fn store_reported(&mut self, found: bool) {
        if !found {
            self.found_in_a_row = 0;
            return;
        }
        self.orphan_since = None;
        self.found_in_a_row += 1;
        if self.found_in_a_row > 1 {
            // It is reported to exist, and does not: an inconsistent store must not be polled in a tight loop.
            sleep(PAUSE).await;
        }
    }

    /// Takes note of how a try ended. Whether there is no use in waiting.
    fn is_over(&mut self, e: &LoadError) -> bool {
        match e {
            LoadError::Unavailable { .. } | LoadError::TimedOut { .. } => self.failures_in_a_row += 1,
            // One that did not verify was taken out of view: its maker puts another in its place.
            LoadError::Missing | LoadError::Corrupt { .. } => self.failures_in_a_row = 0,
        }
        self.failures_in_a_row >= FAILURES
    }
}
