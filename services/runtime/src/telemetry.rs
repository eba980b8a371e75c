//! Logs to stderr, spans to an OTLP collector and to a timeline when those are configured. None carries a client's
//! text.
//!
//! Each has a filter of its own: the log's is a setting; spans go out whatever the log says.

use crate::timeline::{Rotation, Timeline, TimelineGuard};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use parking_lot::Mutex;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::OnceLock;
use thiserror::Error;
use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};
use triptych_core::timeline::{CALLS, COMPUTE, STORE};

/// First word of the targets of this product's spans.
const OURS: &str = "triptych";

/// Telemetry settings of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// Role in log lines and service name in traces.
    pub role: String,
    /// Filter directives of the log, for instance `info,triptych_engine=debug`. Empty: `info`.
    pub filter: String,
    /// One JSON object a line instead of text.
    pub json: bool,
    /// OTLP/gRPC endpoint, for instance `http://127.0.0.1:4317`. `None`: spans are not exported.
    pub otlp_endpoint: Option<String>,
    /// File that a timeline is appended to. `None`: no timeline.
    pub timeline: Option<PathBuf>,
    /// Size and number of the timeline's files.
    pub rotation: Rotation,
}

/// A telemetry setting that cannot be used.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// Wrong filter directives.
    #[error("log filter {filter:?} is wrong: {source}")]
    Filter {
        /// The value given.
        filter: String,
        /// Cause.
        source: tracing_subscriber::filter::ParseError,
    },
    /// There is no log of this process to change.
    #[error("this process has no log of its own to change")]
    NoLog,
    /// The exporter cannot be built.
    #[error("OTLP endpoint {endpoint:?}: {message}")]
    Otlp {
        /// The value given.
        endpoint: String,
        /// Cause.
        message: String,
    },
    /// The file cannot be written.
    #[error("timeline {}: {source}", file.display())]
    Timeline {
        /// The value given.
        file: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Flushes spans and the timeline when dropped.
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: SdkTracerProvider,
    _timeline: Option<TimelineGuard>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        // An unreachable collector must not delay the exit.
        let _ = self.provider.shutdown();
    }
}

/// Installs the process-wide subscriber. Needs a tokio runtime when spans are exported.
///
/// # Errors
/// [`TelemetryError`] for settings that cannot be used. A second call in one process keeps the first.
pub fn init(config: &TelemetryConfig) -> Result<TelemetryGuard, TelemetryError> {
    let directives = if config.filter.is_empty() { "info,h2=warn,hyper=warn" } else { &config.filter };
    let wrong = |source| TelemetryError::Filter { filter: config.filter.clone(), source };
    let (filter, handle) = reload::Layer::new(parse(directives).map_err(wrong)?);
    let format =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours()).with_target(false);
    let format = if config.json { format.json().boxed() } else { format.compact().boxed() };
    // The propagator needs span contexts even where nothing is exported, so a provider is always there.
    let provider = provider(config)?;
    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer(OURS))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        // Contexts are asked of spans. Made current at every entry, each poll of a request would pay for it.
        .with_context_activation(false);
    let store = if config.otlp_endpoint.is_some() { LevelFilter::INFO } else { LevelFilter::OFF };
    let exported = [(OURS, LevelFilter::INFO), (STORE, store), (COMPUTE, LevelFilter::OFF)];
    let spans = spans.with_filter(exported.into_iter().collect::<Targets>());
    let mut guard = TelemetryGuard { provider, _timeline: None };
    let timeline = match &config.timeline {
        None => None,
        Some(file) => {
            let (timeline, writing) = Timeline::append(file, &config.role, config.rotation)
                .map_err(|source| TelemetryError::Timeline { file: file.clone(), source })?;
            guard._timeline = Some(writing);
            let recorded = [(OURS, LevelFilter::INFO), (COMPUTE, LevelFilter::TRACE)];
            Some(timeline.with_filter(recorded.into_iter().collect::<Targets>()))
        }
    };
    let layers = tracing_subscriber::registry().with(format.with_filter(filter)).with(spans).with(timeline);
    if layers.try_init().is_ok() {
        let _ = LOG_FILTER.set(LogFilter { handle, directives: Mutex::new(directives.to_owned()) });
    }
    Ok(guard)
}

/// The log's filter, with the spans of calls left out.
fn parse(directives: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::try_new(format!("{directives},{CALLS}=off,{STORE}=off"))
}

/// The filter of this process's log, which may change while it runs.
struct LogFilter {
    handle: reload::Handle<EnvFilter, Registry>,
    directives: Mutex<String>,
}

/// That of the process-wide subscriber, if [`init`] installed it.
static LOG_FILTER: OnceLock<LogFilter> = OnceLock::new();

/// Directives of the log's filter; `None` where [`init`] did not install the log.
pub fn log_filter() -> Option<String> {
    LOG_FILTER.get().map(|filter| filter.directives.lock().clone())
}

/// Changes the log's filter, for this process and until it ends.
///
/// # Errors
/// [`TelemetryError::Filter`] for wrong directives, [`TelemetryError::NoLog`] where [`init`] did not install the log.
pub fn set_log_filter(directives: &str) -> Result<(), TelemetryError> {
    let wrong = |source| TelemetryError::Filter { filter: directives.to_owned(), source };
    let new = parse(directives).map_err(wrong)?;
    let filter = LOG_FILTER.get().ok_or(TelemetryError::NoLog)?;
    let mut current = filter.directives.lock();
    filter.handle.reload(new).map_err(|_| TelemetryError::NoLog)?;
    directives.clone_into(&mut current);
    Ok(())
}

/// True for a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
fn colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

fn provider(config: &TelemetryConfig) -> Result<SdkTracerProvider, TelemetryError> {
    let builder = SdkTracerProvider::builder().with_resource(resource(&config.role));
    let Some(endpoint) = &config.otlp_endpoint else { return Ok(builder.build()) };
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .map_err(|e| TelemetryError::Otlp { endpoint: endpoint.clone(), message: e.to_string() })?;
    Ok(builder.with_batch_exporter(exporter).build())
}

/// The process, as a collector knows it. `OTEL_RESOURCE_ATTRIBUTES` adds to it.
fn resource(role: &str) -> Resource {
    let builder = Resource::builder().with_service_name(format!("{OURS}-{role}"));
    let given = Resource::builder().build();
    let own = [
        ("service.namespace", OURS.to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance_id(rand::random())),
    ];
    let is_open = |(name, _): &(&'static str, String)| given.get_ref(&Key::from_static_str(name)).is_none();
    let own = own.into_iter().filter(is_open).map(|(name, value)| KeyValue::new(name, value));
    builder
        .with_attributes(own)
        .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
        .build()
}

/// A random UUID, version 4 (RFC 9562).
fn instance_id(bits: u128) -> String {
    let bits = bits & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_has_a_uuid_of_version_4() {
        assert_eq!(instance_id(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(instance_id(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn a_process_has_name_version_and_instance() {
        let [first, second] = [resource("pd"), resource("pd")];
        let of = |resource: &Resource, name| resource.get(&Key::from_static_str(name)).map(|v| v.to_string());
        assert_eq!(of(&first, "service.name").as_deref(), Some("triptych-pd"));
        assert_eq!(of(&first, "service.version").as_deref(), Some(env!("CARGO_PKG_VERSION")));
        assert_ne!(of(&first, "service.instance.id"), of(&second, "service.instance.id"));
    }
}
