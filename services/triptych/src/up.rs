//! `triptych up`: a cluster on one machine, each role a process of its own, watched until it is stopped.
//!
//! ```text
//! check ports and models ──▶ plan ──▶ start children ──▶ wait until all are ready ──▶ banner
//!                                        │                                             │
//!                        restart with back-off while it runs                 Ctrl-C / SIGTERM
//!                                        │                                             │
//!                                        └──────────▶ stop: proxy, workers, store ◀────┘
//! ```
//!
//! It runs on one thread, does no work of a request, and knows a role by its flags only.

mod banner;
mod child;
mod cluster;
pub mod plan;
pub mod ready;
mod restarts;
pub mod screen;

use crate::args::drain::DrainArgs;
use crate::args::{EcArg, EcArgs, FetchArgs, LogArgs, ModelArgs};
use crate::ec_choice::choose_for_up;
use crate::error::{CliError, chain};
use crate::{listen, model};
use clap::Args;
use clap::builder::FalseyValueParser;
use cluster::Cluster;
use plan::{Faces, Plan};
use screen::Screen;
use std::time::Instant;
use tokio::signal::unix::{Signal, SignalKind, signal};
use triptych_core::limits::Limits;
use triptych_ec::{EcError, EcSetting, Scope};

/// Flags of `up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Where the OpenAI API, /readyz and /metrics answer
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Where gRPC answers
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// Encoder workers; 0 only with --with-encoder
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(..=64))]
    pub encoders: u16,
    /// Prefill/decode workers
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub pds: u16,
    /// PD workers hold the encoders too: they help out when no encoder worker can
    #[arg(long, env = "TRIPTYCH_WITH_ENCODER", value_parser = FalseyValueParser::new())]
    pub with_encoder: bool,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Models and computation; without a model: the sample models in this binary
    #[command(flatten)]
    pub models: ModelArgs,
    /// Items by URL
    #[command(flatten)]
    pub fetch: FetchArgs,
    /// How its processes stop
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the cluster until it is told to stop.
///
/// # Errors
/// [`CliError`] if the cluster cannot start. Once it was ready, only a signal ends it, without an error.
pub async fn run(args: UpArgs) -> Result<(), CliError> {
    if args.encoders == 0 && !args.with_encoder {
        return Err(CliError::Setting(
            "--encoders 0: then PD workers must encode, with --with-encoder".into(),
        ));
    }
    let mut signals = Signals::watch()?;
    let screen = Screen::new(&args.log)?;
    let start = Instant::now();
    let faces = Faces {
        http: listen::check_free("--http", &args.http).await?,
        grpc: listen::check_free("--grpc", &args.grpc).await?,
    };
    if faces.http == faces.grpc {
        return Err(CliError::Setting(format!(
            "--http and --grpc are both {}; choose two addresses",
            faces.http
        )));
    }
    let models = tokio::select! {
        models = model::check_all(&args.models) => models?,
        () = signals.next() => return Ok(()),
    };
    let ec = store(&args.ec)?;
    check_store(&ec.setting).await?;
    let plan = Plan::new(&args, &ec, &models, faces)?;
    let mut cluster = Cluster::start(&plan, &screen)?;
    let was_ready = cluster.ready();
    let ended = tokio::select! {
        lost = cluster.lost() => Err(lost),
        () = signals.next() => Ok(()),
        () = async {
            ready::wait(&plan, &models, &screen).await;
            was_ready.cancel();
            screen.show(&banner::text(&plan, &models, start.elapsed()));
            std::future::pending().await
        } => Ok(()),
    };
    cluster.stop(&mut signals).await;
    match ended {
        Err(lost) => Err(CliError::Failed(lost.to_string())),
        Ok(()) => Ok(()),
    }
}

/// The store that was set, or a process of this cluster's own.
fn store(args: &EcArgs) -> Result<EcArg, CliError> {
    match args.given()? {
        Some(given) => Ok(given),
        None => {
            let choice = choose_for_up();
            tracing::info!(store = choice.setting, why = choice.why, "no store is set; this one was chosen");
            choice.setting.parse().map_err(|e: EcError| CliError::Setting(chain(&e)))
        }
    }
}

/// A cluster lives with a store that goes away; one that is not there at the start is a mistake, most likely.
async fn check_store(setting: &EcSetting) -> Result<(), CliError> {
    if setting.scope() == Scope::Process {
        return Ok(());
    }
    let store =
        triptych_ec::open(setting, &Limits::default()).await.map_err(|e| CliError::Setting(chain(&e)))?;
    store.ping().await.map_err(|e| CliError::failed(format!("--ec {setting} does not answer"), &e))
}

/// Ctrl-C and SIGTERM, one after the other.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn watch() -> Result<Self, CliError> {
        let watch = |kind| signal(kind).map_err(|e| CliError::failed("cannot watch signals", &e));
        Ok(Self { interrupt: watch(SignalKind::interrupt())?, terminate: watch(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
