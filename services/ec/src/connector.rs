//! The EC connector: the two roles that move encoder outputs between a worker and a store.
//!
//! The roles and their verbs are the field's own (vLLM, `ECConnectorBase`:
//! <https://github.com/vllm-project/vllm/blob/dc6d3096568971eefac153a3ca11bb0851167028/vllm/distributed/ec_transfer/ec_connector/base.py>). The
//! scheduler's role is synchronous and never waits: it runs inside an engine step. The worker's role runs all
//! transfer beside compute. Both look at one local cache. A miss, a corrupt object and a store that is away are
//! results, never panics; what follows from them (encode again, another try, a typed error) is the caller's part.
//!
//! One life of an item: `Missing` → `update_state_after_alloc` → `Pending` → `build_connector_meta` →
//! `start_load_caches` → [`Loaded`] → `Ready` until `request_finished`, or `Missing` again if the load failed.

mod scheduler;
mod state;
mod worker;

pub use scheduler::SchedulerRole;
pub use worker::WorkerRole;

use crate::metered::{EcObserver, Metered};
use crate::store::{EcStore, PutOutcome};
use state::State;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thiserror::Error;
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

/// What a step asks the worker's role to load. Must be given to [`WorkerRole::start_load_caches`]: its items are
/// `Pending` from here on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "its items stay pending until they are loaded"]
pub struct EcConnectorMeta {
    /// The items, in the order in which they were asked for.
    pub loads: Vec<EncodedItem>,
}

/// The end of one load. There is one for each key and load, however many requests wait for it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Of the item.
    pub key: ContentKey,
    /// The rows, verified and as announced; they are in the local cache too.
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
    /// From the call to the store's answer.
    pub took: Duration,
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
    /// How long an item that was announced as pending may take to be READY, before its load begins. Default 2 min.
    pub pending_timeout: Duration,
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
            save_timeout: Duration::from_secs(30),
            mac_keys: crate::object::MacKeys::default(),
            limits: triptych_core::limits::Limits::default(),
            completions: Completions::Collected,
        }
    }
}

/// Makes the two roles over a store. The connector observes the store itself ([`Metered`]), so `store` should not
/// be observed already. Must be called inside a tokio runtime, which is where transfers run.
pub fn connect(
    store: Arc<dyn EcStore>,
    observer: Arc<dyn EcObserver>,
    settings: ConnectorSettings,
) -> (SchedulerRole, WorkerRole) {
    let state = Arc::new(Mutex::new(State::new(settings.local_budget_bytes)));
    let store: Arc<dyn EcStore> = Arc::new(Metered::new(store, observer.clone()));
    let worker = WorkerRole::new(state.clone(), store, observer, settings);
    (SchedulerRole::new(state), worker)
}
