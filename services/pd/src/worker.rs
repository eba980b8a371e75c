//! The process: load, serve, drain.

use crate::driver::{Driver, Turns};
use crate::loads::Loads;
use crate::meters::{EcMeters, Families, TurnMeters};
use crate::service::{ServedModel, Service, Worker};
use crate::warm::warm_up;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::SystemTime;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use triptych_core::limits::Limits;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{RowTypes, WorkerId};
use triptych_ec::connector::WorkerRole;
use triptych_ec::object::MacKeys;
use triptych_ec::store::EcStore;
use triptych_engine::constraint::Constraints;
use triptych_engine::draft::PromptLookup;
use triptych_engine::{Engine, EngineConfig, EngineError, KvBudget, Speculation};
use triptych_models::compute::{Compute, ComputeConfig, Precision};
use triptych_models::decoder::{Decoder, DecoderInfo};
use triptych_models::{Model, ModelError, ModelSource};
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorkerServer;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::door::Door;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::serve::{Beside, ServeError, serve_beside};
use triptych_runtime::turnstile::Turnstile;
use triptych_runtime::{Drain, MetricsRegistry};

/// Settings of a PD worker.
pub struct PdConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Where it answers gRPC.
    pub grpc: Door,
    /// Where it answers `/metrics` and the probes; `None`: nowhere.
    pub admin: Option<TcpListener>,
    /// What it serves.
    pub models: Vec<ModelSource>,
    /// Smaller models of the same families that guess ahead, each under the name of the model it helps.
    pub drafts: Vec<ModelSource>,
    /// Where encoder outputs come from.
    pub store: Arc<dyn EcStore>,
    /// Makes channels to the encoder workers that hold outputs in memory.
    pub dialer: Dialer,
    /// How it computes.
    pub compute: ComputeConfig,
    /// Element type in which encoders publish rows; part of the fingerprint both sides must share.
    pub encoder_dtype: RowTypes,
    /// In what encoders compute; part of the fingerprint too.
    pub encoder_precision: Precision,
    /// With which they must be signed.
    pub mac_keys: MacKeys,
    /// Limits on requests.
    pub limits: Limits,
    /// Sizes of each model's engine.
    pub engine: EngineSettings,
    /// What it answers beside, such as encoders that it holds too; `None`: nothing.
    pub beside: Option<MakeBeside>,
    /// Through which engines take turns with what is answered beside; `None`: nothing there computes.
    pub turnstile: Option<Turnstile>,
}

/// Makes what a worker answers beside its own service, over the connector whose rows it shares.
pub type MakeBeside = Box<dyn FnOnce(WorkerRole) -> MakingBeside + Send>;
/// It at work.
pub type MakingBeside = BoxFuture<'static, Result<Beside, Box<dyn std::error::Error + Send + Sync>>>;

/// Sizes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Memory of the self-attention KV cache in bytes; less is taken if all sequences at full length need less.
    /// Default 1 GiB.
    pub self_kv_bytes: usize,
    /// The same for cross-attention. Default 1 GiB.
    pub cross_kv_bytes: usize,
    /// Host memory for the self-attention KV of sequences that have to give way, in bytes. Default 256 MiB.
    /// 0: none, they are computed again.
    pub host_kv_bytes: usize,
    /// Tokens to guess ahead of greedy answers, from what came after the same words before. Default 0: none.
    pub lookup_tokens: usize,
    /// Rows of a step. Default 512.
    pub token_budget: usize,
    /// Hundredths of the time in which sequences that write go on alone while others read their prompts. Default 33: they
    /// write at a third of their speed at least, and prompts are read at two thirds of theirs.
    pub decode_share: u8,
    /// Sequences that run at once. Default 64.
    pub max_sequences: usize,
    /// Sequences that wait; a request whose sequences would not all find room is refused. Default 1024.
    pub max_waiting: usize,
    /// Requests admitted at once. Default 512.
    pub max_requests: usize,
    /// Tokens that a draft model guesses at once. Default 4.
    pub draft_tokens: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            self_kv_bytes: 1 << 30,
            cross_kv_bytes: 1 << 30,
            host_kv_bytes: 256 << 20,
            lookup_tokens: 0,
            token_budget: 512,
            decode_share: 33,
            max_sequences: 64,
            max_waiting: 1024,
            max_requests: 512,
            draft_tokens: 4,
        }
    }
}

