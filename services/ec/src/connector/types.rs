//! Types of the connector's interface: statuses, hints, loads, publications, settings.

use crate::store::PutOutcome;
use crate::store::peer::{MAX_PEERS, PeerCache, Peers};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput};

/// Status of an item on this worker; needs no I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// The rows are on this worker.
    Ready,
    /// A load is queued or in flight.
    Pending,
    /// Neither. It may be in the store.
    Missing,
}

/// Hints about the location of an item's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ItemHint {
    /// `host:port` of workers that hold it in memory, the best first. Read before the store.
    pub peers: Vec<String>,
    /// It is being encoded: its absence is no failure before `until`, or while its lease is held.
    pub pending: bool,
    /// Deadline for a pending item; `None`: [`ConnectorSettings::pending_timeout`] from now.
    pub until: Option<Instant>,
}

impl ItemHint {
    /// Merges another hint.
    pub(super) fn add(&mut self, other: &Self) {
        for peer in &other.peers {
            if self.peers.len() < MAX_PEERS && !self.peers.contains(peer) {
                self.peers.push(peer.clone());
            }
        }
        self.pending |= other.pending;
        self.until = self.until.max(other.until);
    }
}

/// One item to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOrder {
    /// The item, as it was announced.
    pub item: EncodedItem,
    /// Location hints.
    pub hint: ItemHint,
}

impl From<EncodedItem> for LoadOrder {
    fn from(item: EncodedItem) -> Self {
        Self { item, hint: ItemHint::default() }
    }
}

/// Loads of one step, for the worker's role. Must be given to [`super::WorkerRole::start_load_caches`]: its items are
/// `Pending` from here on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "its items stay pending until they are loaded"]
pub struct EcConnectorMeta {
    /// The items, in request order.
    pub loads: Vec<LoadOrder>,
}

/// The end of one load. There is one for each key and load, however many requests wait for it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Key of the item.
    pub key: ContentKey,
    /// The verified rows of this key and encoder, which are in the local cache too. The caller compares their shape
    /// with the announced one.
    pub result: Result<EncoderOutput, LoadError>,
    /// Time since the start of the load, queueing included. Zero if the rows were on this worker.
    pub took: Duration,
}

/// Failure of a load.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LoadError {
    /// The store does not have it: encode again.
    #[error("not in the store")]
    Missing,
    /// The store's object does not verify and was quarantined: encode again.
    #[error("the object does not verify: {detail}")]
    Corrupt {
        /// For the operator.
        detail: String,
    },
    /// The store does not answer: retry, or encode here.
    #[error("the store is not available: {detail}")]
    Unavailable {
        /// For the operator.
        detail: String,
    },
    /// The load exceeded its timeout, queueing included.
    #[error("not loaded within {limit:?}")]
    TimedOut {
        /// The limit that passed.
        limit: Duration,
    },
}

impl LoadError {
    /// True if a retry is useless until the item is encoded again.
    pub fn needs_encode(&self) -> bool {
        matches!(self, Self::Missing | Self::Corrupt { .. })
    }
}

/// A published output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Metadata of the stored object. Its checksum differs from the given output's if another encoder was first and
    /// rounds differently.
    pub item: EncodedItem,
    /// Stored, or already there.
    pub outcome: PutOutcome,
    /// Length of the object.
    pub bytes: usize,
    /// True if peers can read it from this worker; its copy in the store is being written or exists.
    pub in_peer_cache: bool,
    /// Time of the call.
    pub took: Duration,
}

/// Completion of a publication.
#[derive(Clone, Default)]
pub enum Publish {
    /// Complete when the store has it.
    #[default]
    WriteThrough,
    /// Complete when it is in the peer cache, where other workers read it; the store's copy follows.
    WriteBehind(Arc<PeerCache>),
}

impl fmt::Debug for Publish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteThrough => "WriteThrough",
            Self::WriteBehind(_) => "WriteBehind",
        })
    }
}

/// Receiver of completed loads.
#[derive(Clone, Default)]
pub enum Completions {
    /// Collected for [`super::WorkerRole::finished`].
    #[default]
    Collected,
    /// To a function, which is called on a tokio worker, or by [`super::WorkerRole::start_load_caches`] itself for rows
    /// that are here. It must not block: it sends an event to the engine.
    Callback(Arc<dyn Fn(Loaded) + Send + Sync>),
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Collected => "Collected",
            Self::Callback(_) => "Callback",
        })
    }
}

/// Limits of a connector.
#[derive(Clone, Debug)]
pub struct ConnectorSettings {
    /// Rows kept on this worker, in bytes. Default 1 GiB; zero keeps only what requests hold.
    pub local_budget_bytes: usize,
    /// Concurrent loads. Default 8; zero is read as 1.
    pub max_loads: usize,
    /// Loads queued or in flight, and completions that wait for [`super::WorkerRole::finished`]. Past it a
    /// load fails at once as `Unavailable`. Default 4096.
    pub max_pending: usize,
    /// Timeout of a load, queueing included. Default 10 s.
    pub load_timeout: Duration,
    /// Longest wait for an item in encoding whose hint has no deadline. Default 2 min.
    pub pending_timeout: Duration,
    /// Wait for an item after its lease ended. Default 5 s.
    pub orphan_grace: Duration,
    /// Connections to peers. Default: none, peer hints are ignored.
    pub peers: Option<Arc<Peers>>,
    /// Completion of publications. Default: write-through.
    pub publish: Publish,
    /// Timeout of a publication. Default 30 s.
    pub save_timeout: Duration,
    /// Keys that sign and verify objects. Default: none.
    pub mac_keys: crate::object::MacKeys,
    /// Size limits.
    pub limits: triptych_core::limits::Limits,
    /// Receiver of completed loads.
    pub completions: Completions,
}

impl Default for ConnectorSettings {
    fn default() -> Self {
        Self {
            local_budget_bytes: 1 << 30,
            max_loads: 8,
            max_pending: 4096,
            load_timeout: Duration::from_secs(10),
            pending_timeout: Duration::from_secs(120),
            orphan_grace: Duration::from_secs(5),
            peers: None,
            publish: Publish::WriteThrough,
            save_timeout: Duration::from_secs(30),
            mac_keys: crate::object::MacKeys::default(),
            limits: triptych_core::limits::Limits::default(),
            completions: Completions::Collected,
        }
    }
}
