//! `triptych encoder`.

use super::{Process, bind_admin, worker_id};
use crate::args::discovery::RegisterArgs;
use crate::args::drain::DrainArgs;
use crate::args::tls::{PlaintextArgs, TlsArgs};
use crate::args::{EcArgs, LogArgs, ModelArgs};
use crate::error::{CliError, chain};
use crate::{listen, model};
use clap::Args;
use triptych_core::limits::Limits;
use triptych_encoder::{BatchLimits, EncoderConfig, EncoderError};
use triptych_runtime::discovery::Role;

/// Flags of an encoder worker.
#[derive(Args, Debug)]
pub struct EncoderArgs {
    /// Where it answers gRPC
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:7001")]
    pub grpc: String,
    /// Where it answers /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Its name in logs and metrics
    #[arg(long, value_name = "NAME", env = "TRIPTYCH_ID")]
    pub id: Option<String>,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Jobs admitted at once, waiting ones included; one more is told to come back
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_JOBS", default_value_t = 256)]
    pub max_jobs: usize,
    /// Memory for outputs that are kept after they were published, in MiB: who asks for one again gets it without an
    /// encode, also when the store lost it. 0 keeps none
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_ROWS_MIB", default_value_t = 256)]
    pub rows_mib: usize,
    /// Models and computation
    #[command(flatten)]
    pub models: ModelArgs,
    /// TLS
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Or not
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Where it announces itself
    #[command(flatten)]
    pub register: RegisterArgs,
    /// How it stops
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot start, or its server ends.
pub async fn run(args: EncoderArgs) -> Result<(), CliError> {
    let process = Process::start("encoder", &args.log, &args.drain)?;
    let limits = Limits::default();
    let links = args.tls.links(&process.drain)?;
    let grpc = listen::bind("--grpc", &args.grpc).await?;
    let id = worker_id(args.id.as_deref(), "encoder", &grpc);
    args.register.announce(Role::Encoder, &id, &grpc, &process.drain)?;
    let config = EncoderConfig {
        worker_id: id,
        grpc: links.door(grpc, args.plaintext)?,
        admin: bind_admin(args.admin.as_deref()).await?,
        models: model::resolve_all(&args.models).await?,
        store: args.ec.open_over(&links.dialer(), &limits).await?,
        compute: args.models.compute.config(),
        dtype: args.models.compute.encoder_dtype(),
        limits,
        batch: BatchLimits::default(),
        max_jobs: args.max_jobs,
        preprocess_threads: std::thread::available_parallelism().map_or(1, usize::from),
        rows_budget_bytes: args.rows_mib.saturating_mul(1 << 20),
    };
    triptych_encoder::run(config, process.drain, process.metrics).await.map_err(|e| match e {
        EncoderError::Model { .. } => CliError::Setting(chain(&e)),
        other => CliError::Failed(chain(&other)),
    })
}
