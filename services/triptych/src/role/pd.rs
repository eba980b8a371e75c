//! `triptych pd`.

use super::{Process, bind_admin, journal, worker_id};
use crate::args::cores::CoreShareArgs;
use crate::args::discovery::RegisterArgs;
use crate::args::drain::DrainArgs;
use crate::args::encoder_weights::EncoderWeightsArgs;
use crate::args::engine::EngineArgs;
use crate::args::limits::LimitArgs;
use crate::args::lora::LoraArgs;
use crate::args::memory::MemoryArgs;
use crate::args::model_updates::ModelUpdateArgs;
use crate::args::tls::{PlaintextArgs, TlsArgs};
use crate::args::watchdog::WatchdogArgs;
use crate::args::{EcArgs, LogArgs, ModelArgs, PrecisionArg, ToolParserArg};
use crate::ec_choice::Others;
use crate::error::{CliError, chain};
use crate::units::{mib, size};
use crate::{listen, model};
use clap::Args;
use clap::builder::FalseyValueParser;
use triptych_encoder::{BatchLimits, EmbeddedConfig, EncoderMemory, TowerChoice, WeightsPolicy};
use triptych_models::compute::ComputeConfig;
use triptych_models::encoder::EncoderGraphConfig;
use triptych_pd::grammar::TrialProgram;
use triptych_pd::{ColocatedEncoders, EngineSettings, MakeColocated, PdConfig, PdError};
use triptych_runtime::compute_arbiter::{ComputeArbiter, EncoderBudget};
use triptych_runtime::discovery::Role;
use triptych_runtime::{Drain, MetricsRegistry};

/// The command under which a PD worker starts this binary to try out a grammar.
pub const GRAMMAR_TRIAL: &str = "grammar-trial";
/// Encoder jobs that a PD worker with encoders admits at once.
const MAX_JOBS: usize = 256;

/// Heading of the flags about models, that of [`ModelArgs`].
const MODELS: &str = "Models";
/// Heading of the flags about encoders.
const WITH_ENCODER: &str = "Encoders";

/// Flags of a prefill/decode worker.
#[derive(Args, Debug)]
pub struct PdArgs {
    /// Address of gRPC
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:7002")]
    pub grpc: String,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Its name in logs and metrics
    #[arg(long, value_name = "NAME", env = "TRIPTYCH_ID")]
    pub id: Option<String>,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Memory
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Changes of models
    #[command(flatten)]
    pub updates: ModelUpdateArgs,
    /// Sizes of the engine
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Models and computation
    #[command(flatten)]
    pub models: ModelArgs,
    /// A smaller model of the same family that drafts tokens for model NAME; repeat, or part by commas, for several
    /// models
    #[arg(long = "draft", value_name = "NAME=DIR_OR_HUB_ID", env = "TRIPTYCH_DRAFT", value_delimiter = ',',
          help_heading = MODELS)]
    pub drafts: Vec<String>,
    /// Adapters
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Syntax in which the models write calls of tools. Default: what their chat templates tell
    #[arg(long, value_name = "NAME", env = "TRIPTYCH_TOOL_PARSER", help_heading = MODELS)]
    pub tool_parser: Option<ToolParserArg>,
    /// Hold the encoders too and answer their jobs at the same address: they help out when no encoder worker can, and
    /// what they encode is here at once
    #[arg(long, env = "TRIPTYCH_WITH_ENCODER", value_parser = FalseyValueParser::new(), help_heading = WITH_ENCODER)]
    pub with_encoder: bool,
    /// Encoder output tokens that a worker with encoders computes between two steps while sequences decode: less keeps
    /// the pace of answers, more encodes sooner. A forward is divided between layers, so at least one layer runs. `auto`:
    /// about as long as a step takes, and with --tpot-slo as long as answers are ahead of it; `none`: a whole forward
    #[arg(long, value_name = "N", env = "TRIPTYCH_ENCODER_TOKEN_BUDGET", default_value_t = EncoderBudget::Automatic,
          help_heading = WITH_ENCODER)]
    pub encoder_token_budget: EncoderBudget,
    /// Precision of the encoders, its own included: it refuses encoder outputs of any other. Default: --precision
    #[arg(long, value_name = "TYPE", env = "TRIPTYCH_ENCODER_PRECISION", help_heading = WITH_ENCODER)]
    pub encoder_precision: Option<PrecisionArg>,
    /// Encoder weights
    #[command(flatten)]
    pub weights: EncoderWeightsArgs,
    /// TLS
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Or not
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Registration
    #[command(flatten)]
    pub register: RegisterArgs,
    /// Cores
    #[command(flatten)]
    pub cores: CoreShareArgs,
    /// Limits
    #[command(flatten)]
    pub watchdog: WatchdogArgs,
    /// Limits of a request
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Stop
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// The encoders of the same models, over the worker's own connector.
fn encoders(
    config: &PdConfig,
    weights: WeightsPolicy,
    graphs: Option<EncoderGraphConfig>,
    drain: Drain,
    metrics: MetricsRegistry,
) -> MakeColocated {
    let config = EmbeddedConfig {
        worker_id: config.worker_id.clone(),
        models: config.models.clone(),
        // Its requests need all of them.
        towers: TowerChoice::default(),
        lora: config.lora.clone(),
        model_updates: None,
        store: config.store.clone(),
        compute: ComputeConfig { precision: config.encoder_precision, ..config.compute },
        weights,
        dtype: config.encoder_dtype.clone(),
        limits: config.limits.clone(),
        graphs,
        batch: BatchLimits::default(),
        memory: EncoderMemory::Unbounded,
        arbiter: config.arbiter.clone(),
        cores: config.cores.clone(),
        max_jobs: MAX_JOBS,
        // Preprocessing is not divided into turns: half of the cores stay the engine's.
        preprocess_threads: std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2)),
        // Its own engine reads the rows where they are; other PD workers read the store.
        peer_cache: None,
        journal: config.journal.clone(),
        watchdog: config.watchdog.clone(),
        fault: None,
    };
    Box::new(move |connector, room| {
        // Its part of the worker's own division.
        let memory = room.map_or(EncoderMemory::Unbounded, EncoderMemory::Forwards);
        let config = EmbeddedConfig { memory, ..config };
        Box::pin(async move {
            triptych_encoder::embedded(config, connector, drain, metrics).await.map_err(Into::into)
        })
    })
}

