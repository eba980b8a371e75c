//! The PD worker's process: load, serve, drain.

use crate::driver::SequenceHook;
use crate::engine_settings::EngineSettings;
use crate::grammar::{CompilePool, TrialProgram};
use crate::loader::{DecoderLoader, EngineStarter, LoadedDecoder};
use crate::loads::{EcLoads, LoadSettings};
use crate::memory_needs::MemorySettings;
use crate::memory_plan::MemoryPlan;
use crate::meters::{ArbiterMeters, EcMeters, MetricFamilies, RowMeters};
use crate::model_updates::ModelUpdates;
use crate::served::ServedModels;
use crate::service::PdService;
use crate::state::PdWorkerState;
use futures::future::BoxFuture;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use triptych_core::limits::Limits;
use triptych_core::prompt::ToolSyntax;
use triptych_core::{RowTypes, WorkerId};
use triptych_ec::connector::WorkerRole;
use triptych_ec::object::MacKeys;
use triptych_ec::store::EcStore;
use triptych_engine::EngineError;
use triptych_models::compute::{ComputeConfig, Precision};
use triptych_models::lora::LoraSettings;
use triptych_models::{ModelError, ModelSource};
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::compute_arbiter::ComputeArbiter;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::{ColocatedServices, ServeError, serve_colocated};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;
use triptych_runtime::worker_admin::WorkerAdmin;
use triptych_runtime::{Drain, MetricsRegistry};

/// Settings of a PD worker.
pub struct PdConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Listener for gRPC.
    pub grpc: Listener,
    /// Listener for `/metrics` and the probes; `None`: none.
    pub admin: Option<TcpListener>,
    /// Models to serve.
    pub models: Vec<ModelSource>,
    /// Directory below which operators may name models to load; `None`: models are those of the start.
    pub model_updates: Option<PathBuf>,
    /// Draft models, each under the name of the model it drafts for.
    pub drafts: Vec<ModelSource>,
    /// LoRA adapters, and limits on them.
    pub lora: LoraSettings,
    /// Syntax of calls of tools; `None`: what each model's chat template tells.
    pub tool_syntax: Option<ToolSyntax>,
    /// Store of encoder outputs.
    pub store: Arc<dyn EcStore>,
    /// Dialer to the encoder workers that hold outputs in memory.
    pub dialer: Dialer,
    /// Compute settings.
    pub compute: ComputeConfig,
    /// Element type in which encoders publish rows; part of the fingerprint both sides must share.
    pub encoder_dtype: RowTypes,
    /// Precision in which encoders compute; part of the fingerprint too.
    pub encoder_precision: Precision,
    /// Keys that verify outputs.
    pub mac_keys: MacKeys,
    /// Limits on requests.
    pub limits: Limits,
    /// Bytes of encoder outputs in memory: those of requests, and those kept for later ones. A request waits for room.
    pub ec_cache_bytes: usize,
    /// Sizes of each model's engine.
    pub engine: EngineSettings,
    /// Bytes of memory to divide among weights, activations, caches and encoder outputs; `None`: sizes are those set.
    pub memory_bytes: Option<usize>,
    /// Program that tries out a request's grammar before it is compiled here.
    pub grammar_trial: TrialProgram,
    /// Services colocated with this one, such as encoders; `None`: none.
    pub colocated: Option<MakeColocated>,
    /// Compute arbiter between engines and colocated encoders; `None`: no encoders.
    pub arbiter: Option<ComputeArbiter>,
    /// Requests that are being started, for this process's successor.
    pub journal: StartJournal,
    /// Watches steps, and work on blocking threads.
    pub watchdog: Watchdog,
    /// Called on an engine's thread with each sequence that starts. `None` outside tests, which plant faults with it.
    pub fault: Option<SequenceHook>,
}

/// Makes the colocated services over the connector whose rows they share.
pub type MakeColocated = Box<dyn FnOnce(WorkerRole) -> ColocatedFuture + Send>;
/// Result of [`MakeColocated`].
pub type ColocatedFuture =
    BoxFuture<'static, Result<ColocatedServices, Box<dyn std::error::Error + Send + Sync>>>;

