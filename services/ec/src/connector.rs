//! The EC connector: the two roles that move encoder outputs between a worker and a store.
//!
//! The roles and their verbs are the field's own (vLLM, `ECConnectorBase`:
//! <https://github.com/vllm-project/vllm/blob/dc6d3096568971eefac153a3ca11bb0851167028/vllm/distributed/ec_transfer/ec_connector/base.py>). The
//! scheduler's role is synchronous and never waits: it runs inside an engine step. The worker's role runs all
//! transfer beside compute. Both look at one local cache. A miss, a corrupt object and an unavailable store are
//! results, never panics; the caller decides (encode again, retry, a typed error).
//!
//! States of an item: `Missing` → `update_state_after_alloc` → `Pending` → `build_connector_meta` →
//! `start_load_caches` → [`Loaded`] → `Ready` until `request_finished`, or `Missing` again if the load failed.

mod load;
mod save;
mod scheduler;
mod state;
mod types;
mod worker;

pub use scheduler::SchedulerRole;
pub use types::{
    CacheStatus, Completions, ConnectorSettings, EcConnectorMeta, ItemHint, LoadError, LoadOrder, Loaded,
    Publish, Published,
};
pub use worker::WorkerRole;

pub use crate::local::HoldOutcome;
use crate::metered::{EcObserver, Metered};
use crate::store::EcStore;
use parking_lot::Mutex;
use state::LoadState;
use std::sync::Arc;

/// Creates the two roles over a store. The connector observes the store itself ([`Metered`]), so `store` should not
/// be observed already. Must be called inside a tokio runtime, which is where transfers run.
pub fn connect(
    store: Arc<dyn EcStore>,
    observer: Arc<dyn EcObserver>,
    settings: ConnectorSettings,
) -> (SchedulerRole, WorkerRole) {
    let state = Arc::new(Mutex::new(LoadState::new(settings.local_budget_bytes)));
    let store: Arc<dyn EcStore> = Arc::new(Metered::new(store, observer.clone()));
    let worker = WorkerRole::new(state.clone(), store, observer, settings);
    (SchedulerRole::new(state), worker)
}
