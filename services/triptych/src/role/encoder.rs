//! `triptych encoder`.

use super::{Process, bind_admin, journal, worker_id};
use crate::args::cores::CoreShareArgs;
use crate::args::discovery::RegisterArgs;
use crate::args::drain::DrainArgs;
use crate::args::limits::LimitArgs;
use crate::args::lora::AdapterArgs;
use crate::args::model_updates::ModelUpdateArgs;
use crate::args::tls::{PlaintextArgs, TlsArgs};
use crate::args::watchdog::WatchdogArgs;
use crate::args::{EcArgs, LogArgs, ModelArgs};
use crate::ec_choice::Others;
use crate::error::{CliError, chain};
use crate::{listen, model};
use clap::Args;
use tokio::net::TcpListener;
use triptych_ec::store::peer::{PeerCacheSettings, may_be_asked};
use triptych_encoder::{BatchLimits, EncoderConfig, EncoderError, TowerChoice};
use triptych_runtime::discovery::Role;

/// Flags of an encoder worker.
#[derive(Args, Debug)]
pub struct EncoderArgs {
    /// Address of gRPC
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:7001")]
    pub grpc: String,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Its name in logs and metrics
    #[arg(long, value_name = "NAME", env = "TRIPTYCH_ID")]
    pub id: Option<String>,
    /// Towers to hold, of models in which several read the same item, such as low,high; all unless it is given. Other workers
    /// of the pool must hold the rest
    #[arg(long, value_name = "NAMES", env = "TRIPTYCH_TOWERS", value_delimiter = ',')]
    pub towers: Option<Vec<String>>,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Changes of models
    #[command(flatten)]
    pub updates: ModelUpdateArgs,
    /// Jobs admitted at once, waiting ones included; one more is refused as retryable
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_JOBS", default_value_t = 256)]
    pub max_jobs: usize,
    /// Memory for outputs that are cached after they were published, in MiB: a repeated item is served without an
    /// encode, also when the store lost it. 0 keeps none
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_ROWS_MIB", default_value_t = 256)]
    pub rows_mib: usize,
    /// MiB of memory that an encoder worker divides among weights, activations, jobs and cached outputs (--rows-mib), as its log
    /// says. It does not start if a plain item would not fit; batches end before their activations would not, and an item that never
    /// does is refused. It ends itself beyond it. For the CPU. 0: each takes what it takes
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MEMORY_MIB", default_value_t = 0)]
    pub memory_mib: u32,
    /// Output tokens of a batch; a larger item runs alone. Less answers single items sooner. On a CPU more encodes hardly
    /// more a second; `triptych profile` measures what it gains
    #[arg(long, value_name = "N", env = "TRIPTYCH_BATCH_TOKENS", default_value_t = BatchLimits::default().max_tokens)]
    pub batch_tokens: usize,
    /// Items of a batch
    #[arg(long, value_name = "N", env = "TRIPTYCH_BATCH_ITEMS", default_value_t = BatchLimits::default().max_items)]
    pub batch_items: usize,
    /// Models and computation
    #[command(flatten)]
    pub models: ModelArgs,
    /// Adapters
    #[command(flatten)]
    pub lora: AdapterArgs,
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

impl EncoderArgs {
    /// Checks the settings without starting.
    ///
    /// # Errors
    /// [`CliError::Setting`] for the first that is wrong.
    pub fn check(&self) -> Result<(), CliError> {
        self.plaintext.check(&self.tls, &self.grpc)?;
        self.models.check()?;
        self.lora.settings()?;
        self.ec.check(Others::at(std::iter::once(self.grpc.as_str())))
    }
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot start, or its server ends.
pub async fn run(args: EncoderArgs) -> Result<(), CliError> {
    let process = Process::start("encoder", &args.log, &args.drain)?;
    let limits = args.limits.limits();
    let links = args.tls.links(&process.drain)?;
    let grpc = listen::bind("--grpc", &args.grpc).await?;
    let id = worker_id(args.id.as_deref(), "encoder", &grpc);
    let memory_mib = Some(args.memory_mib).filter(|mib| *mib > 0);
    let watchdog = args.watchdog.within(memory_mib);
    let (journal, watchdog) = (journal(&id, &grpc), watchdog.start()?);
    args.register.announce(Role::Encoder, &id, &grpc, &process.drain)?;
    let others = Others::at(std::iter::once(args.grpc.as_str()));
    let advertise = advertised(args.register.advertise.as_deref(), &grpc)?;
    let config = EncoderConfig {
        worker_id: id,
        grpc: links.listener(grpc, args.plaintext)?,
        admin: bind_admin(args.admin.as_deref()).await?,
        models: model::resolve_all(&args.models).await?,
        towers: TowerChoice(args.towers.map(|names| names.into_iter().collect())),
        lora: args.lora.settings()?,
        store: args.ec.open_for_role(&links.dialer(), &limits, others, &process.metrics).await?,
        compute: args.models.compute.config(),
        dtype: args.models.row_types(),
        mac_keys: args.models.rows.mac_keys()?,
        limits,
        graphs: args.models.graphs.config(),
        cores: args.cores.open(args.models.compute.device)?,
        batch: BatchLimits {
            max_tokens: args.batch_tokens,
            max_items: args.batch_items.max(1),
            ..BatchLimits::default()
        },
        max_jobs: args.max_jobs,
        preprocess_threads: std::thread::available_parallelism().map_or(1, usize::from),
        model_updates: args.updates.dir()?,
        rows_budget_bytes: args.rows_mib.saturating_mul(1 << 20),
        memory_bytes: memory_mib.and_then(|mib| usize::try_from(mib).ok()?.checked_mul(1 << 20)),
        advertise,
        // The written output stays in the cached rows.
        peer_cache: PeerCacheSettings { budget_bytes: 0, ..PeerCacheSettings::default() },
        journal,
        watchdog,
        fault: None,
    };
    triptych_encoder::run(config, process.drain, process.metrics).await.map_err(|e| match e {
        EncoderError::Model { .. }
        | EncoderError::Adapter { .. }
        | EncoderError::AdapterOfEncoder { .. }
        | EncoderError::Memory(_) => CliError::Setting(chain(&e)),
        other => CliError::Failed(chain(&other)),
    })
}

/// Address at which others reach this worker.
fn advertised(given: Option<&str>, grpc: &TcpListener) -> Result<Option<String>, CliError> {
    if let Some(address) = given {
        return match may_be_asked(address) {
            true => Ok(Some(address.to_owned())),
            false => Err(CliError::Setting(format!(
                "--advertise {address} is no address at which a worker is reached, as 10.0.0.5:7001 is"
            ))),
        };
    }
    match grpc.local_addr() {
        Ok(address) if may_be_asked(&address.to_string()) => Ok(Some(address.to_string())),
        _ => {
            tracing::info!(
                "outputs are read from the store only: --grpc names no address that others reach, and --advertise is not set"
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_is_reached_where_it_says_or_where_it_listens() {
        let here = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let everywhere = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let address = here.local_addr().unwrap().to_string();
        assert_eq!(advertised(None, &here).unwrap(), Some(address));
        assert_eq!(advertised(None, &everywhere).unwrap(), None);
        assert_eq!(
            advertised(Some("e-0.ns.svc:7001"), &everywhere).unwrap().as_deref(),
            Some("e-0.ns.svc:7001")
        );
        assert!(advertised(Some("http://e-0:7001"), &here).unwrap_err().to_string().contains("--advertise"));
    }
}
