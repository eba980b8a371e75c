//! The proxy's questions to the EC store: the encoder outputs that it holds, and leases of those that are being made. It
//! never reads one; that is for [`crate::rows`].
//!
//! A store that does not answer is as good as an empty one: the items are encoded again, and the request lives.

use crate::request_machine::output::Wanted;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use triptych_core::{ContentKey, EncodedItem};
use triptych_ec::EcStore;
use triptych_ec::error::{EcError, chain};
use triptych_ec::store::lease::{Acquired, EncodeLease};

/// The longest answer of the store; a probe must never cost more than the encode it could save. The store's circuit
/// breaker has a shorter one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for which leases are not asked for after the store did not answer: encodes must not wait for it one after another.
const AWAY: Duration = Duration::from_secs(1);
/// Most keys of one question.
const BATCH: usize = 256;

/// The store, as far as the proxy needs it.
#[derive(Clone, Debug)]
pub struct EncoderCache {
    store: Arc<dyn EcStore>,
    max_object_bytes: usize,
    leases: Arc<Mutex<LeaseSupport>>,
}

/// State of the store's leases.
#[derive(Clone, Copy, Debug)]
enum LeaseSupport {
    /// It is asked for them.
    Yes,
    /// The store did not answer a moment ago.
    NotBefore(Instant),
    /// The store has none.
    Never,
}

impl EncoderCache {
    /// Asks `store`.
    pub fn new(store: Arc<dyn EcStore>, max_object_bytes: usize) -> Self {
        Self { store, max_object_bytes, leases: Arc::new(Mutex::new(LeaseSupport::Yes)) }
    }

    /// Takes the lease of a key, see [`EcStore::acquire`]; `None` if the store has none or does not answer.
    pub async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Option<Acquired> {
        let asking = *self.leases.lock();
        match asking {
            LeaseSupport::Never => return None,
            LeaseSupport::NotBefore(then) if Instant::now() < then => return None,
            LeaseSupport::Yes | LeaseSupport::NotBefore(_) => {}
        }
        self.answer("acquire", PATIENCE, self.store.acquire(key, ttl)).await
    }

    /// Removes an output for an operator. True if there was one.
    ///
    /// # Errors
    /// [`EcError`] of the store.
    pub async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.store.delete(key).await
    }

    /// Keeps a lease, see [`EcStore::renew`]; `None` if the store does not answer.
    pub async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Option<bool> {
        self.answer("renew", PATIENCE, self.store.renew(lease, ttl)).await
    }

    /// Gives a lease back, see [`EcStore::release`]. One that cannot be given back ends by itself.
    pub async fn release(&self, lease: &EncodeLease) {
        self.answer("release", PATIENCE, self.store.release(lease)).await;
    }

    /// Waits for an output that somebody makes, see [`EcStore::wait`]; `None` if the store does not answer.
    pub async fn wait(&self, wanted: &Wanted, patience: Duration) -> Option<Option<EncodedItem>> {
        let wait = self.store.wait(&wanted.key, patience);
        let found = self.answer("wait", patience + PATIENCE, wait).await?;
        Some(found.filter(|item| self.fits(item, wanted)))
    }

    async fn answer<T>(
        &self,
        what: &'static str,
        patience: Duration,
        asked: impl Future<Output = Result<T, EcError>>,
    ) -> Option<T> {
        let asking = match timeout(patience, asked).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(EcError::Unsupported { .. })) => {
                tracing::info!(store = self.store.describe(), "the EC store has no leases");
                LeaseSupport::Never
            }
            // Its circuit breaker decides when it is asked again, and has said that it is away.
            Ok(Err(EcError::CircuitOpen { .. })) => return None,
            Ok(Err(e)) => {
                tracing::warn!(what, error = chain(&e), "EC store does not answer about leases");
                LeaseSupport::NotBefore(Instant::now() + AWAY)
            }
            Err(_) => {
                tracing::warn!(what, ?patience, "EC store is slow to answer about leases");
                LeaseSupport::NotBefore(Instant::now() + AWAY)
            }
        };
        *self.leases.lock() = asking;
        None
    }

    /// The descriptions of what is there, in the order asked. Never fails: what cannot be asked is missing.
    pub async fn probe(&self, wanted: &[Wanted]) -> Vec<Option<EncodedItem>> {
        let mut found = Vec::with_capacity(wanted.len());
        for batch in wanted.chunks(BATCH) {
            let keys: Vec<_> = batch.iter().map(|w| w.key).collect();
            let heads = match timeout(PATIENCE, self.store.heads(&keys)).await {
                Ok(Ok(heads)) => heads,
                Ok(Err(EcError::CircuitOpen { .. })) => Vec::new(),
                Ok(Err(e)) => {
                    tracing::warn!(error = chain(&e), "EC store does not answer, items are encoded");
                    Vec::new()
                }
                Err(_) => {
                    tracing::warn!(patience = ?PATIENCE, "EC store is slow, items are encoded");
                    Vec::new()
                }
            };
            let heads = heads.into_iter().chain(std::iter::repeat(None));
            found.extend(batch.iter().zip(heads).map(|(w, head)| head.filter(|item| self.fits(item, w))));
        }
        found
    }

    fn fits(&self, item: &EncodedItem, wanted: &Wanted) -> bool {
        item.key == wanted.key
            && item.fingerprint == wanted.fingerprint
            && item.modality == wanted.modality
            && item.payload_len().is_some_and(|len| len > 0 && len <= self.max_object_bytes)
    }
}
