//! The process: load, serve, drain.

use crate::batcher::{BatchLimits, Batcher, Rules};
use crate::fences::Fences;
use crate::job::{Encoders, ServedModel};
use crate::load::Load;
use crate::meters::Meters;
use crate::pool::PreprocessPool;
use crate::service::Service;
use crate::warm::warm_up;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;
use thiserror::Error;
use tokio::net::TcpListener;
use triptych_core::limits::Limits;
use triptych_core::{DType, RowTypes, WorkerId};
use triptych_ec::connector::{ConnectorSettings, Publish, WorkerRole, connect};
use triptych_ec::object::MacKeys;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::EcStore;
use triptych_ec::store::peer::{Shelf, ShelfSettings};
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::{Model, ModelError, ModelSource};
use triptych_proto::v1::encoder_worker_server::EncoderWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::door::Door;
use triptych_runtime::flights::Flights;
use triptych_runtime::serve::{Beside, ServeError, serve_beside};
use triptych_runtime::turnstile::Turnstile;
use triptych_runtime::{Drain, MetricsRegistry};

/// Settings of an encoder worker.
pub struct EncoderConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Where it answers gRPC.
    pub grpc: Door,
    /// Where it answers `/metrics` and the probes; `None`: nowhere.
    pub admin: Option<TcpListener>,
    /// What it serves.
    pub models: Vec<ModelSource>,
    /// Where encoder outputs go.
    pub store: Arc<dyn EcStore>,
    /// How it computes.
    pub compute: ComputeConfig,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// With which outputs are signed.
    pub mac_keys: MacKeys,
    /// Limits on items.
    pub limits: Limits,
    /// Bounds of a batch.
    pub batch: BatchLimits,
    /// Jobs admitted at once, waiting ones included; one more is Overloaded. Default 256.
    pub max_jobs: usize,
    /// Items preprocessed at once. Default: the machine's cores.
    pub preprocess_threads: usize,
    /// Rows that are kept after they were published, in bytes; an item that is asked for again meanwhile is not
    /// encoded again, and is published again if the store lost it. Default 256 MiB; 0: none.
    pub rows_budget_bytes: usize,
    /// `host:port` at which the PD workers reach this worker, to read outputs straight from its memory; `None`: they
    /// read them from the store only, and a job is done when the store has its output.
    pub advertise: Option<String>,
    /// What is held in memory for them. Used with `advertise`.
    pub shelf: ShelfSettings,
}

/// The worker cannot start, or its server ended.
#[derive(Debug, Error)]
pub enum EncoderError {
    /// A model directory cannot be served.
    #[error("cannot load the encoder of {dir}: {source}")]
    Model {
        /// The directory.
        dir: String,
        /// Why.
        source: ModelError,
    },
    /// The gRPC server ended.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A thread died while loading.
    #[error("loading ended early: {0}")]
    Loading(#[from] tokio::task::JoinError),
}

/// What encoders need to be held by a process that has a server and a connector of its own.
pub struct EmbeddedConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// What it serves.
    pub models: Vec<ModelSource>,
    /// The store below the connector, for its description.
    pub store: Arc<dyn EcStore>,
    /// How it computes; an engine beside it takes the same threads in turn.
    pub compute: ComputeConfig,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// Limits on items.
    pub limits: Limits,
    /// Bounds of a batch.
    pub batch: BatchLimits,
    /// Through which forwards take turns with the engines of the process; `None`: it has none.
    pub turnstile: Option<Turnstile>,
    /// Jobs admitted at once, waiting ones included; one more is Overloaded. Default 256.
    pub max_jobs: usize,
    /// Items preprocessed at once. Default: the machine's cores.
    pub preprocess_threads: usize,
    /// The shelf of the connector, and the address at which others read from it; `None`: from the store only.
    pub shelf: Option<(Arc<Shelf>, String)>,
}

/// The encoders' service, for a process that answers it beside its own. What they make stays in `connector`'s rows, so
/// whoever loads through it finds it there at once; and it is published.
///
/// # Errors
/// [`EncoderError`] for a model that cannot be served.
pub async fn embedded(
    config: EmbeddedConfig,
    connector: WorkerRole,
    drain: Drain,
    metrics: MetricsRegistry,
) -> Result<Beside, EncoderError> {
    let meters = Arc::new(Meters::new(&metrics));
    // Nothing is served while it loads.
    let service = config.load(connector, meters, drain).await?;
    Ok(service.map_or_else(Beside::default, |(service, load)| {
        Beside::default().with(service).with_load(move || load.report())
    }))
}

