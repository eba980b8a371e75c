//! Decoders from their directories to engines with threads of their own.
//!
//! Blocking: the caller gives it a thread. What it knows of the worker is settings.

use crate::accepted::AcceptedEncoders;
use crate::adapters::{ServedAdapter, ServedAdapters};
use crate::config::PdConfig;
use crate::driver::{Arbitration, Driver, DriverSetup, SequenceHook};
use crate::engine_settings::{CrossShortage, EngineSettings};
use crate::error::PdError;
use crate::grammar::{CompilePool, GrammarCompiler};
use crate::memory_plan::{MemoryPlan, ModelCaches};
use crate::meters::{ArbiterMeters, MetricFamilies};
use crate::served::ServedDecoder;
use crate::warm::warm_up;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use triptych_core::prompt::{ChatFormat, ToolSyntax};
use triptych_core::{ModelName, RowTypes};
use triptych_engine::constraint::Constraints;
use triptych_engine::{Engine, Pipelining, RowRetention, Speculation};
use triptych_models::compute::{Compute, ComputeConfig, Precision};
use triptych_models::decoder::Decoder;
use triptych_models::lora::{EncoderModules, LoraAdapter, LoraSettings, LoraSource};
use triptych_models::prompt::ChatTemplate;
use triptych_models::{Model, ModelError, ModelSource};
use triptych_runtime::compute_arbiter::ComputeArbiter;
use triptych_runtime::core_share::CoreShare;
use triptych_runtime::watchdog::Watchdog;

/// Settings by which decoders are loaded.
#[derive(Clone)]
pub struct DecoderLoader {
    compute: ComputeConfig,
    /// Element type and precision of the encoders, parts of their fingerprints.
    dtype: RowTypes,
    precision: Precision,
    engine: EngineSettings,
    /// Caches of each model, in order, and the bytes of all that is its own, where memory was divided; else empty.
    caches: Vec<(ModelCaches, usize)>,
    drafts: Vec<ModelSource>,
    lora: LoraSettings,
    /// True if no encoder of this process computes. Beside encoders nothing is submitted ahead: the device is the engine's in
    /// its steps alone.
    has_device_alone: bool,
}

/// A model and its decoder.
struct LoadedWeights {
    source: ModelSource,
    model: Model,
    compute: Compute,
    decoder: Box<dyn Decoder>,
    /// The encoders whose outputs it takes.
    encoders: AcceptedEncoders,
}

/// A model with an engine, before its thread is started.
pub struct LoadedDecoder {
    source: ModelSource,
    model: Model,
    engine: Engine,
    /// Width of the logits.
    vocab: usize,
    encoders: AcceptedEncoders,
    /// Its adapters by name.
    adapters: Vec<(String, ServedAdapter)>,
    /// Layers of its encoder that adapters may have a part for.
    encoder_modules: EncoderModules,
    /// Bytes of a divided memory that are its own.
    share: usize,
}

impl DecoderLoader {
    /// The settings of a worker, with the caches of its plan.
    pub fn new(config: &PdConfig, plan: Option<&MemoryPlan>) -> Self {
        Self {
            compute: config.compute,
            dtype: config.encoder_dtype.clone(),
            precision: config.encoder_precision,
            engine: config.engine,
            caches: plan.map(MemoryPlan::caches).unwrap_or_default(),
            drafts: config.drafts.clone(),
            lora: config.lora.clone(),
            has_device_alone: config.arbiter.is_none(),
        }
    }

    /// Loads models, each with an engine.
    ///
    /// # Errors
    /// [`PdError`] for the first that cannot be served.
    pub fn load_all(&self, sources: &[ModelSource]) -> Result<Vec<LoadedDecoder>, PdError> {
        let weights = |source: &ModelSource| self.weights(source).map_err(Self::failed(source));
        // All weights first: caches take what they leave.
        let loaded: Vec<LoadedWeights> = sources.iter().map(weights).collect::<Result<_, _>>()?;
        let free = match (loaded.last(), sources.last()) {
            (Some(last), Some(source)) => last.compute.free_device_bytes().map_err(Self::failed(source))?,
            _ => None,
        };
        self.check_adapters(&loaded)?;
        let n_models = loaded.len();
        let caches = self.caches.iter().copied().map(Some).chain(std::iter::repeat(None));
        let settings = |weights: &LoadedWeights, caches| match (caches, free) {
            (Some((caches, share)), _) => (self.engine.with_caches(caches), share),
            (None, Some(free)) => (self.engine.on_device(free, n_models, &weights.decoder.info()), 0),
            (None, None) => (self.engine, 0),
        };
        let load = |(weights, caches): (LoadedWeights, _)| {
            let settings = settings(&weights, caches);
            self.load(weights, settings)
        };
        loaded.into_iter().zip(caches).map(load).collect()
    }

