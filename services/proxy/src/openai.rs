//! The HTTP face: OpenAI's interface, as its clients speak it
//! (platform.openai.com/docs/api-reference: chat, completions, audio, models), and the probes of a process.
//!
//! It turns JSON and forms into a [`crate::request::Request`] and pieces of an answer into OpenAI's shapes; it decides
//! nothing else. Fields that it does not know are ignored; fields that it knows and cannot honour are refused, so that
//! no answer differs silently from what was asked for.

mod body;
mod chat;
mod completions;
mod error;
pub mod listen;
mod models;
mod sampling;
mod speech;
mod sse;
mod usage;

use crate::admission::{Admission, Permit};
use crate::auth::{Auth, Caller};
use crate::config::ClientTimes;
use crate::orchestrate::Orchestrator;
use crate::request::Resumption;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use error::HttpError;
use std::sync::Arc;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tracing::Span;
use triptych_core::limits::Limits;
use triptych_core::{Failure, FailureClass, RequestId};
use triptych_runtime::metrics::CONTENT_TYPE;
use triptych_runtime::{MetricsRegistry, trace_context};

/// Header that says what becomes of a stream whose worker goes away.
const RESUME_HEADER: &str = "x-triptych-resume";

/// What every route works with.
#[derive(Clone)]
pub struct Face(Arc<Parts>);

/// The parts of a [`Face`].
pub struct Parts {
    /// Does the work.
    pub orchestrator: Arc<Orchestrator>,
    /// What a request may ask.
    pub limits: Limits,
    /// Lets requests in.
    pub admission: Admission,
    /// Knows clients.
    pub auth: Auth,
    /// Patience with clients.
    pub times: ClientTimes,
    /// For `/metrics`.
    pub registry: MetricsRegistry,
}

impl std::ops::Deref for Face {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

/// A request that was let in, before its body is read.
struct Call {
    id: RequestId,
    arrived: Instant,
    deadline: Instant,
    permit: Permit,
    span: Span,
    caller: Caller,
    resumption: Resumption,
}

impl Face {
    /// Wraps the parts.
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }

    /// All routes.
    pub fn routes(self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat::complete))
            .route("/v1/completions", post(completions::complete))
            .route("/v1/audio/transcriptions", post(speech::transcribe))
            .route("/v1/audio/translations", post(speech::translate))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*id}", get(models::one))
            .route("/healthz", get(async || "ok\n"))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .fallback(no_route)
            .method_not_allowed_fallback(wrong_method)
            .layer(middleware::from_fn(name_request))
            // The body's own reader holds the limit, and says it in OpenAI's shape.
            .layer(DefaultBodyLimit::disable())
            .with_state(self)
    }

    /// What an operator's programs ask.
    pub fn admin_routes(self) -> Router {
        Router::new()
            .route("/healthz", get(async || "ok\n"))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
    }

    /// Lets a request in.
    fn admit(&self, request: &Request) -> Result<Call, HttpError> {
        let caller = self.auth.identify(request.headers())?;
        let permit = self.admission.enter()?;
        let caller = caller.enter()?;
        let id = request.extensions().get::<RequestId>().copied();
        let id = id.unwrap_or_else(|| RequestId::from_bits(rand::random()));
        let span = tracing::info_span!("request", request_id = %id, face = "http");
        trace_context::adopt(&span, &MetadataMap::from_headers(request.headers().clone()));
        let arrived = Instant::now();
        let resumption = resumption(request.headers())?;
        let deadline = arrived + self.limits.max_request_time;
        Ok(Call { id, arrived, deadline, permit, span, caller, resumption })
    }

    /// Counts a request that is refused before a model is chosen for it.
    fn refused(&self, error: &HttpError) {
        self.orchestrator.observer.refused(&error.failure);
    }

    fn is_ready(&self) -> bool {
        self.orchestrator.fleet.catalog().is_ready() && !self.orchestrator.drain.is_stopping()
    }
}

/// What becomes of a stream whose worker goes away.
fn resumption(headers: &HeaderMap) -> Result<Resumption, Failure> {
    match headers.get(RESUME_HEADER).map(HeaderValue::as_bytes) {
        None | Some(b"go-on") => Ok(Resumption::GoOn),
        Some(b"never") => Ok(Resumption::Never),
        Some(_) => Err(Failure::invalid(format!("the header {RESUME_HEADER} is neither go-on nor never"))),
    }
}

/// Gives every request its id, and every response the id of its request.
async fn name_request(mut request: Request, next: Next) -> Response {
    let id = RequestId::from_bits(rand::random());
    request.extensions_mut().insert(id);
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

async fn ready(State(face): State<Face>) -> impl IntoResponse {
    if face.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

async fn metrics(State(face): State<Face>) -> impl IntoResponse {
    face.orchestrator.observer.running(face.admission.n_inside());
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], face.registry.encode())
}

async fn no_route(method: Method, uri: Uri) -> HttpError {
    Failure::new(FailureClass::NotFound, format!("there is no {method} {}", uri.path())).into()
}

async fn wrong_method(method: Method, uri: Uri) -> HttpError {
    let message = format!("{method} is not allowed on {}", uri.path());
    HttpError { status: StatusCode::METHOD_NOT_ALLOWED, failure: Failure::invalid(message), closes: false }
}
