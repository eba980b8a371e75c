//! The HTTP API: OpenAI's interface, as its clients speak it (platform.openai.com/docs/api-reference: chat, completions,
//! responses, embeddings, audio, models), and the probes of a process.
//!
//! It turns JSON and forms into a [`crate::request::Request`], and pieces of an answer into OpenAI's objects; it decides
//! nothing else. Unknown fields are ignored; known fields that cannot be honoured are refused, so that no answer differs
//! silently from the request.

mod adapters;
mod api;
mod body;
mod chat;
mod collected;
mod completions;
pub mod cors;
mod embeddings;
mod encoder_outputs;
mod error;
mod item_settings;
mod json_error;
mod language_tag;
mod lists;
pub mod listen;
mod models;
mod part;
mod prompt_input;
mod prompt_logprobs;
mod realtime;
mod response_head;
mod responses;
mod sampling;
mod span;
mod speech;
mod sse;
mod status;
mod structured;
mod text_or_list;
mod token_logprob;
mod tokens;
mod upgrade;
mod usage;
mod whitespace;

pub use api::{HttpApi, HttpApiParts};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use error::HttpError;
use triptych_core::{Failure, FailureClass, RequestId};
use triptych_runtime::metrics::CONTENT_TYPE;

/// All routes.
pub fn routes(api: HttpApi) -> Router {
    let cors = cors::layer(&api.allowed_origins);
    let routes = Router::new()
        .route("/", get(status::page))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/responses", post(responses::create))
        .route("/v1/embeddings", post(embeddings::embed))
        .route("/pooling", post(embeddings::pool))
        .route("/v1/encoder_outputs", post(encoder_outputs::create))
        .route("/v1/audio/transcriptions", post(speech::transcribe))
        .route("/v1/audio/translations", post(speech::translate))
        .route("/v1/realtime", get(realtime::connect))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route_layer(middleware::from_fn_with_state(api.clone(), api::count_in_all_proxies))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .merge(probes())
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(add_request_id))
        .layer(middleware::from_fn(span::traced))
        // The body's own reader holds the limit, and reports it in OpenAI's format.
        .layer(DefaultBodyLimit::disable())
        .with_state(api);
    // Outermost: a preflight is answered whatever the route.
    match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    }
}

/// The probes and metrics alone, for the operator's port.
pub fn admin_routes(api: HttpApi) -> Router {
    probes().with_state(api)
}

/// Probes and metrics; `/health` is vLLM's name of `/healthz`.
fn probes() -> Router<HttpApi> {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/health", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
}

/// Gives every request an id, and every response the id of its request.
async fn add_request_id(mut request: Request, next: Next) -> Response {
    let id = RequestId::from_bits(rand::random());
    request.extensions_mut().insert(id);
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

async fn ready(State(api): State<HttpApi>) -> impl IntoResponse {
    if api.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

async fn metrics(State(api): State<HttpApi>) -> impl IntoResponse {
    api.orchestrator.observer.running(api.admission.n_inside());
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], api.registry.encode())
}

async fn no_route(method: Method, uri: Uri) -> HttpError {
    Failure::new(FailureClass::NotFound, format!("there is no {method} {}", uri.path())).into()
}

async fn wrong_method(method: Method, uri: Uri) -> HttpError {
    let message = format!("{method} is not allowed on {}", uri.path());
    HttpError { status: StatusCode::METHOD_NOT_ALLOWED, failure: Failure::invalid(message), closes: false }
}
