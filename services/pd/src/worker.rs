//! The PD worker's process: load, serve, drain.

use crate::coalesce::StreamTicks;
use crate::config::{MakeColocated, PdConfig};
use crate::error::PdError;
use crate::grammar::CompilePool;
use crate::loader::{DecoderLoader, EngineStarter, LoadedDecoder};
use crate::loads::{EcLoads, LoadSettings};
use crate::memory_needs::MemorySettings;
use crate::memory_plan::MemoryPlan;
use crate::meters::{ArbiterMeters, EcMeters, MetricFamilies, RowMeters};
use crate::served::ServedModels;
use crate::service::PdService;
use crate::state::PdWorkerState;
use crate::updates::ModelUpdates;
use futures::future::BoxFuture;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use triptych_models::ModelSource;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::serve::{ColocatedServices, serve_colocated};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::worker_admin::WorkerAdmin;
use triptych_runtime::{Drain, MetricsRegistry};

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
    let room = plan.as_ref().and_then(MemoryPlan::room_of_encodes);
    let cache_bytes = plan.as_ref().map_or(config.ec_cache_bytes, |plan| plan.rows.max(1));
    let loader = DecoderLoader::new(&config, plan.as_ref());
    let readiness = Readiness::new(drain.clone());
    let families = MetricFamilies::new(&metrics);
    let ec_meters = Arc::new(EcMeters::new(&metrics));
    let arbiter = config.arbiter.map(|arbiter| (ArbiterMeters::new(&metrics), arbiter));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics.clone()), &drain);
    }
    let loads = EcLoads::new(
        config.store.clone(),
        ec_meters,
        RowMeters::new(&metrics),
        &config.dialer,
        LoadSettings { limits: config.limits.clone(), mac_keys: config.mac_keys.clone(), cache_bytes },
    );
    let Some(loaded) = load_all(&loader, config.models, &drain).await? else { return Ok(()) };
    let encodes = config.colocated.is_some();
    let colocated = colocated_services(config.colocated, &loads, room).await?;
    let died = CancellationToken::new();
    let starter = EngineStarter {
        max_live: config.engine.max_live(),
        families: families.clone(),
        arbiter,
        cores: config.cores,
        died: died.clone(),
        abort: drain.abort_token(),
        watchdog: config.watchdog.clone(),
        fault: config.fault,
        pool: CompilePool::new(config.grammar_trial, drain.tasks()),
        tool_syntax: config.tool_syntax,
    };
    let models = start_all(loaded, &starter, &loads)?;
    let updates = ModelUpdates::new(config.model_updates, loader, starter, memory);
    let max_requests = config.engine.max_requests.min(Semaphore::MAX_PERMITS);
    let state = Arc::new(PdWorkerState {
        worker_id: config.worker_id,
        encodes,
        colocated_load: colocated.load(),
        colocated_weights: colocated.weights(),
        models,
        updates,
        lora: config.lora,
        adapter_updates: Mutex::default(),
        loads: loads.clone(),
        store: config.store,
        limits: config.limits.clone(),
        request_permits: Arc::new(Semaphore::new(max_requests)),
        max_requests,
        stream_ticks: StreamTicks::new(Instant::now(), config.engine.stream_interval),
        unknown: families.of_model("unknown"),
        drain: drain.clone(),
        journal: config.journal.clone(),
        watchdog: config.watchdog,
    });
    let colocated = colocated.with(WorkerAdmin::service(state.clone(), drain.clone()));
    let service = PrefillDecodeWorkerServer::new(PdService::new(state))
        .max_decoding_message_size(config.limits.max_body_bytes);
    let mut serving = pin!(serve_colocated(service, colocated, config.grpc, readiness, drain.clone()));
    tokio::select! {
        ended = &mut serving => ended?,
        () = died.cancelled() => return Err(engine_died(&config.journal)),
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
    let models = ServedModels::of("worker");
    for loaded in loaded {
        let (name, served) = starter.start(loaded)?;
        loads.attach(&served.driver);
        models.insert(name, Arc::new(served));
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
        encoders: config.encoder_memory,
    }))
}

async fn colocated_services(
    make: Option<MakeColocated>,
    loads: &EcLoads,
    room: Option<usize>,
) -> Result<ColocatedServices, PdError> {
    match make {
        None => Ok(ColocatedServices::default()),
        Some(make) => make(loads.worker(), room).await.map_err(PdError::Colocated),
    }
}

/// End of a worker whose engine panicked. Its requests end with the process, and other workers go on with them; those
/// that it was starting stay written down.
fn engine_died(journal: &StartJournal) -> PdError {
    journal.keep();
    PdError::EngineDied
}
