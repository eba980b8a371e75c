//! `triptych proxy`.

use super::{Process, bind_admin};
use crate::args::api::ApiArgs;
use crate::args::auth::AuthArgs;
use crate::args::bounds::BoundArgs;
use crate::args::discovery::DiscoverArgs;
use crate::args::drain::DrainArgs;
use crate::args::limits::LimitArgs;
use crate::args::operator::OperatorArgs;
use crate::args::tls::{PublicTlsArgs, TlsArgs};
use crate::args::{EcArgs, FetchArgs, LogArgs};
use crate::ec_choice::Others;
use crate::error::{CliError, chain};
use crate::listen;
use clap::Args;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use triptych_proxy::{ProxyConfig, ProxyError};
use triptych_runtime::discovery::setting::WorkerSetting;
use triptych_runtime::discovery::{Role, Source};
use triptych_runtime::trace_context::REQUEST_TARGET;
use triptych_vllm::{VllmAddress, VllmSettings};

/// Flags of the proxy.
#[derive(Args, Debug)]
pub struct ProxyArgs {
    /// Address of the OpenAI API, /health, /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Address of the gRPC API
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// Further address of /metrics, /healthz and /readyz, in plain HTTP, for probes and scrapers that clients do not
    /// reach; and of the admin API, for operators
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Encoder workers: HOST:PORT; `dns:HOST:PORT`, every address of a name, asked again and again; or
    /// `k8s:NAMESPACE/SERVICE[:PORT-NAME]`, the ready pods of a Kubernetes service; or vLLM's encoder instances,
    /// `vllm+http://HOST:PORT`. Repeat for several. Without one only text is served, but by vLLM servers
    #[arg(long = "encoder", value_name = "WORKERS", env = "TRIPTYCH_ENCODERS", value_delimiter = ',')]
    pub encoders: Vec<WorkerSetting>,
    /// PD workers, in the same forms. Of a vLLM server, `vllm+http://HOST:PORT`, or `vllm+dns:HOST:PORT` for every
    /// address of a name; options follow behind `?`, with `&` between them: `items=image+audio+video` or `none` that its
    /// models read (image), `tools=hermes`, `llama3_json`, `mistral`, `qwen3_coder` or `glm45`, `reasoning=think` or
    /// `mistral`, `capacity=N` requests at once (1024), `priorities=true` if it schedules by priority
    #[arg(long = "pd", value_name = "WORKERS", env = "TRIPTYCH_PDS", value_delimiter = ',')]
    pub pds: Vec<WorkerSetting>,
    /// Key that vLLM servers ask for, their --api-key
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_VLLM_API_KEY", hide_env_values = true)]
    pub vllm_api_key: Option<String>,
    /// Workers that announce themselves
    #[command(flatten)]
    pub discover: DiscoverArgs,
    /// Longest that an item may have to wait until it is encoded, in milliseconds: where the queues are longer, a
    /// request is refused at once, with the time after which to come back. 0: only its deadline counts
    #[arg(long, value_name = "MS", env = "TRIPTYCH_ENCODE_SLO_MS", default_value_t = 0)]
    pub encode_slo_ms: u64,
    /// APIs
    #[command(flatten)]
    pub api: ApiArgs,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Requests admitted at once; one more is refused as retryable. The last eighth is for requests without images, audio or video
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
    /// Tenants
    #[command(flatten)]
    pub auth: AuthArgs,
    /// TLS with the workers and the store
    #[command(flatten)]
    pub tls: TlsArgs,
    /// TLS with clients
    #[command(flatten)]
    pub public_tls: PublicTlsArgs,
    /// Limits of a request
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Bounds of this proxy
    #[command(flatten)]
    pub bounds: BoundArgs,
    /// Admin API and accounting
    #[command(flatten)]
    pub operator: OperatorArgs,
    /// Stop
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

impl ProxyArgs {
    /// Checks the settings without starting.
    ///
    /// # Errors
    /// [`CliError::Setting`] for the first that is wrong.
    pub fn check(&self) -> Result<(), CliError> {
        if self.pds.is_empty() && self.discover.discover.is_none() {
            return Err(CliError::Setting(ProxyError::NoPdWorker.to_string()));
        }
        let vllm = self.encoders.iter().chain(&self.pds).filter_map(WorkerSetting::vllm_address);
        for address in vllm {
            address.parse::<VllmAddress>().map_err(|e| CliError::Setting(e.to_string()))?;
        }
        self.operator.token()?;
        self.ec.check(self.others())
    }

