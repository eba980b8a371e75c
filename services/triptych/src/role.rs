//! The roles: one process of the cluster each, from flags to the library that does the work.
//!
//! All of them log the same way, drain on SIGTERM, and exit with 2 for a wrong setting and with 1 for other failures.

pub mod encoder;
pub mod pd;
pub mod proxy;
pub mod store;

use crate::args::LogArgs;
use crate::args::drain::DrainArgs;
use crate::error::{CliError, chain};
use crate::{listen, shared_dir};
use std::fs;
use std::os::unix::fs::MetadataExt;
use tokio::net::TcpListener;
use triptych_core::WorkerId;
use triptych_core::metrics::DRAINING;
use triptych_runtime::metrics::Labels;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::telemetry::{self, TelemetryGuard};
use triptych_runtime::{Drain, MetricsRegistry};

/// State that every role has. Spans are flushed when it is dropped.
struct Process {
    drain: Drain,
    metrics: MetricsRegistry,
    _telemetry: TelemetryGuard,
}

impl Process {
    /// Starts logs, and watches signals.
    fn start(role: &str, log: &LogArgs, drain: &DrainArgs) -> Result<Self, CliError> {
        let telemetry = telemetry::init(&log.telemetry(role)).map_err(|e| CliError::Setting(chain(&e)))?;
        let drain = Drain::with_times(drain.times());
        drain.on_signals().map_err(|e| CliError::failed("cannot watch signals", &e))?;
        let metrics = MetricsRegistry::default();
        show_stop(&drain, &metrics);
        Ok(Self { drain, metrics, _telemetry: telemetry })
    }
}

/// Sets a gauge when the process stops.
fn show_stop(drain: &Drain, metrics: &MetricsRegistry) {
    let gauge = metrics.gauges(DRAINING).get_or_create_owned(&Labels::new());
    gauge.set(0.0);
    let stopping = drain.clone();
    drain.background().spawn(async move {
        stopping.stopping().await;
        gauge.set(1.0);
    });
}

async fn bind_admin(address: Option<&str>) -> Result<Option<TcpListener>, CliError> {
    match address {
        Some(address) => listen::bind("--admin", address).await.map(Some),
        None => Ok(None),
    }
}

/// The journal of a worker, in memory that outlives it: where `/dev/shm` is, a container needs no writable disk for it.
/// Its name is that of the worker and its address, which its successor has too. A worker that cannot have one does
/// without: requests that it dies of are then known by the second death.
fn journal(id: &WorkerId, grpc: &TcpListener) -> StartJournal {
    let uid = fs::metadata("/proc/self").map_or(0, |own| own.uid());
    let address = grpc.local_addr().map_or_else(|_| String::new(), |address| address.to_string());
    let name: String =
        format!("{id}-{address}").chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let path = shared_dir::root().join(format!("triptych-starts-{uid}")).join(name);
    StartJournal::open(&path).unwrap_or_else(|e| {
        tracing::info!(path = %path.display(), error = %e, "no journal of starting requests");
        StartJournal::without_file()
    })
}

/// The given name, or role and address.
fn worker_id(given: Option<&str>, role: &str, grpc: &TcpListener) -> WorkerId {
    match (given, grpc.local_addr()) {
        (Some(id), _) => WorkerId::new(id),
        (None, Ok(address)) => WorkerId::new(format!("{role}@{address}")),
        (None, Err(_)) => WorkerId::new(role),
    }
}
