//! What the proxy asks of the EC store: which encoder outputs does it hold? It never reads one.
//!
//! A store that does not answer is as good as an empty one: the items are encoded again, and the request lives.

use std::sync::Arc;
use std::time::Duration;
use triptych_core::{ContentKey, EncodedItem, Fingerprint, Modality};
use triptych_ec::EcStore;
use triptych_ec::error::chain;

/// How long the store may take; a probe must never cost more than the encode it could save.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most keys of one question.
const BATCH: usize = 256;

/// An encoder output that is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its identity.
    pub key: ContentKey,
    /// The encoder that makes it.
    pub fingerprint: Fingerprint,
    /// The kind of item.
    pub modality: Modality,
}

/// The store, as far as the proxy needs it.
#[derive(Clone, Debug)]
pub struct EncoderCache {
    store: Arc<dyn EcStore>,
    max_object_bytes: usize,
}

impl EncoderCache {
    /// Asks `store`.
    pub fn new(store: Arc<dyn EcStore>, max_object_bytes: usize) -> Self {
        Self { store, max_object_bytes }
    }

    /// The descriptions of what is there, in the order asked. Never fails: what cannot be asked is missing.
    pub async fn probe(&self, wanted: &[Wanted]) -> Vec<Option<EncodedItem>> {
        let mut found = Vec::with_capacity(wanted.len());
        for batch in wanted.chunks(BATCH) {
            let keys: Vec<_> = batch.iter().map(|w| w.key).collect();
            let heads = match tokio::time::timeout(PATIENCE, self.store.heads(&keys)).await {
                Ok(Ok(heads)) => heads,
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
