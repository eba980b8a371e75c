//! The encoder worker's process: load, serve, drain.

use crate::batcher::{BatchLimits, BatcherConfig};
use crate::error::EncoderError;
use crate::fences::FenceTable;
use crate::job::EncoderWorkerState;
use crate::loader::{LoadSettings, LoadedModel, WithoutEncoder};
use crate::memory::{EncoderMemory, MemorySettings, Rooms};
use crate::meters::EncoderMeters;
use crate::pool::{ItemHook, PoolConfig, PreprocessPool};
use crate::served::ServedEncoders;
use crate::service::EncoderService;
use crate::towers::TowerChoice;
use crate::updates::ModelUpdates;
use crate::upkeep;
use crate::weights::WeightsPolicy;
use futures::future::BoxFuture;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use triptych_core::limits::Limits;
use triptych_core::{RowTypes, WorkerId};
use triptych_ec::connector::{ConnectorSettings, Publish, WorkerRole, connect};
use triptych_ec::object::MacKeys;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::EcStore;
use triptych_ec::store::peer::{PeerCache, PeerCacheSettings};
use triptych_models::ModelSource;
use triptych_models::compute::ComputeConfig;
use triptych_models::encoder::EncoderGraphConfig;
use triptych_models::lora::LoraSettings;
use triptych_proto::v1::encoder_worker_server::EncoderWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::compute_arbiter::ComputeArbiter;
use triptych_runtime::core_share::CoreShare;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::{ColocatedServices, serve_colocated};
use triptych_runtime::single_flight::SingleFlight;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;
use triptych_runtime::worker_admin::WorkerAdmin;
use triptych_runtime::{Drain, MetricsRegistry};

/// Settings of an encoder worker.
pub struct EncoderConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Listener for gRPC.
    pub grpc: Listener,
    /// Listener for `/metrics` and the probes; `None`: none.
    pub admin: Option<TcpListener>,
    /// Models to serve.
    pub models: Vec<ModelSource>,
    /// Towers to hold, of models in which several read the same item.
    pub towers: TowerChoice,
    /// LoRA adapters, and limits on them. Those of other models, and of decoders alone, are left to the PD workers.
    pub lora: LoraSettings,
    /// Directory below which operators may name models to load; `None`: models are those of the start.
    pub model_updates: Option<PathBuf>,
    /// Store for encoder outputs.
    pub store: Arc<dyn EcStore>,
    /// Compute settings.
    pub compute: ComputeConfig,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// Keys that sign outputs.
    pub mac_keys: MacKeys,
    /// Limits on items.
    pub limits: Limits,
    /// Forwards that a GPU captures as graphs; `None`: none. The CPU has none.
    pub graphs: Option<EncoderGraphConfig>,
    /// Bounds of a batch.
    pub batch: BatchLimits,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Jobs admitted at once, waiting ones included; one more is Overloaded. Default 256.
    pub max_jobs: usize,
    /// Items preprocessed at once. Default: the machine's cores.
    pub preprocess_threads: usize,
    /// Budget for the cache of published rows, in bytes. A cached item is not encoded again, and is published
    /// again if the store lost it. Default 256 MiB; 0: no cache.
    pub rows_budget_bytes: usize,
    /// Memory to divide among weights, activations, jobs and cached rows, in bytes; `None`: each takes what it takes.
    pub memory_bytes: Option<usize>,
    /// `host:port` at which PD workers reach this worker to read outputs from its memory. `None`: they read from
    /// the store only, and a job is done when the store has its output.
    pub advertise: Option<String>,
    /// Settings of the outputs held in memory. Used with `advertise`.
    pub peer_cache: PeerCacheSettings,
    /// Requests whose items are being encoded, for this process's successor.
    pub journal: StartJournal,
    /// Watches preprocessing and forwards.
    pub watchdog: Watchdog,
    /// Called with each item before it is preprocessed. `None` outside tests, which plant faults with it.
    pub fault: Option<ItemHook>,
}

