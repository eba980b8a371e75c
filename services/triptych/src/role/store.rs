//! `triptych store`: the memory store of encoder outputs, shared over gRPC.

use super::{Process, bind_admin};
use crate::args::LogArgs;
use crate::args::drain::DrainArgs;
use crate::args::limits::ObjectLimitArgs;
use crate::args::tls::{PlaintextArgs, TlsArgs};
use crate::error::{CliError, chain};
use crate::listen;
use clap::Args;
use std::sync::Arc;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::memory::MemoryStore;
use triptych_runtime::admin::{self, Readiness};
use triptych_runtime::serve::serve;

/// Flags of the store.
#[derive(Args, Debug)]
pub struct StoreArgs {
    /// Address of gRPC
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:7400")]
    pub grpc: String,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// MiB that all objects may take; the least recently used are evicted first
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_STORE_MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub budget_mib: u64,
    /// Limits
    #[command(flatten)]
    pub object: ObjectLimitArgs,
    /// TLS
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Or not
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Stop
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

impl StoreArgs {
    /// Checks the settings without starting.
    ///
    /// # Errors
    /// [`CliError::Setting`] for the first that is wrong.
    pub fn check(&self) -> Result<(), CliError> {
        self.plaintext.check(&self.tls, &self.grpc)
    }
}

/// Runs it until it is drained.
///
/// # Errors
/// [`CliError`] if it cannot listen, or its server ends.
pub async fn run(args: StoreArgs) -> Result<(), CliError> {
    let process = Process::start("store", &args.log, &args.drain)?;
    let limits = args.object.limits();
    let links = args.tls.links(&process.drain)?;
    let door = links.listener(listen::bind("--grpc", &args.grpc).await?, args.plaintext)?;
    let readiness = Readiness::new(process.drain.clone());
    if let Some(listener) = bind_admin(args.admin.as_deref()).await? {
        admin::spawn(listener, admin::router(readiness.clone(), process.metrics.clone()), &process.drain);
    }
    let budget = usize::try_from(args.budget_mib << 20).unwrap_or(usize::MAX);
    let store = Arc::new(MemoryStore::new(budget, &limits));
    tracing::info!(address = %args.grpc, budget_mib = args.budget_mib, "store ready");
    let service = EcObjectsService::into_server(store, &limits);
    serve(service, door, readiness, process.drain).await.map_err(|e| CliError::Failed(chain(&e)))
}