    /// Addresses of the workers.
    fn others(&self) -> Others {
        let workers = self.encoders.iter().chain(&self.pds);
        if self.discover.discover.is_none() && workers.clone().all(|worker| worker.vllm_address().is_some()) {
            return Others::None;
        }
        let at = workers.filter_map(|worker| match worker {
            WorkerSetting::At(address) | WorkerSetting::Dns(address) => Some(address.as_str()),
            // Not an address of this host.
            WorkerSetting::Kubernetes(_) => Some(""),
            // Their stores are their own affair.
            WorkerSetting::Vllm(_) | WorkerSetting::VllmDns { .. } => None,
        });
        // Workers may register from any host.
        Others::at(at.chain(self.discover.discover.as_ref().map(|_| "")))
    }
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot start, or one of its servers ends.
pub async fn run(args: ProxyArgs) -> Result<(), CliError> {
    let process = Process::start("proxy", &with_requests(&args), &args.drain)?;
    let limits = args.limits.limits();
    let others = args.others();
    let mut discovery = args.discover.sources()?;
    let encoders = workers(Role::Encoder, args.encoders, &mut discovery)?;
    let pds = workers(Role::Pd, args.pds, &mut discovery)?;
    let links = args.tls.links(&process.drain)?;
    let http = listen::bind("--http", &args.http).await?;
    let grpc = listen::bind("--grpc", &args.grpc).await?;
    if !args.auth.is_required() {
        warn_if_open(&[("--http", &http), ("--grpc", &grpc)]);
    }
    let store = args.ec.open_for_role(&links.dialer(), &limits, others, &process.metrics).await?;
    let vllm = VllmSettings {
        api_key: args.vllm_api_key,
        store: Arc::clone(&store),
        max_item_bytes: limits.max_body_bytes,
    };
    let dialer = triptych_vllm::dialer(links.dialer(), vllm);
    let config = ProxyConfig {
        http: args.public_tls.listener(http, "http/1.1", &process.drain)?,
        grpc: args.public_tls.listener(grpc, "h2", &process.drain)?,
        admin: bind_admin(args.admin.as_deref()).await?,
        admin_token: args.operator.token()?,
        accounting_log: args.operator.accounting_log,
        encoders,
        pds,
        discovery,
        seed: None,
        encode_slo: Some(Duration::from_millis(args.encode_slo_ms)).filter(|slo| !slo.is_zero()),
        dialer: dialer.map_err(|e| CliError::Failed(chain(&e)))?,
        store,
        limits,
        fetch: args.fetch.policy(),
        quota_store: args.auth.buckets()?,
        auth: args.auth.config(),
        tenant_salt: args.tenant_salt.into_bytes(),
        max_in_flight: args.max_in_flight,
        encodes: args.bounds.encodes(),
        roles: args.bounds.roles,
        client_times: args.bounds.times(),
        bounds: args.bounds.request(),
        connections: args.bounds.connections(),
        allowed_origins: args.api.allowed_origins,
        sessions: args.bounds.sessions(),
        request_log: args.api.request_log,
    };
    triptych_proxy::run(config, process.drain, process.metrics).await.map_err(|e| match e {
        ProxyError::NoPdWorker | ProxyError::WorkerAddress { .. } | ProxyError::Auth(_) => {
            CliError::Setting(chain(&e))
        }
        other => CliError::Failed(chain(&other)),
    })
}

/// Logs that let the lines of the request log through, whatever the filter says of others.
fn with_requests(args: &ProxyArgs) -> LogArgs {
    let mut log = args.log.clone();
    if args.api.request_log.is_on() {
        log.log = format!("{},{REQUEST_TARGET}=info", log.log);
    }
    log
}

/// Says once, if so, that everybody who reaches these listeners may use the models.
fn warn_if_open(listeners: &[(&str, &TcpListener)]) {
    let reached = |(flag, listener): &(&str, &TcpListener)| {
        let address = listener.local_addr().ok().filter(|address| !address.ip().is_loopback())?;
        Some(format!("{address} ({flag})"))
    };
    let open: Vec<_> = listeners.iter().filter_map(reached).collect();
    if !open.is_empty() {
        tracing::warn!(
            "no client has to authenticate: everybody who reaches {} may use the models; set --api-keys \
             (TRIPTYCH_API_KEYS) or --jwt-keys, or let only a gateway reach this process",
            open.join(" and ")
        );
    }
}

/// The addresses that were written down; what has to be found goes to `sources`.
fn workers(
    role: Role,
    settings: Vec<WorkerSetting>,
    sources: &mut Vec<Box<dyn Source>>,
) -> Result<Vec<String>, CliError> {
    let mut addresses = Vec::new();
    for setting in settings {
        match setting {
            WorkerSetting::At(address) | WorkerSetting::Vllm(address) => addresses.push(address),
            found => sources.push(found.into_source(role).map_err(|e| CliError::Setting(chain(&e)))?),
        }
    }
    Ok(addresses)
}
