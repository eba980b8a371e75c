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

mod args;
mod banner;
mod child;
mod cluster;
pub mod encoders;
pub mod plan;
pub mod ready;
mod restarts;
pub mod screen;
pub mod signals;

pub use args::UpArgs;

use crate::args::EcArg;
use crate::ec_choice::{Others, Surroundings, UpStore, choose_for_up};
use crate::error::{CliError, chain};
use crate::model::CheckedModel;
use crate::shared_dir::SharedDir;
use crate::{listen, model};
use cluster::Cluster;
use plan::{ClusterPlan, Endpoints};
use screen::Screen;
use signals::Signals;
use std::time::Instant;
use triptych_core::limits::Limits;
use triptych_ec::{EcError, EcSetting, Scope};

/// Variables that give the proxy tenants.
const TENANTS: [&str; 2] = ["TRIPTYCH_API_KEYS", "TRIPTYCH_JWT_KEYS"];

/// Runs the cluster until a signal stops it.
///
/// # Errors
/// [`CliError`] if the cluster cannot start. Once it was ready, only a signal ends it; it is an error then if requests
/// had to be cut.
pub async fn run(args: UpArgs) -> Result<(), CliError> {
    let mut signals = Signals::watch()?;
    let screen = Screen::new(&args.log)?;
    let start = Instant::now();
    let (http, grpc) = listen::check_free(("--http", &args.http), ("--grpc", &args.grpc)).await?;
    let endpoints = Endpoints { http, grpc };
    let models = tokio::select! {
        models = model::check_all(&args.models) => models?,
        () = signals.next() => return Ok(()),
    };
    check_encoders(&args, &models)?;
    let (ec, _slab) = store(&args)?;
    check_store(&ec.setting).await?;
    let mut plan = ClusterPlan::new(&args, &ec, &models, endpoints)?;
    let _cores = plan.share_cores()?;
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
    let stopped = cluster.stop(&mut signals).await;
    match ended {
        Err(lost) => Err(CliError::Failed(lost.to_string())),
        Ok(()) => stopped,
    }
}

/// Refuses encoder workers that leave items of a model without an encoder.
fn check_encoders(args: &UpArgs, models: &[CheckedModel]) -> Result<(), CliError> {
    args.weights.check(args.with_encoder)?;
    if args.with_encoder {
        return Ok(());
    }
    if args.encoders.towers().is_empty()
        && let Some(model) = models.iter().find(|model| model.has_encoder())
    {
        return Err(CliError::Setting(format!(
            "--encoders 0: then PD workers must encode for model {}, with --with-encoder",
            model.name
        )));
    }
    let fault = models.iter().find_map(|model| Some((model, args.encoders.fault_of(&model.towers)?)));
    match fault {
        Some((model, fault)) => {
            Err(CliError::Setting(format!("--encoders {}: model {}: {fault}", args.encoders, model.name)))
        }
        None => Ok(()),
    }
}

/// The store that was set, or one of this cluster's own, with the directory of a slab.
fn store(args: &UpArgs) -> Result<(EcArg, Option<SharedDir>), CliError> {
    if let Some(given) = args.ec.given()? {
        return Ok((given, None));
    }
    // The proxy reads them itself.
    let may_have_tenants =
        args.config.config.is_some() || TENANTS.iter().any(|name| std::env::var_os(name).is_some());
    let (setting, dir) = match choose_for_up(&Surroundings::look(Others::Here), may_have_tenants) {
        UpStore::Process => ("memory".to_owned(), None),
        UpStore::Slab { mib } => {
            let dir = SharedDir::new("triptych-up-")
                .map_err(|e| CliError::failed("cannot make a directory in shared memory", &e))?;
            (format!("shm:{}?mib={mib}", dir.path().join("slab").display()), Some(dir))
        }
    };
    Ok((setting.parse().map_err(|e: EcError| CliError::Setting(chain(&e)))?, dir))
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