impl PdArgs {
    /// Checks the settings without starting.
    ///
    /// # Errors
    /// [`CliError::Setting`] for the first that is wrong.
    pub fn check(&self) -> Result<(), CliError> {
        self.plaintext.check(&self.tls, &self.grpc)?;
        self.models.check()?;
        self.lora.loaded.settings()?;
        self.weights.check(self.with_encoder)?;
        if self.updates.dir()?.is_some() && self.with_encoder {
            let text = "--model-updates: a worker with encoders (--with-encoder) has the models of its start";
            return Err(CliError::Setting(text.into()));
        }
        self.ec.check(Others::at(std::iter::once(self.grpc.as_str())))
    }
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot start, or its server or an engine ends.
pub async fn run(args: PdArgs) -> Result<(), CliError> {
    args.check()?;
    let process = Process::start("pd", &args.log, &args.drain)?;
    let limits = args.limits.limits();
    let links = args.tls.links(&process.drain)?;
    let grpc = listen::bind("--grpc", &args.grpc).await?;
    let id = worker_id(args.id.as_deref(), "pd", &grpc);
    let watchdog = args.watchdog.within(args.memory.memory_mib);
    let weights = args.weights.policy(watchdog.limits().memory_bytes);
    let (journal, watchdog) = (journal(&id, &grpc), watchdog.start()?);
    args.register.announce(Role::Pd, &id, &grpc, &process.drain)?;
    let others = Others::at(std::iter::once(args.grpc.as_str()));
    let store = args.ec.open_for_role(&links.dialer(), &limits, others, &process.metrics).await?;
    let compute = args.models.compute.config();
    let cores = args.cores.open(args.models.compute.device)?;
    let engine = args.engine.settings(cores.is_some() && compute.timed.is_none());
    if let Some(slo) = engine.tpot_slo {
        let most = engine.max_tpot_slo.unwrap_or(slo).max(slo);
        let [tpot_slo_ms, max_tpot_slo_ms] = [slo, most].map(|slo| slo.as_secs_f64() * 1e3);
        tracing::info!(tpot_slo_ms, max_tpot_slo_ms, "steps follow a TPOT SLO");
    }
    let mut config = PdConfig {
        worker_id: id,
        grpc: links.listener(grpc, args.plaintext)?,
        admin: bind_admin(args.admin.as_deref()).await?,
        models: model::resolve_all(&args.models).await?,
        model_updates: args.updates.dir()?,
        drafts: model::resolve_drafts(&args.drafts, &args.models).await?,
        lora: args.lora.loaded.settings()?,
        tool_syntax: args.tool_parser.map(Into::into),
        store,
        dialer: links.dialer(),
        compute,
        encoder_dtype: args.models.row_types(),
        encoder_precision: args.encoder_precision.unwrap_or(args.models.compute.precision).into(),
        mac_keys: args.models.rows.mac_keys()?,
        limits,
        ec_cache_bytes: mib(args.memory.ec_cache_mib),
        memory_bytes: args.memory.memory_mib.map(mib),
        engine: EngineSettings { max_loras: size(args.lora.max_loras), ..engine },
        grammar_trial: TrialProgram::this_binary(GRAMMAR_TRIAL),
        encoder_memory: ColocatedEncoders::Absent,
        colocated: None,
        arbiter: None,
        cores,
        journal,
        watchdog,
        fault: None,
    };
    if args.with_encoder {
        config.arbiter = Some(ComputeArbiter::new(args.encoder_token_budget));
        config.encoder_memory = args.weights.memory();
        config.colocated = Some(encoders(
            &config,
            weights,
            args.models.graphs.config(),
            process.drain.clone(),
            process.metrics.clone(),
        ));
    }
    triptych_pd::run(config, process.drain, process.metrics).await.map_err(|e| match e {
        PdError::Model { .. } | PdError::Engine { .. } | PdError::Memory(_) => CliError::Setting(chain(&e)),
        other => CliError::Failed(chain(&other)),
    })
}
