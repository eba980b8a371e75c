//! Types of the connector's interface: statuses, hints, loads, publications, settings.

use crate::store::PutOutcome;
use crate::store::peer::{MAX_PEERS, PeerCache, Peers};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput};

/// Where an item is, as this worker knows without asking anyone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// The rows are here.
    Ready,
    /// A load was asked for or is under way.
    Pending,
    /// Neither. It may well be in the store.
    Missing,
}

/// What is known of where an item's output is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ItemHint {
    /// `host:port` of workers that hold it in memory, the best first. Asked before the store.
    pub peers: Vec<String>,
    /// It is still being made: its absence is no failure before `until`, or before nobody makes it any more.
    pub pending: bool,
    /// Until when a pending item is waited for; `None`: [`ConnectorSettings::pending_timeout`] from now.
    pub until: Option<Instant>,
}

impl ItemHint {
    /// Adds what someone else knows.
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
    /// Where its output is.
    pub hint: ItemHint,
}

impl From<EncodedItem> for LoadOrder {
    fn from(item: EncodedItem) -> Self {
        Self { item, hint: ItemHint::default() }
    }
}

/// What a step asks the worker's role to load. Must be given to [`WorkerRole::start_load_caches`]: its items are
/// `Pending` from here on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "its items stay pending until they are loaded"]
pub struct EcConnectorMeta {
    /// The items, in the order in which they were asked for.
    pub loads: Vec<LoadOrder>,
}

/// The end of one load. There is one for each key and load, however many requests wait for it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Of the item.
    pub key: ContentKey,
    /// The rows, verified, of the key and encoder that were asked for; they are in the local cache too. Their shape is
    /// theirs: who was announced another has to compare.
    pub result: Result<EncoderOutput, LoadError>,
    /// From the start of the load, waiting for its turn included. Zero if the rows were here.
    pub took: Duration,
}

/// Why a load gave no rows.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LoadError {
    /// The store does not have it: encode again.
    #[error("not in the store")]
    Missing,
    /// What the store had does not verify and was quarantined: encode again.
    #[error("the object does not verify: {detail}")]
    Corrupt {
        /// For the operator.
        detail: String,
    },
    /// The store does not answer: another try, or encode here.
    #[error("the store is not available: {detail}")]
    Unavailable {
        /// For the operator.
        detail: String,
    },
    /// The load did not end in time, waiting for its turn included.
    #[error("not loaded within {limit:?}")]
    TimedOut {
        /// The limit that passed.
        limit: Duration,
    },
}

impl LoadError {
    /// Whether loading again is useless until someone encodes the item again.
    pub fn needs_encode(&self) -> bool {
        matches!(self, Self::Missing | Self::Corrupt { .. })
    }
}

/// An output that is in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// What the store holds. Its checksum is another than that of the output which was given when another encoder
    /// was first and rounds differently.
    pub item: EncodedItem,
    /// Whether these bytes were stored.
    pub outcome: PutOutcome,
    /// Length of the object.
    pub bytes: usize,
    /// It can be read from this worker's peer cache, and is on its way to the store or was found there.
    pub in_peer_cache: bool,
    /// From the call to the answer.
    pub took: Duration,
}

/// When publishing is done.
#[derive(Clone, Default)]
pub enum Publish {
    /// When the store has it.
    #[default]
    WriteThrough,
    /// When it is on the peer cache, where other workers read it; the copy in the store follows.
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

/// Where completions go.
#[derive(Clone, Default)]
pub enum Completions {
    /// They wait for [`WorkerRole::finished`].
    #[default]
    Collected,
    /// To a function, which is called on a tokio worker, or by [`WorkerRole::start_load_caches`] itself for rows
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
    /// Loads that run at once. Default 8; zero is read as 1.
    pub max_loads: usize,
    /// Loads that run or wait for their turn, and completions that wait for [`WorkerRole::finished`]. Past it a
    /// load fails at once as `Unavailable`. Default 4096.
    pub max_pending: usize,
    /// How long a load may take, waiting included. Default 10 s.
    pub load_timeout: Duration,
    /// How long an item that is still being made is waited for, where nothing else is said. Default 2 min.
    pub pending_timeout: Duration,
    /// How long an item is still waited for when nobody holds its lease. Default 5 s.
    pub orphan_grace: Duration,
    /// The other workers, which hold outputs in memory. Default: none, hints of peers are not followed.
    pub peers: Option<Arc<Peers>>,
    /// When publishing is done. Default: when the store has it.
    pub publish: Publish,
    /// How long publishing may take. Default 30 s.
    pub save_timeout: Duration,
    /// With which objects are signed, and held to be. Default: none.
    pub mac_keys: crate::object::MacKeys,
    /// Largest object and its kin.
    pub limits: triptych_core::limits::Limits,
    /// Where completions go.
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
