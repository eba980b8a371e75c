//! The span of an HTTP request, by OpenTelemetry's conventions for HTTP servers. Probes have none.

use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::uri::{Authority, Scheme};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::Response;
use tracing::{Instrument, Span};
use triptych_core::FailureClass;
use triptych_core::timeline::CALLS;
use triptych_runtime::server_spans::{BodyEnd, SpanBody};
use triptych_runtime::spans::{attribute, served_failure, set};
use triptych_runtime::trace_context;

/// Start of the paths of the API.
const API: &str = "/v1/";

/// Runs a request inside its span, which stays open until the last byte of the response is taken.
pub(super) async fn traced(request: Request, next: Next) -> Response {
    if !request.uri().path().starts_with(API) {
        return next.run(request).await;
    }
    let span = span_of(&request);
    trace_context::adopt(&span, request.headers());
    let response = next.run(request).instrument(span.clone()).await;
    set(&span, attribute::HTTP_STATUS, i64::from(response.status().as_u16()));
    if let Some(class) = response.extensions().get::<FailureClass>() {
        served_failure(&span, *class);
    }
    response.map(|body| Body::new(SpanBody::new(body, span, body_end)))
}

/// A path that is no route could hold anything, so it stays out.
fn span_of(request: &Request) -> Span {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let method = method_of(request.method());
    let scheme = request.extensions().get::<Scheme>().unwrap_or(&Scheme::HTTP);
    let host = request.headers().get(header::HOST).and_then(|host| Authority::try_from(host.as_bytes()).ok());
    tracing::info_span!(
        target: CALLS,
        "http",
        otel.kind = "server",
        otel.name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}")),
        http.request.method = method,
        http.route = route,
        url.scheme = scheme.as_str(),
        url.path = route.map(|_| request.uri().path()),
        server.address = host.as_ref().map(Authority::host),
        server.port = host.as_ref().and_then(Authority::port_u16).map(i64::from),
        network.protocol.version = "1.1",
    )
}

/// A method as the conventions name it.
fn method_of(method: &Method) -> &str {
    let known = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::HEAD,
        Method::OPTIONS,
        Method::PATCH,
        Method::CONNECT,
        Method::TRACE,
    ];
    if known.contains(method) { method.as_str() } else { "_OTHER" }
}

fn body_end(span: &Span, end: BodyEnd<'_>) {
    if matches!(end, BodyEnd::Dropped) {
        served_failure(span, FailureClass::Cancelled);
    }
}
