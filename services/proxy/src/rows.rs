//! Rows of encoder outputs, for the answers that have them (`/v1/embeddings`, `/pooling`). No other request has this process
//! read an output.
//!
//! A peer that holds the output in memory is read first, then the store. Objects are checked against key, encoder and
//! checksum; signatures are for workers, which have the keys.

use crate::request_machine::output::Announced;
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use triptych_core::limits::Limits;
use triptych_core::{EncodedItem, EncoderOutput, Failure};
use triptych_ec::EcStore;
use triptych_ec::error::chain;
use triptych_ec::object::{self, MacKeys};
use triptych_ec::store::peer::{PeerTuning, Peers};
use triptych_runtime::grpc::Dialer;
use triptych_runtime::trace_context;

/// Outputs that are read at once; each may be as large as an object.
const MAX_LOADS: usize = 4;
/// Longest time of one read.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads encoder outputs.
pub struct RowLoader {
    store: Arc<dyn EcStore>,
    peers: Peers,
    limits: Limits,
    turns: Semaphore,
}

impl fmt::Debug for RowLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowLoader").field("store", &self.store.describe()).finish_non_exhaustive()
    }
}

impl RowLoader {
    /// Reads from `store`, and from the workers to which `dialer` makes channels.
    pub fn new(store: Arc<dyn EcStore>, dialer: &Dialer, limits: Limits) -> Self {
        let peers = Peers::new(Some(dialer.as_fn()), PeerTuning::default(), &limits);
        let peers = peers.injecting(trace_context::injected);
        Self { store, peers, limits, turns: Semaphore::new(MAX_LOADS) }
    }

    /// The output that was announced; `None` if it is nowhere, or what is there does not verify.
    ///
    /// # Errors
    /// Unavailable, if the store does not answer.
    pub async fn load(&self, announced: &Announced) -> Result<Option<EncoderOutput>, Failure> {
        let _turn = self.turns.acquire().await.map_err(Failure::internal)?;
        let item = &announced.item;
        for peer in &announced.peers {
            if let Ok(Ok(Some(object))) = timeout(PATIENCE, self.peers.get(peer, &item.key)).await
                && let Some(output) = self.decode(object, item).await?
            {
                return Ok(Some(output));
            }
        }
        let away =
            |detail: String| Failure::unavailable("the encoder cache does not answer").with_detail(detail);
        match timeout(PATIENCE, self.store.get(&item.key)).await {
            Ok(Ok(Some(object))) => self.decode(object, item).await,
            Ok(Ok(None)) => Ok(None),
            Ok(Err(e)) => Err(away(chain(&e))),
            Err(_) => Err(away(format!("not read within {PATIENCE:?}"))),
        }
    }

    async fn decode(&self, object: Bytes, item: &EncodedItem) -> Result<Option<EncoderOutput>, Failure> {
        let (key, fingerprint, limits) = (item.key, item.fingerprint, self.limits.clone());
        let decode = move || object::decode_signed(object, &key, &limits, &MacKeys::default());
        let decoded = tokio::task::spawn_blocking(decode).await.map_err(Failure::internal)?;
        match decoded {
            Ok(output) if output.item().fingerprint == fingerprint => Ok(Some(output)),
            Ok(_) => Ok(None),
            Err(e) => {
                tracing::warn!(key = ?item.key, error = %chain(&e), "an encoder output does not verify");
                Ok(None)
            }
        }
    }
}