/// Settings of encoders in a process that has a server and a connector of its own.
pub struct EmbeddedConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Models to serve.
    pub models: Vec<ModelSource>,
    /// Towers to hold, of models in which several read the same item.
    pub towers: TowerChoice,
    /// LoRA adapters, and limits on them. Those of other models, and of decoders alone, are left to the PD workers.
    pub lora: LoraSettings,
    /// Directory below which operators may name models to load; `None`: models are those of the start.
    pub model_updates: Option<PathBuf>,
    /// Store below the connector, for the description.
    pub store: Arc<dyn EcStore>,
    /// Compute settings; an engine beside it takes the same threads in turn.
    pub compute: ComputeConfig,
    /// Presence of weights.
    pub weights: WeightsPolicy,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// Limits on items.
    pub limits: Limits,
    /// Forwards that a GPU captures as graphs; `None`: none. The CPU has none.
    pub graphs: Option<EncoderGraphConfig>,
    /// Bounds of a batch.
    pub batch: BatchLimits,
    /// Bound on its memory.
    pub memory: EncoderMemory,
    /// Compute arbiter shared with the engines of the process; `None`: no engines.
    pub arbiter: Option<ComputeArbiter>,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Jobs admitted at once, waiting ones included; one more is Overloaded. Default 256.
    pub max_jobs: usize,
    /// Items preprocessed at once. Default: the machine's cores.
    pub preprocess_threads: usize,
    /// Peer cache of the connector, and the address at which others read from it; `None`: from the store only.
    pub peer_cache: Option<(Arc<PeerCache>, String)>,
    /// Requests whose items are being encoded, for this process's successor.
    pub journal: StartJournal,
    /// Watches preprocessing and forwards.
    pub watchdog: Watchdog,
    /// Called with each item before it is preprocessed. `None` outside tests, which plant faults with it.
    pub fault: Option<ItemHook>,
}

/// The encoders' service, for a process that serves it beside its own. Outputs are published, and stay in
/// `connector`'s rows, so that loads through it find them at once.
///
/// # Errors
/// [`EncoderError`] for a model that cannot be served.
pub fn embedded(
    config: EmbeddedConfig,
    connector: WorkerRole,
    drain: Drain,
    metrics: MetricsRegistry,
) -> BoxFuture<'static, Result<ColocatedServices, EncoderError>> {
    Box::pin(load_embedded(config, connector, drain, metrics))
}

async fn load_embedded(
    config: EmbeddedConfig,
    connector: WorkerRole,
    drain: Drain,
    metrics: MetricsRegistry,
) -> Result<ColocatedServices, EncoderError> {
    let meters = Arc::new(EncoderMeters::new(&metrics));
    // Nothing is served while it loads.
    let service = config.load(connector, meters, drain, WithoutEncoder::LeftOut).await?;
    Ok(service.map_or_else(ColocatedServices::default, |(service, state)| {
        let weights = Arc::clone(&state);
        let begin = move || weights.load_weights();
        ColocatedServices::default().with(service).with_load(move || state.report()).with_weights(begin)
    }))
}

/// Runs the worker until it is drained. The future is boxed, so that its code is generated in this crate, not in every
/// binary.
///
/// # Errors
/// [`EncoderError`] if it cannot start, or its server ends by itself.
pub fn run(
    config: EncoderConfig,
    drain: Drain,
    metrics: MetricsRegistry,
) -> BoxFuture<'static, Result<(), EncoderError>> {
    Box::pin(run_to_drain(config, drain, metrics))
}

async fn run_to_drain(
    config: EncoderConfig,
    drain: Drain,
    metrics: MetricsRegistry,
) -> Result<(), EncoderError> {
    let readiness = Readiness::new(drain.clone());
    let meters = Arc::new(EncoderMeters::new(&metrics));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics), &drain);
    }
    let peer_cache =
        config.advertise.map(|at| (Arc::new(PeerCache::new(config.peer_cache, &config.limits)), at));
    let mut beside = ColocatedServices::default();
    if let Some((peer_cache, _)) = &peer_cache {
        beside = beside.with(EcObjectsService::into_server(peer_cache.clone(), &config.limits));
    }
    let publish = peer_cache
        .as_ref()
        .map_or(Publish::WriteThrough, |(peer_cache, _)| Publish::WriteBehind(peer_cache.clone()));
    let settings = ConnectorSettings {
        limits: config.limits.clone(),
        local_budget_bytes: config.rows_budget_bytes,
        publish,
        mac_keys: config.mac_keys,
        ..ConnectorSettings::default()
    };
    let (_, connector) = connect(config.store.clone(), meters.clone(), settings);
    let divided = |total| {
        EncoderMemory::Divided(MemorySettings {
            total,
            rows: config.rows_budget_bytes,
            compute: config.compute,
            dtype: config.dtype.clone(),
            towers: config.towers.clone(),
        })
    };
    let memory = config.memory_bytes.map_or(EncoderMemory::Unbounded, divided);
    let parts = EmbeddedConfig {
        worker_id: config.worker_id,
        models: config.models,
        towers: config.towers,
        lora: config.lora,
        model_updates: config.model_updates,
        store: config.store,
        compute: config.compute,
        weights: WeightsPolicy::Eager,
        dtype: config.dtype,
        limits: config.limits,
        graphs: config.graphs,
        batch: config.batch,
        memory,
        arbiter: None,
        cores: config.cores,
        max_jobs: config.max_jobs,
        preprocess_threads: config.preprocess_threads,
        peer_cache,
        journal: config.journal,
        watchdog: config.watchdog,
        fault: config.fault,
    };
    let loaded = parts.load(connector.clone(), meters, drain.clone(), WithoutEncoder::Refused).await?;
    let Some((service, state)) = loaded else { return Ok(()) };
    let beside = beside.with(WorkerAdmin::service(state, drain.clone()));
    serve_colocated(service, beside, config.grpc, readiness, drain).await?;
    connector.drain().await;
    Ok(())
}