/// The worker cannot start, or ended by itself.
#[derive(Debug, Error)]
pub enum PdError {
    /// A model directory cannot be served.
    #[error("cannot load the decoder of {dir}: {source}")]
    Model {
        /// The directory.
        dir: String,
        /// Why.
        source: ModelError,
    },
    /// An engine cannot be made.
    #[error("engine of {model}: {source}")]
    Engine {
        /// The model.
        model: String,
        /// Why.
        source: EngineError,
    },
    /// The gRPC server ended.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// No thread for an engine.
    #[error("cannot start an engine thread: {0}")]
    Thread(#[from] std::io::Error),
    /// A thread died while loading.
    #[error("loading ended early: {0}")]
    Loading(#[from] tokio::task::JoinError),
    /// What it was to answer beside cannot be had.
    #[error("what is served beside the engines: {0}")]
    Beside(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An engine panicked: our bug. The process must be replaced.
    #[error("an engine panicked")]
    EngineDied,
}

/// Runs the worker until it is drained.
///
/// # Errors
/// [`PdError`] if it cannot start, or its server or an engine ends by itself.
pub async fn run(config: PdConfig, drain: Drain, metrics: MetricsRegistry) -> Result<(), PdError> {
    let readiness = Readiness::new(drain.clone());
    let (families, ec_meters) = (Families::new(&metrics), Arc::new(EcMeters::new(&metrics)));
    let turns = config.turnstile.map(|turnstile| (TurnMeters::new(&metrics), turnstile));
    if let Some(listener) = config.admin {
        admin::spawn(listener, admin::router(readiness.clone(), metrics), &drain);
    }
    let loads = Loads::new(
        config.store.clone(),
        ec_meters,
        config.limits.clone(),
        &config.dialer,
        config.mac_keys.clone(),
    );
    let loader = Loader {
        compute: config.compute,
        dtype: config.encoder_dtype,
        precision: config.encoder_precision,
        engine: config.engine,
        drafts: config.drafts,
    };
    let sources = config.models;
    let loading = tokio::task::spawn_blocking(move || loader.load_all(&sources));
    let loaded = tokio::select! {
        loaded = loading => loaded??,
        // Nothing is served yet: the process ends under the thread that loads.
        () = drain.stopping() => return Ok(()),
    };
    let encodes = config.beside.is_some();
    let beside = match config.beside {
        None => Beside::default(),
        Some(make) => make(loads.worker()).await.map_err(PdError::Beside)?,
    };
    let beside_load = beside.load();
    let died = CancellationToken::new();
    let starter =
        Starter { max_live: config.engine.max_live(), families: families.clone(), turns, died: died.clone() };
    let models = starter.start_all(loaded)?;
    loads.attach(models.values().map(|m| m.driver.clone()).collect());
    let max_requests = config.engine.max_requests.min(Semaphore::MAX_PERMITS);
    let service = Service::new(Worker {
        worker_id: config.worker_id,
        encodes,
        beside_load,
        models,
        loads: loads.clone(),
        store: config.store,
        limits: config.limits.clone(),
        places: Arc::new(Semaphore::new(max_requests)),
        max_requests,
        unknown: families.of_model("unknown"),
        drain: drain.clone(),
    });
    let service =
        PrefillDecodeWorkerServer::new(service).max_decoding_message_size(config.limits.max_body_bytes);
    let mut serving = pin!(serve_beside(service, beside, config.grpc, readiness, drain.clone()));
    tokio::select! {
        ended = &mut serving => ended?,
        () = died.cancelled() => {
            // Whoever was in that engine is told so before the process ends, and other models' answers end well.
            drain.begin();
            serving.await?;
            return Err(PdError::EngineDied);
        }
    }
    loads.drain().await;
    Ok(())
}

struct Loader {
    compute: ComputeConfig,
    /// What encoders publish, and in what they compute it.
    dtype: RowTypes,
    precision: Precision,
    engine: EngineSettings,
    drafts: Vec<ModelSource>,
}

/// A model whose engine is made and whose thread is not started.
struct Loaded {
    model: Model,
    engine: Engine,
    /// Width of its logits.
    vocab: usize,
    encoders: BTreeMap<triptych_core::Modality, triptych_core::Fingerprint>,
}

impl Loader {
    fn load_all(&self, sources: &[ModelSource]) -> Result<Vec<Loaded>, PdError> {
        sources.iter().map(|source| self.load(source)).collect()
    }

    fn load(&self, source: &ModelSource) -> Result<Loaded, PdError> {
        let failed = |e| PdError::Model { dir: source.dir.display().to_string(), source: e };
        let (model, decoder, encoders) = self.weights(source).map_err(failed)?;
        let info = decoder.info();
        let mut config = self.engine.for_decoder(&info);
        let draft = self.drafts.iter().find(|draft| draft.name.as_ref() == Some(model.name()));
        if draft.is_some() {
            config.speculation = Speculation::DraftModel { n_tokens: self.engine.draft_tokens };
        }
        let refused = |source| PdError::Engine { model: model.name().to_string(), source };
        let mut engine = Engine::new(decoder, model.tokenizer().clone(), config).map_err(refused)?;
        if let Some(draft) = draft {
            let failed = |e| PdError::Model { dir: draft.dir.display().to_string(), source: e };
            let decoder = self.draft(draft).map_err(failed)?;
            let kv = self.engine.for_decoder(&decoder.info()).kv;
            engine = engine.with_draft_model(decoder, kv).map_err(refused)?;
        }
        if let Err(failure) = warm_up(&mut engine, &info) {
            tracing::warn!(model = %model.name(), %failure, "the first request failed; serving all the same");
        }
        Ok(Loaded { model, engine, vocab: info.vocab, encoders })
    }

    fn draft(&self, source: &ModelSource) -> Result<Box<dyn Decoder>, ModelError> {
        Compute::new(self.compute)?.load_decoder(&Model::open(source)?)
    }

    #[allow(clippy::type_complexity)]
    fn weights(
        &self,
        source: &ModelSource,
    ) -> Result<
        (Model, Box<dyn Decoder>, BTreeMap<triptych_core::Modality, triptych_core::Fingerprint>),
        ModelError,
    > {
        let compute = Compute::new(self.compute)?;
        let model = Model::open(source)?;
        let dtype = self.dtype.of(model.name().as_str());
        let fingerprint = |&m| Ok((m, model.fingerprint_in(m, dtype, self.precision)?));
        let encoders = model.modalities().iter().map(fingerprint).collect::<Result<_, ModelError>>()?;
        let decoder = compute.load_decoder(&model)?;
        Ok((model, decoder, encoders))
    }
}

impl EngineSettings {
    /// Sequences that run or wait.
    pub fn max_live(self) -> usize {
        self.max_waiting.saturating_add(self.max_sequences).min(Semaphore::MAX_PERMITS)
    }

    /// No more KV than all sequences at full length can fill.
    pub fn for_decoder(self, info: &DecoderInfo) -> EngineConfig {
        let most = |tokens: usize| self.max_sequences.saturating_mul(tokens.div_ceil(KV_BLOCK_TOKENS));
        let fit = |bytes: usize, block: usize| bytes.checked_div(block).unwrap_or(0);
        // A cross window has as many rows as the encoder gives; 1500 is the most of any family so far.
        let kv = KvBudget::Blocks {
            self_attention: fit(self.self_kv_bytes, info.self_block_bytes).min(most(info.max_context)),
            cross_attention: fit(self.cross_kv_bytes, info.cross_block_bytes).min(most(1500)),
            host: fit(self.host_kv_bytes, info.self_block_bytes).min(most(info.max_context)),
        };
        EngineConfig {
            kv,
            token_budget: self.token_budget.max(self.max_sequences),
            decode_share: self.decode_share,
            max_sequences: self.max_sequences,
            // Before the first step all that live wait.
            max_waiting: self.max_live(),
            speculation: match self.lookup_tokens {
                0 => Speculation::Off,
                n_tokens => Speculation::PromptLookup(PromptLookup { n_tokens, max_ngram: 3 }),
            },
            ..EngineConfig::default()
        }
    }
}

/// What engines' threads start with.
struct Starter {
    max_live: usize,
    families: Families,
    turns: Option<(TurnMeters, Turnstile)>,
    died: CancellationToken,
}

impl Starter {
    /// The models by name, at work.
    fn start_all(&self, loaded: Vec<Loaded>) -> std::io::Result<HashMap<String, ServedModel>> {
        let mut models = HashMap::new();
        for model in loaded {
            let name = model.model.name().to_string();
            models.insert(name.clone(), model.start(self)?);
            tracing::info!(model = %name, "decoder ready");
        }
        Ok(models)
    }
}

impl Loaded {
    fn start(self, with: &Starter) -> std::io::Result<ServedModel> {
        let Self { model, engine, vocab, encoders } = self;
        let (max_live, died) = (with.max_live, with.died.clone());
        let meters = with.families.of_model(model.name().as_str());
        let turns = with.turns.as_ref().map(|(meters, turnstile)| Turns::new(turnstile, meters));
        Ok(ServedModel {
            family: model.family().to_owned(),
            prompts: model.prompts(),
            tokenizer: model.tokenizer().clone(),
            constraints: Arc::new(Constraints::new(model.tokenizer().clone(), vocab)),
            driver: Driver::spawn(model.name().as_str(), engine, (meters.clone(), turns), died)?,
            meters,
            encoders,
            encoder_takes_prompt: model.preprocess().takes_prompt(),
            max_context: model.max_context(),
            created: SystemTime::now(),
            sequences: Arc::new(Semaphore::new(max_live)),
            max_live,
        })
    }
}