/// The worker cannot start, or ended by itself.
#[derive(Debug, Error)]
pub enum PdError {
    /// A model that cannot be served.
    #[error("cannot load the decoder of {dir}: {source}")]
    Model {
        /// Model directory.
        dir: String,
        /// Cause.
        source: ModelError,
    },
    /// An adapter that cannot be served.
    #[error("cannot load the adapter {name}: {source}")]
    Adapter {
        /// Its name.
        name: String,
        /// Cause.
        source: ModelError,
    },
    /// An adapter whose name is taken, or whose base model is not served or not said.
    #[error("adapter {name}: {message}")]
    AdapterName {
        /// Its name.
        name: String,
        /// The fault.
        message: String,
    },
    /// Memory that cannot be divided.
    #[error("{0}")]
    Memory(String),
    /// An engine that cannot be made.
    #[error("engine of {model}: {source}")]
    Engine {
        /// Model name.
        model: String,
        /// Cause.
        source: EngineError,
    },
    /// End of the gRPC server.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The system refused a thread for an engine.
    #[error("cannot start an engine thread: {0}")]
    Thread(#[from] std::io::Error),
    /// A loading thread panicked.
    #[error("loading ended early: {0}")]
    Loading(#[from] tokio::task::JoinError),
    /// The colocated services cannot start.
    #[error("cannot start the colocated services: {0}")]
    Colocated(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An engine panicked: our bug. The process must be replaced.
    #[error("an engine panicked")]
    EngineDied,
}

/// Runs the worker until it is drained. The future is boxed, so that its code is generated in this crate, not in every
/// binary.
///
/// # Errors
/// [`PdError`] if it cannot start, or its server or an engine ends by itself.
pub fn run(
    config: PdConfig,
    drain: Drain,
    metrics: MetricsRegistry,
) -> BoxFuture<'static, Result<(), PdError>> {
    Box::pin(run_to_drain(config, drain, metrics))
}

async fn run_to_drain(config: PdConfig, drain: Drain, metrics: MetricsRegistry) -> Result<(), PdError> {
    let memory = memory_settings(&config)?;
    let plan = divided(memory.as_ref(), &config.models)?;
    let cache_bytes = plan.as_ref().map_or(config.ec_cache_bytes, |plan| plan.rows.max(1));
    let loader = DecoderLoader::new(&config, plan.as_ref());
    let readiness = Readiness::new(drain.clone());
    let families = MetricFamilies::new(&metrics);
    let ec_meters = Arc::new(EcMeters::new(&metrics));
    let row_meters = RowMeters::new(&metrics);
    let arbiter = config.arbiter.map(|arbiter| (ArbiterMeters::new(&metrics), arbiter));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics), &drain);
    }
    let loads = EcLoads::new(
        config.store.clone(),
        ec_meters,
        row_meters,
        &config.dialer,
        LoadSettings { limits: config.limits.clone(), mac_keys: config.mac_keys.clone(), cache_bytes },
    );
    let Some(loaded) = load_all(&loader, config.models, &drain).await? else { return Ok(()) };
    let encodes = config.colocated.is_some();
    let colocated = colocated_services(config.colocated, &loads).await?;
    let died = CancellationToken::new();
    let starter = EngineStarter {
        max_live: config.engine.max_live(),
        families: families.clone(),
        arbiter,
        died: died.clone(),
        abort: drain.abort_token(),
        watchdog: config.watchdog.clone(),
        fault: config.fault,
        pool: CompilePool::new(config.grammar_trial, drain.tasks()),
        tool_syntax: config.tool_syntax,
    };
    let models = start_all(loaded, &starter, &loads)?;
    let updates = ModelUpdates::new(config.model_updates, loader, starter, memory);
    let journal = config.journal;
    let max_requests = config.engine.max_requests.min(Semaphore::MAX_PERMITS);
    let state = Arc::new(PdWorkerState {
        worker_id: config.worker_id,
        encodes,
        colocated_load: colocated.load(),
        models,
        updates,
        lora: config.lora,
        adapter_updates: Mutex::default(),
        loads: loads.clone(),
        store: config.store,
        limits: config.limits.clone(),
        request_permits: Arc::new(Semaphore::new(max_requests)),
        max_requests,
        unknown: families.of_model("unknown"),
        drain: drain.clone(),
        journal: journal.clone(),
        watchdog: config.watchdog,
    });
    let colocated = colocated.with(WorkerAdmin::service(state.clone()));
    let service = PrefillDecodeWorkerServer::new(PdService::new(state))
        .max_decoding_message_size(config.limits.max_body_bytes);
    let mut serving = pin!(serve_colocated(service, colocated, config.grpc, readiness, drain.clone()));
    tokio::select! {
        ended = &mut serving => ended?,
        () = died.cancelled() => return Err(engine_died(&journal)),
    }
    loads.drain().await;
    Ok(())
}

/// Loads the models; `None`: the process was stopped meanwhile.
async fn load_all(
    loader: &DecoderLoader,
    models: Vec<ModelSource>,
    drain: &Drain,
) -> Result<Option<Vec<LoadedDecoder>>, PdError> {
    let loader = loader.clone();
    let loading = tokio::task::spawn_blocking(move || loader.load_all(&models));
    tokio::select! {
        loaded = loading => Ok(Some(loaded??)),
        // The loading thread is not in the drain group: draining need not wait for weights that are then
        // dropped.
        () = drain.stopping() => Ok(None),
    }
}

/// Starts the engines, which receive the loads of their items.
fn start_all(
    loaded: Vec<LoadedDecoder>,
    starter: &EngineStarter,
    loads: &EcLoads,
) -> std::io::Result<ServedModels> {
    let models = ServedModels::default();
    for loaded in loaded {
        let (name, served) = starter.start(loaded)?;
        loads.attach(&served.driver);
        models.insert(name, served);
    }
    Ok(models)
}

/// The division of a stated memory, which the log has.
fn divided(memory: Option<&MemorySettings>, models: &[ModelSource]) -> Result<Option<MemoryPlan>, PdError> {
    let plan = memory.map(|memory| memory.plan(models)).transpose()?;
    if let Some(plan) = &plan {
        tracing::info!("memory {plan}");
    }
    Ok(plan)
}

/// Settings by which a stated memory is divided; `None`: none is stated.
fn memory_settings(config: &PdConfig) -> Result<Option<MemorySettings>, PdError> {
    let Some(total) = config.memory_bytes else { return Ok(None) };
    if let Some(draft) = config.drafts.first() {
        let dir = draft.dir.display();
        let text = format!("--memory-mib does not count draft models, here {dir}: size caches by --kv-mib");
        return Err(PdError::Memory(text));
    }
    Ok(Some(MemorySettings {
        total,
        compute: config.compute,
        rows: config.encoder_dtype.clone(),
        engine: config.engine,
        encodes: config.colocated.is_some(),
    }))
}

async fn colocated_services(
    make: Option<MakeColocated>,
    loads: &EcLoads,
) -> Result<ColocatedServices, PdError> {
    match make {
        None => Ok(ColocatedServices::default()),
        Some(make) => make(loads.worker()).await.map_err(PdError::Colocated),
    }
}

/// End of a worker whose engine panicked. Its requests end with the process, and other workers go on with them; those
/// that it was starting stay written down.
fn engine_died(journal: &StartJournal) -> PdError {
    journal.keep();
    PdError::EngineDied
}