impl EmbeddedConfig {
    /// Service and its state; `None` if the process was stopped while weights were loaded.
    async fn load(
        self,
        connector: WorkerRole,
        meters: Arc<EncoderMeters>,
        drain: Drain,
        without: WithoutEncoder,
    ) -> Result<Option<LoadedService>, EncoderError> {
        let settings = LoadSettings {
            compute: self.compute,
            dtype: self.dtype,
            graphs: self.graphs,
            without,
            lora: self.lora.clone(),
            towers: self.towers,
            is_bounded: !matches!(self.memory, EncoderMemory::Unbounded),
            weights: self.weights,
        };
        let loading = load_all(settings.clone(), self.memory, self.models, &drain).await?;
        let Some((models, Rooms { forwards, jobs, divided })) = loading else { return Ok(None) };
        let arbiter = self.arbiter.as_ref().map(ComputeArbiter::encoder);
        let batcher = BatcherConfig {
            limits: self.batch,
            arbiter,
            cores: self.cores,
            watchdog: self.watchdog.clone(),
            room: forwards,
        };
        let served = ServedEncoders::of("encoder");
        for model in models {
            let (name, model) = model.start(&batcher, &meters).await?;
            tracing::info!(model = %name, "encoder ready");
            served.insert(name, Arc::new(model));
        }
        let updates = ModelUpdates {
            root: self.model_updates,
            loader: Arc::new(settings.of_named_models()),
            memory: divided,
            batcher,
            meters: meters.clone(),
            one_at_a_time: Mutex::default(),
        };
        let pool = PoolConfig {
            threads: self.preprocess_threads,
            max_jobs: self.max_jobs,
            order: self.batch.order,
            limits: self.limits.clone(),
            room: jobs,
            watchdog: self.watchdog,
            fault: self.fault,
        };
        let pool = PreprocessPool::new(pool, meters.clone(), drain.tasks().clone());
        let state = Arc::new(EncoderWorkerState {
            worker_id: self.worker_id,
            models: served,
            updates,
            lora: self.lora,
            adapter_updates: Mutex::default(),
            pool,
            connector,
            store: self.store,
            meters,
            drain: drain.clone(),
            in_flight: SingleFlight::new(drain.tasks().clone()),
            fences: FenceTable::default(),
            peer_cache: self.peer_cache,
            journal: self.journal,
        });
        upkeep::start(&state);
        let service = EncoderWorkerServer::new(EncoderService::new(state.clone()))
            .max_decoding_message_size(self.limits.max_item_bytes.saturating_add(1 << 20))
            .max_encoding_message_size(1 << 20);
        Ok(Some((service, state)))
    }
}

/// Divides the memory, then loads models; `None` if the process was stopped meanwhile.
async fn load_all(
    loader: LoadSettings,
    memory: EncoderMemory,
    sources: Vec<ModelSource>,
    drain: &Drain,
) -> Result<Option<(Vec<LoadedModel>, Rooms)>, EncoderError> {
    let loading = tokio::task::spawn_blocking(move || {
        let rooms = memory.rooms(&sources)?;
        Ok::<_, EncoderError>((loader.load_all(&sources)?, rooms))
    });
    tokio::select! {
        loaded = loading => Ok(Some(loaded??)),
        // The loading thread is not in the drain group: draining need not wait for weights that are then
        // dropped.
        () = drain.stopping() => {
            tracing::info!("stopped while weights were loaded");
            Ok(None)
        }
    }
}

/// Service of the encoders, and their state.
type LoadedService = (EncoderWorkerServer<EncoderService>, Arc<EncoderWorkerState>);