/// Runs the worker until it is drained.
///
/// # Errors
/// [`EncoderError`] if it cannot start, or its server ends by itself.
pub async fn run(config: EncoderConfig, drain: Drain, metrics: MetricsRegistry) -> Result<(), EncoderError> {
    let readiness = Readiness::new(drain.clone());
    let meters = Arc::new(Meters::new(&metrics));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics), &drain);
    }
    let shelf = config.advertise.map(|at| (Arc::new(Shelf::new(config.shelf, &config.limits)), at));
    let mut beside = Beside::default();
    if let Some((shelf, _)) = &shelf {
        beside = beside.with(EcObjectsService::into_server(shelf.clone(), &config.limits));
    }
    let publish = shelf.as_ref().map_or(Publish::Through, |(shelf, _)| Publish::Behind(shelf.clone()));
    let settings = ConnectorSettings {
        limits: config.limits.clone(),
        local_budget_bytes: config.rows_budget_bytes,
        publish,
        mac_keys: config.mac_keys,
        ..ConnectorSettings::default()
    };
    let (_, connector) = connect(config.store.clone(), meters.clone(), settings);
    let parts = EmbeddedConfig {
        worker_id: config.worker_id,
        models: config.models,
        store: config.store,
        compute: config.compute,
        dtype: config.dtype,
        limits: config.limits,
        batch: config.batch,
        turnstile: None,
        max_jobs: config.max_jobs,
        preprocess_threads: config.preprocess_threads,
        shelf,
    };
    let loaded = parts.load(connector.clone(), meters, drain.clone()).await?;
    let Some((service, _)) = loaded else { return Ok(()) };
    serve_beside(service, beside, config.grpc, readiness, drain).await?;
    connector.drain().await;
    Ok(())
}

impl EmbeddedConfig {
    /// The service and its load, or nothing if the process was told to stop while weights were loaded.
    async fn load(
        self,
        connector: WorkerRole,
        meters: Arc<Meters>,
        drain: Drain,
    ) -> Result<Option<(EncoderWorkerServer<Service>, Load)>, EncoderError> {
        let (compute, dtype, sources) = (self.compute, self.dtype, self.models);
        let loading = tokio::task::spawn_blocking(move || load_all(&sources, compute, &dtype));
        let models = tokio::select! {
            loaded = loading => loaded??,
            // What was loaded so far goes with the process.
            () = drain.stopping() => {
                tracing::info!("stopped while weights were loaded");
                return Ok(None);
            }
        };
        let gate = self.turnstile.as_ref().map(Turnstile::encoder);
        let rules = Rules { limits: self.batch, gate };
        let models = models.into_iter().map(|m| m.start(&rules, &meters)).collect::<HashMap<_, _>>();
        for name in models.keys() {
            tracing::info!(model = %name, "encoder ready");
        }
        let pool =
            PreprocessPool::new(self.preprocess_threads, self.max_jobs, self.limits.clone(), meters.clone());
        let load = pool.load().clone();
        let service = Service::new(Encoders {
            worker_id: self.worker_id,
            models,
            pool,
            connector,
            store: self.store,
            meters,
            drain: drain.clone(),
            flights: Flights::new(drain.tasks().clone()),
            fences: Fences::default(),
            shelf: self.shelf,
        });
        let service = EncoderWorkerServer::new(service)
            .max_decoding_message_size(self.limits.max_item_bytes.saturating_add(1 << 20))
            .max_encoding_message_size(1 << 20);
        Ok(Some((service, load)))
    }
}

/// A model whose weights are loaded and whose thread is not started.
struct Loaded {
    model: Model,
    encoders: Vec<LoadedEncoder>,
    dtype: DType,
}

struct LoadedEncoder {
    modality: triptych_core::Modality,
    fingerprint: triptych_core::Fingerprint,
    encoder: Box<dyn triptych_models::encoder::Encoder>,
}

fn load_all(
    sources: &[ModelSource],
    compute: ComputeConfig,
    dtype: &RowTypes,
) -> Result<Vec<Loaded>, EncoderError> {
    let failed = |source: &ModelSource| {
        let dir = source.dir.display().to_string();
        move |source| EncoderError::Model { dir, source }
    };
    let mut loaded = Vec::new();
    for source in sources {
        let compute = Compute::new(compute).map_err(failed(source))?;
        loaded.push(load(source, &compute, dtype).map_err(failed(source))?);
    }
    Ok(loaded)
}

fn load(source: &ModelSource, compute: &Compute, types: &RowTypes) -> Result<Loaded, ModelError> {
    let model = Model::open(source)?;
    let dtype = types.of(model.name().as_str());
    let mut encoders = Vec::new();
    for &modality in model.modalities() {
        let fingerprint = model.fingerprint_in(modality, dtype, compute.precision())?;
        let mut encoder = compute.load_encoder(&model, modality)?;
        warm_up(&mut *encoder, &*model.preprocess(), modality);
        encoders.push(LoadedEncoder { modality, fingerprint, encoder });
    }
    Ok(Loaded { model, encoders, dtype })
}

impl Loaded {
    fn start(self, rules: &Rules, meters: &Arc<Meters>) -> (String, ServedModel) {
        let name = self.model.name().to_string();
        let encoders = self.encoders.into_iter().map(|e| {
            let label = format!("{name}-{}", e.modality);
            (e.modality, (e.fingerprint, Batcher::spawn(label, e.encoder, rules.clone(), meters.clone())))
        });
        let served = ServedModel {
            family: self.model.family().to_owned(),
            preprocess: self.model.preprocess(),
            encoders: encoders.collect(),
            dtype: self.dtype,
            created: SystemTime::now(),
        };
        (name, served)
    }
}
