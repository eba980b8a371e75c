//! Attributes and statuses of spans, by OpenTelemetry's semantic conventions for HTTP, RPC and generative AI
//! (<https://opentelemetry.io/docs/specs/semconv/>).
//!
//! A span never has a client's text, a tenant, a key or a token: of a failure its class, not its message.

use crate::status::{grpc_code, http_status};
use opentelemetry::trace::{Status, TraceContextExt};
use opentelemetry::{Array, StringValue, Value};
use tonic::Code;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use triptych_core::timeline::CALLS;
use triptych_core::{Failure, FailureClass};

/// Names of attributes.
pub mod attribute {
    /// Class of a failure.
    pub const ERROR_TYPE: &str = "error.type";
    /// gRPC code of a call's end, a number.
    pub const GRPC_STATUS: &str = "rpc.grpc.status_code";
    /// HTTP status of a response, a number.
    pub const HTTP_STATUS: &str = "http.response.status_code";
    /// Name of the worker that was called.
    pub const WORKER: &str = "triptych.worker.id";
    /// Number of the attempt, from 0.
    pub const ATTEMPT: &str = "triptych.attempt";
    /// First digits of an item's content key.
    pub const ITEM: &str = "triptych.item";
}

/// Sets an attribute of a span. The log does not show it.
pub fn set(span: &Span, key: &'static str, value: impl Into<Value>) {
    span.set_attribute(key, value);
}

/// Sets an attribute that is a list.
pub fn set_list(span: &Span, key: &'static str, values: &[&'static str]) {
    let values = values.iter().map(|value| StringValue::from(*value)).collect();
    set(span, key, Value::Array(Array::String(values)));
}

/// Gives a span another name in traces than in the log.
pub fn rename(span: &Span, name: String) {
    span.context().span().update_name(name);
}

/// Notes that what a span stands for failed. A cancelled one has no error.
pub fn failed(span: &Span, class: FailureClass) {
    set(span, attribute::ERROR_TYPE, class.as_str());
    if class != FailureClass::Cancelled {
        span.set_status(Status::error(class.as_str()));
    }
}

/// Notes the failure of a call on the side that serves it. As the conventions have it, what the client got wrong is no
/// error of the server: the status of the span stays unset.
pub fn served_failure(span: &Span, class: FailureClass) {
    set(span, attribute::ERROR_TYPE, class.as_str());
    if http_status(class).is_server_error() {
        span.set_status(Status::error(class.as_str()));
    }
}

/// A span of a call to another process: `service` with its package, `address` as `host:port`.
pub fn rpc_client(service: &'static str, method: &'static str, address: &str) -> Span {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    tracing::info_span!(
        target: CALLS,
        "rpc",
        otel.kind = "client",
        otel.name = format!("{service}/{method}"),
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        server.address = host,
        server.port = port.parse::<u16>().ok().map(i64::from),
    )
}

/// Notes the end of a call to another process.
pub fn called(span: &Span, outcome: Result<(), &Failure>) {
    let code = outcome.map_or_else(|failure| grpc_code(failure.class), |()| Code::Ok);
    set(span, attribute::GRPC_STATUS, code as i64);
    if let Err(failure) = outcome {
        failed(span, failure.class);
    }
}
