//! Logs to stderr, spans to an OTLP collector and to a timeline when those are configured. None carries a client's
//! text.

use crate::timeline::{Timeline, TimelineGuard};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use thiserror::Error;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};
use triptych_core::timeline::COMPUTE;

/// Telemetry settings of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// Role in log lines and service name in traces.
    pub role: String,
    /// Filter directives, for instance `info,triptych_engine=debug`. Empty: `info`.
    pub filter: String,
    /// One JSON object a line instead of text.
    pub json: bool,
    /// OTLP/gRPC endpoint, for instance `http://127.0.0.1:4317`. `None`: spans are not exported.
    pub otlp_endpoint: Option<String>,
    /// File that a timeline is appended to. `None`: no timeline.
    pub timeline: Option<PathBuf>,
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
    let filter = match &config.timeline {
        None => EnvFilter::try_new(directives),
        Some(_) => EnvFilter::try_new(format!("{directives},{COMPUTE}=trace")),
    };
    let filter = filter.map_err(wrong)?;
    let format =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours()).with_target(false);
    let format = if config.json { format.json().boxed() } else { format.compact().boxed() };
    // The propagator needs span contexts even where nothing is exported, so a provider is always there.
    let provider = provider(config)?;
    let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("triptych"));
    let logged = tracing_subscriber::registry().with(filter).with(format);
    let Some(file) = &config.timeline else {
        let _ = logged.with(spans).try_init();
        return Ok(TelemetryGuard { provider, _timeline: None });
    };
    let (timeline, guard) = Timeline::append(file, &config.role)
        .map_err(|source| TelemetryError::Timeline { file: file.clone(), source })?;
    let spans = spans.with_filter(filter_fn(|span| span.target() != COMPUTE));
    let timeline = timeline.with_filter(filter_fn(|span| span.target().starts_with("triptych")));
    let _ = logged.with(spans).with(timeline).try_init();
    Ok(TelemetryGuard { provider, _timeline: Some(guard) })
}

/// True for a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
fn colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

fn provider(config: &TelemetryConfig) -> Result<SdkTracerProvider, TelemetryError> {
    let resource = Resource::builder().with_service_name(format!("triptych-{}", config.role)).build();
    let builder = SdkTracerProvider::builder().with_resource(resource);
    let Some(endpoint) = &config.otlp_endpoint else { return Ok(builder.build()) };
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .map_err(|e| TelemetryError::Otlp { endpoint: endpoint.clone(), message: e.to_string() })?;
    Ok(builder.with_batch_exporter(exporter).build())
}
