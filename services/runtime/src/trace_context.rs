//! W3C trace context over HTTP headers and gRPC metadata: the spans of a request in all processes form one trace.

use http::HeaderMap;
use http::header::HeaderName;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{MetadataKey, MetadataMap};
use tonic::{Request, Status};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use triptych_core::RequestId;

/// Tracing target of the request log: a line for each request in the proxy (level INFO), and for each job and call of it
/// in the workers (level DEBUG). It is filtered apart from all else, as in `--log info,triptych::request=debug`.
pub const REQUEST_TARGET: &str = "triptych::request";

/// Header of a trace context (<https://www.w3.org/TR/trace-context/>).
const TRACE_PARENT: &str = "traceparent";

struct MetadataWriter<'a>(&'a mut MetadataMap);

impl Injector for MetadataWriter<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::from_bytes(key.as_bytes()), value.parse()) {
            self.0.insert(key, value);
        }
    }
}

struct HeaderReader<'a>(&'a HeaderMap);

impl Extractor for HeaderReader<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|v| v.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Writes the current span's context into outgoing metadata.
pub fn inject(metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut MetadataWriter(metadata));
}

/// A request id for spans and logs; empty for a text that is no request id, which could hold anything.
pub fn id_for_span(text: &str) -> String {
    RequestId::parse(text).map(|id| id.to_string()).unwrap_or_default()
}

/// The same as an interceptor, for clients that know no spans.
///
/// # Errors
/// None.
pub fn injected(mut request: Request<()>) -> Result<Request<()>, Status> {
    inject(request.metadata_mut());
    Ok(request)
}

/// True if headers carry a trace context.
pub fn is_in(headers: &HeaderMap) -> bool {
    headers.contains_key(TRACE_PARENT)
}

/// Makes `span` a child of the context in incoming headers, if there is one.
pub fn adopt(span: &Span, headers: &HeaderMap) {
    if is_in(headers) {
        // Fails only for a span that the subscriber has disabled.
        let _ = span.set_parent(TraceContextPropagator::new().extract(&HeaderReader(headers)));
    }
}
