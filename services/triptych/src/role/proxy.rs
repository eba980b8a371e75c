//! `triptych proxy`.

use super::Process;
use crate::args::{EcArgs, FetchArgs, LogArgs};
use crate::error::{CliError, chain};
use crate::listen;
use clap::Args;
use triptych_core::limits::Limits;
use triptych_proxy::{ClientTimes, EncodePolicy, ProxyConfig, ProxyError};
use triptych_runtime::grpc::Dialer;

/// Flags of the proxy.
#[derive(Args, Debug)]
pub struct ProxyArgs {
    /// Where the OpenAI API, /healthz, /readyz and /metrics answer
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Where gRPC answers
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// An encoder worker; repeat for several. Without one only text is served
    #[arg(long = "encoder", value_name = "HOST:PORT", env = "TRIPTYCH_ENCODERS", value_delimiter = ',')]
    pub encoders: Vec<String>,
    /// A PD worker; repeat for several
    #[arg(
        long = "pd",
        value_name = "HOST:PORT",
        env = "TRIPTYCH_PDS",
        value_delimiter = ',',
        required = true
    )]
    pub pds: Vec<String>,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Requests worked on at once; one more is told to come back
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_IN_FLIGHT", default_value_t = 512)]
    pub max_in_flight: usize,
    /// Secret that goes into every content key: clusters with different ones never share an encoder output
    #[arg(
        long,
        value_name = "TEXT",
        env = "TRIPTYCH_TENANT_SALT",
        default_value = "",
        hide_env_values = true,
        hide_default_value = true
    )]
    pub tenant_salt: String,
    /// Items by URL
    #[command(flatten)]
    pub fetch: FetchArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot start, or one of its servers ends.
pub async fn run(args: ProxyArgs) -> Result<(), CliError> {
    let process = Process::start("proxy", &args.log)?;
    let limits = Limits::default();
    let config = ProxyConfig {
        http: listen::bind("--http", &args.http).await?,
        grpc: listen::bind("--grpc", &args.grpc).await?,
        encoders: args.encoders,
        pds: args.pds,
        dialer: Dialer::default(),
        store: args.ec.open(&limits).await?,
        limits,
        fetch: args.fetch.policy(),
        tenant_salt: args.tenant_salt.into_bytes(),
        max_in_flight: args.max_in_flight,
        encodes: EncodePolicy::default(),
        client_times: ClientTimes::default(),
    };
    triptych_proxy::run(config, process.drain, process.metrics).await.map_err(|e| match e {
        ProxyError::NoPdWorker | ProxyError::WorkerAddress { .. } => CliError::Setting(chain(&e)),
        other => CliError::Failed(chain(&other)),
    })
}