    /// The same for one model that is loaded while others are served, with the caches of a plan for it. Its adapters of the start
    /// come with it.
    #[must_use]
    pub fn for_update(&self, name: &str, plan: Option<&MemoryPlan>) -> Self {
        let mut loader = self.clone();
        loader.caches = plan.map(MemoryPlan::caches).unwrap_or_default();
        loader.lora.adapters.retain(|adapter| adapter.model.as_deref() == Some(name));
        loader
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

    /// Makes the engine.
    fn load(
        &self,
        LoadedWeights { source, model, compute, mut decoder, encoders }: LoadedWeights,
        (settings, share): (EngineSettings, usize),
    ) -> Result<LoadedDecoder, PdError> {
        let info = decoder.info();
        let max_rows = model.max_cross_rows();
        let mut config = settings.for_decoder(&info, max_rows);
        if let Some(shortage) = CrossShortage::of(&config, &info, max_rows) {
            tracing::warn!(model = %model.name(), "{shortage}");
        }
        if self.has_device_alone && compute.is_on_device() {
            config.pipelining = Pipelining::On;
        }
        let draft = self.drafts.iter().find(|draft| draft.name.as_ref() == Some(model.name()));
        // A draft model may project its input from the rows at any step.
        config.rows = if draft.is_some() { RowRetention::UntilEnd } else { RowRetention::UntilRead };
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
        Ok(LoadedDecoder {
            source,
            model,
            engine,
            vocab: info.vocab,
            encoders,
            adapters,
            encoder_modules,
            share,
        })
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
        let fingerprint = |id| model.fingerprint_in(id, dtype, self.precision);
        let encoders = AcceptedEncoders::of(&model, fingerprint)?;
        let decoder = compute.load_decoder(&model)?;
        Ok(LoadedWeights { source: source.clone(), model, compute, decoder, encoders })
    }
}

/// Common parts of the engines' threads.
pub struct EngineStarter {
    /// Sequences of an engine that run or wait.
    pub max_live: usize,
    /// Metrics.
    pub families: MetricFamilies,
    /// Compute arbiter; `None`: no encoders.
    pub arbiter: Option<(ArbiterMeters, ComputeArbiter)>,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Cancelled when an engine panics.
    pub died: CancellationToken,
    /// Cancelled when the process must end.
    pub abort: CancellationToken,
    /// Watches steps.
    pub watchdog: Watchdog,
    /// Seam for tests.
    pub fault: Option<SequenceHook>,
    /// Compiler of grammars.
    pub pool: CompilePool,
    /// Syntax of calls of tools; `None`: the template's.
    pub tool_syntax: Option<ToolSyntax>,
}

impl EngineStarter {
    /// Format of a template's conversations, with the syntax of calls that is set.
    fn format_of(&self, template: &ChatTemplate) -> ChatFormat {
        let format = template.format();
        ChatFormat { tool_syntax: self.tool_syntax.or(format.tool_syntax), ..format }
    }

    /// Starts an engine; returns the model with its name.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(&self, loaded: LoadedDecoder) -> std::io::Result<(String, ServedDecoder)> {
        let name = loaded.model.name().to_string();
        let served = loaded.start(self)?;
        tracing::info!(model = %name, "decoder ready");
        Ok((name, served))
    }
}

impl LoadedDecoder {
    fn start(self, with: &EngineStarter) -> std::io::Result<ServedDecoder> {
        let Self { source, model, engine, vocab, encoders, adapters, encoder_modules, share } = self;
        let ended = CancellationToken::new();
        let max_live = with.max_live;
        let died = with.died.clone();
        let meters = with.families.of_model(model.name().as_str());
        let arbitration = with.arbiter.as_ref().map(|(meters, arbiter)| Arbitration::new(arbiter, meters));
        let setup = DriverSetup {
            engine,
            adapter_names: adapters.iter().map(|(name, adapter)| (adapter.id, name.clone())).collect(),
            meters: meters.clone(),
            arbitration,
            cores: with.cores.clone(),
            watchdog: with.watchdog.clone(),
            fault: with.fault.clone(),
            ended: ended.clone(),
        };
        Ok(ServedDecoder {
            source,
            share,
            abort: with.abort.child_token(),
            ended,
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
