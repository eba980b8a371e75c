//! The PD worker's process: load, serve, drain.

use crate::adapters::{ServedAdapter, ServedAdapters};
use crate::driver::{Arbitration, Driver, DriverSetup, SequenceHook};
use crate::engine_settings::{CrossShortage, EngineSettings};
use crate::grammar::{CompilePool, GrammarCompiler, TrialProgram};
use crate::loads::EcLoads;
use crate::meters::{ArbiterMeters, EcMeters, MetricFamilies};
use crate::service::PdService;
use crate::state::{PdWorkerState, ServedDecoder};
use crate::warm::warm_up;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::SystemTime;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use triptych_core::limits::Limits;
use triptych_core::prompt::{ChatFormat, ToolSyntax};
use triptych_core::{Fingerprint, Modality, ModelName, RowTypes, WorkerId};
use triptych_ec::connector::WorkerRole;
use triptych_ec::object::MacKeys;
use triptych_ec::store::EcStore;
use triptych_engine::constraint::Constraints;
use triptych_engine::{Engine, EngineError, Pipelining, Speculation};
use triptych_models::compute::{Compute, ComputeConfig, Precision};
use triptych_models::decoder::Decoder;
use triptych_models::lora::{EncoderModules, LoraAdapter, LoraSettings, LoraSource};
use triptych_models::prompt::ChatTemplate;
use triptych_models::{Model, ModelError, ModelSource};
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::compute_arbiter::ComputeArbiter;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::{ColocatedServices, ServeError, serve_colocated};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;
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
    /// Sizes of each model's engine.
    pub engine: EngineSettings,
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
    let loader = DecoderLoader::new(&config);
    let readiness = Readiness::new(drain.clone());
    let families = MetricFamilies::new(&metrics);
    let ec_meters = Arc::new(EcMeters::new(&metrics));
    let arbiter = config.arbiter.map(|arbiter| (ArbiterMeters::new(&metrics), arbiter));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics), &drain);
    }
    let loads = EcLoads::new(
        config.store.clone(),
        ec_meters,
        config.limits.clone(),
        &config.dialer,
        config.mac_keys.clone(),
    );
    let loading = tokio::task::spawn_blocking(move || loader.load_all(&config.models));
    let loaded = tokio::select! {
        loaded = loading => loaded??,
        // The loading thread is not in the drain group: draining need not wait for weights that are then
        // dropped.
        () = drain.stopping() => return Ok(()),
    };
    let encodes = config.colocated.is_some();
    let colocated = colocated_services(config.colocated, &loads).await?;
    let died = CancellationToken::new();
    let starter = EngineStarter {
        max_live: config.engine.max_live(),
        families: families.clone(),
        arbiter,
        died: died.clone(),
        watchdog: config.watchdog.clone(),
        fault: config.fault,
        pool: CompilePool::new(config.grammar_trial, drain.tasks()),
        tool_syntax: config.tool_syntax,
    };
    let models = starter.start_all(loaded)?;
    loads.attach(models.values().map(|m| m.driver.clone()).collect());
    let journal = config.journal;
    let max_requests = config.engine.max_requests.min(Semaphore::MAX_PERMITS);
    let service = PdService::new(PdWorkerState {
        worker_id: config.worker_id,
        encodes,
        colocated_load: colocated.load(),
        models,
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
    let service =
        PrefillDecodeWorkerServer::new(service).max_decoding_message_size(config.limits.max_body_bytes);
    let mut serving = pin!(serve_colocated(service, colocated, config.grpc, readiness, drain.clone()));
    tokio::select! {
        ended = &mut serving => ended?,
        () = died.cancelled() => return Err(engine_died(&journal)),
    }
    loads.drain().await;
    Ok(())
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

struct DecoderLoader {
    compute: ComputeConfig,
    /// Element type and precision of the encoders, parts of their fingerprints.
    dtype: RowTypes,
    precision: Precision,
    engine: EngineSettings,
    drafts: Vec<ModelSource>,
    lora: LoraSettings,
    /// True if no encoder of this process computes. Beside encoders nothing is submitted ahead: the device is the engine's in
    /// its steps alone.
    has_device_alone: bool,
}

/// A model and its decoder.
struct LoadedWeights {
    model: Model,
    compute: Compute,
    decoder: Box<dyn Decoder>,
    /// Fingerprints of the encoders whose outputs it takes.
    encoders: BTreeMap<Modality, Fingerprint>,
}

/// A model with an engine, before its thread is started.
struct LoadedDecoder {
    model: Model,
    engine: Engine,
    /// Width of the logits.
    vocab: usize,
    encoders: BTreeMap<Modality, Fingerprint>,
    /// Its adapters by name.
    adapters: Vec<(String, ServedAdapter)>,
    /// Layers of its encoder that adapters may have a part for.
    encoder_modules: EncoderModules,
}

impl DecoderLoader {
    fn new(config: &PdConfig) -> Self {
        Self {
            compute: config.compute,
            dtype: config.encoder_dtype.clone(),
            precision: config.encoder_precision,
            engine: config.engine,
            drafts: config.drafts.clone(),
            lora: config.lora.clone(),
            has_device_alone: config.arbiter.is_none(),
        }
    }

    fn load_all(&self, sources: &[ModelSource]) -> Result<Vec<LoadedDecoder>, PdError> {
        let weights = |source: &ModelSource| self.weights(source).map_err(Self::failed(source));
        // All weights first: caches take what they leave.
        let loaded: Vec<LoadedWeights> = sources.iter().map(weights).collect::<Result<_, _>>()?;
        let free = match (loaded.last(), sources.last()) {
            (Some(last), Some(source)) => last.compute.free_device_bytes().map_err(Self::failed(source))?,
            _ => None,
        };
        self.check_adapters(&loaded)?;
        let n_models = loaded.len();
        loaded.into_iter().map(|weights| self.load(weights, free.map(|free| (free, n_models)))).collect()
    }

    /// Refuses adapters whose name is taken, or whose base model is not served or not said.
    fn check_adapters(&self, loaded: &[LoadedWeights]) -> Result<(), PdError> {
        let served = |name: &str| loaded.iter().any(|weights| weights.model.name().as_str() == name);
        let mut names = BTreeSet::new();
        for LoraSource { name, model, .. } in &self.lora.adapters {
            let message = match model {
                _ if served(name) => "a model has this name".to_owned(),
                _ if !names.insert(name) => "two adapters have this name".to_owned(),
                Some(model) if !served(model) => format!("its base model {model} is not served"),
                None if loaded.len() != 1 => "name its base model, as in --lora MODEL:NAME=DIR".to_owned(),
                _ => continue,
            };
            return Err(PdError::AdapterName { name: name.clone(), message });
        }
        Ok(())
    }

    fn failed(source: &ModelSource) -> impl FnOnce(ModelError) -> PdError {
        let dir = source.dir.display().to_string();
        move |source| PdError::Model { dir, source }
    }

    /// Makes the engine. `device`: bytes free on the device, and models that share them.
    fn load(
        &self,
        LoadedWeights { model, compute, mut decoder, encoders }: LoadedWeights,
        device: Option<(usize, usize)>,
    ) -> Result<LoadedDecoder, PdError> {
        let info = decoder.info();
        let max_rows = model.max_cross_rows();
        let settings = match device {
            Some((free, n_models)) => self.engine.on_device(free, n_models, &info),
            None => self.engine,
        };
        let mut config = settings.for_decoder(&info, max_rows);
        if let Some(shortage) = CrossShortage::of(&config, &info, max_rows) {
            tracing::warn!(model = %model.name(), "{shortage}");
        }
        if self.has_device_alone && matches!(compute, Compute::Cuda(_)) {
            config.pipelining = Pipelining::On;
        }
        let draft = self.drafts.iter().find(|draft| draft.name.as_ref() == Some(model.name()));
        if draft.is_some() {
            config.speculation = Speculation::DraftModel { n_tokens: self.engine.draft_tokens };
        }
        decoder.use_graphs(settings.graphs());
        let refused = |source| PdError::Engine { model: model.name().to_string(), source };
        let mut engine = Engine::new(decoder, model.tokenizer().clone(), config).map_err(refused)?;
        if let Some(draft) = draft {
            let decoder = self.draft(draft).map_err(Self::failed(draft))?;
            let kv = settings.for_decoder(&decoder.info(), max_rows).kv;
            engine = engine.with_draft_model(decoder, kv).map_err(refused)?;
        }
        let encoder_modules = self.encoder_modules(&model).map_err(Self::failed(model.source()))?;
        let adapters = self.load_adapters(&mut engine, model.name(), &encoder_modules)?;
        if let Err(failure) = warm_up(&mut engine, &info) {
            tracing::warn!(model = %model.name(), %failure, "the warm-up request failed; serving all the same");
        }
        Ok(LoadedDecoder { model, engine, vocab: info.vocab, encoders, adapters, encoder_modules })
    }

    /// Layers of a model's encoder that adapters may have a part for; none where no adapter is ever loaded.
    fn encoder_modules(&self, model: &Model) -> Result<EncoderModules, ModelError> {
        if self.lora.is_used() { model.encoder_modules() } else { Ok(EncoderModules::default()) }
    }

    /// Loads the adapters of a model; returns them by name.
    fn load_adapters(
        &self,
        engine: &mut Engine,
        model: &ModelName,
        modules: &EncoderModules,
    ) -> Result<Vec<(String, ServedAdapter)>, PdError> {
        let own = self.lora.adapters.iter().filter(|source| source.is_of(model.as_str()));
        let load = |source: &LoraSource| {
            let failed = |error| PdError::Adapter { name: source.name.clone(), source: error };
            let adapter = LoraAdapter::open(&source.dir, self.lora.max_rank).map_err(failed)?;
            let parts = modules.split(adapter);
            engine.load_adapter(&parts.decoder).map_err(failed)?;
            tracing::info!(%model, adapter = %source.name, id = ?parts.id(), "adapter loaded");
            Ok((source.name.clone(), ServedAdapter::of(&parts)))
        };
        own.map(load).collect()
    }

    fn draft(&self, source: &ModelSource) -> Result<Box<dyn Decoder>, ModelError> {
        Compute::new(self.compute)?.load_decoder(&Model::open(source)?)
    }

    fn weights(&self, source: &ModelSource) -> Result<LoadedWeights, ModelError> {
        let compute = Compute::new(self.compute)?;
        let model = Model::open(source)?;
        let dtype = self.dtype.of(model.name().as_str());
        let fingerprint = |&m| Ok((m, model.fingerprint_in(m, dtype, self.precision)?));
        let encoders = model.modalities().iter().map(fingerprint).collect::<Result<_, ModelError>>()?;
        let decoder = compute.load_decoder(&model)?;
        Ok(LoadedWeights { model, compute, decoder, encoders })
    }
}

/// Common parts of the engines' threads.
struct EngineStarter {
    max_live: usize,
    families: MetricFamilies,
    arbiter: Option<(ArbiterMeters, ComputeArbiter)>,
    died: CancellationToken,
    watchdog: Watchdog,
    fault: Option<SequenceHook>,
    pool: CompilePool,
    tool_syntax: Option<ToolSyntax>,
}

impl EngineStarter {
    /// Format of a template's conversations, with the syntax of calls that is set.
    fn format_of(&self, template: &ChatTemplate) -> ChatFormat {
        let format = template.format();
        ChatFormat { tool_syntax: self.tool_syntax.or(format.tool_syntax), ..format }
    }

    /// Starts the engines; returns the models by name.
    fn start_all(&self, loaded: Vec<LoadedDecoder>) -> std::io::Result<HashMap<String, ServedDecoder>> {
        let mut models = HashMap::new();
        for model in loaded {
            let name = model.model.name().to_string();
            models.insert(name.clone(), model.start(self)?);
            tracing::info!(model = %name, "decoder ready");
        }
        Ok(models)
    }
}

impl LoadedDecoder {
    fn start(self, with: &EngineStarter) -> std::io::Result<ServedDecoder> {
        let Self { model, engine, vocab, encoders, adapters, encoder_modules } = self;
        let max_live = with.max_live;
        let died = with.died.clone();
        let meters = with.families.of_model(model.name().as_str());
        let arbitration = with.arbiter.as_ref().map(|(meters, arbiter)| Arbitration::new(arbiter, meters));
        let setup = DriverSetup {
            engine,
            adapter_names: adapters.iter().map(|(name, adapter)| (adapter.id, name.clone())).collect(),
            meters: meters.clone(),
            arbitration,
            watchdog: with.watchdog.clone(),
            fault: with.fault.clone(),
        };
        Ok(ServedDecoder {
            family: model.family().to_owned(),
            chat: model.prompts().chat_template().map(|template| with.format_of(template)),
            prompts: model.prompts(),
            tokenizer: model.tokenizer().clone(),
            grammars: GrammarCompiler::new(
                Constraints::new(model.tokenizer().clone(), vocab),
                with.pool.clone(),
            ),
            adapters: ServedAdapters::new(adapters),
            encoder_modules,
            driver: Driver::spawn(model.name().as_str(), setup, died)?,
            meters,
            encoders,
            encoder_takes_prompt: model.preprocess().takes_prompt(),
            max_context: model.max_context(),
            created: SystemTime::now(),
            sequence_permits: Arc::new(Semaphore::new(max_live)),
            max_live,
        })
    }
}
