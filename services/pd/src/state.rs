//! State that the requests of a PD worker share: its models, its connector, and the bounds on requests.

use crate::coalesce::StreamTicks;
use crate::loads::EcLoads;
use crate::meters::PdMeters;
use crate::served::ServedModels;
use crate::updates::ModelUpdates;
use std::sync::Arc;
use tokio::sync::{Mutex, Semaphore};
use triptych_core::WorkerId;
use triptych_core::limits::Limits;
use triptych_ec::store::EcStore;
use triptych_models::lora::LoraSettings;
use triptych_runtime::Drain;
use triptych_runtime::serve::{ColocatedLoad, ColocatedWeights};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;

/// State shared by the requests of the service.
pub struct PdWorkerState {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// True if the process has encoders too.
    pub encodes: bool,
    /// Load of the colocated encoders.
    pub colocated_load: Option<ColocatedLoad>,
    /// Loader of the colocated encoders' weights.
    pub colocated_weights: Option<ColocatedWeights>,
    /// Models by served name.
    pub models: ServedModels,
    /// Loading of others.
    pub updates: ModelUpdates,
    /// Limits on adapters.
    pub lora: LoraSettings,
    /// Held while an adapter is loaded or unloaded.
    pub adapter_updates: Mutex<()>,
    /// EC connector.
    pub loads: EcLoads,
    /// Store, for the worker's description.
    pub store: Arc<dyn EcStore>,
    /// Limits on requests.
    pub limits: Limits,
    /// Permits of requests.
    pub request_permits: Arc<Semaphore>,
    /// Number of request permits.
    pub max_requests: usize,
    /// Ticks of held messages.
    pub stream_ticks: StreamTicks,
    /// Metrics of requests for unknown models.
    pub unknown: PdMeters,
    /// Shutdown state and task group.
    pub drain: Drain,
    /// Requests that are being started, for this process's successor.
    pub journal: StartJournal,
    /// Watches work on blocking threads.
    pub watchdog: Watchdog,
}
