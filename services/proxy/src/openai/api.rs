//! State that every route shares, and admission of a request before its body is read.

use super::cors::AllowedOrigin;
use super::error::HttpError;
use crate::admission::{Admission, Permit};
use crate::auth::{Auth, Caller};
use crate::bounds::SessionBounds;
use crate::config::ClientTimes;
use crate::orchestrate::Orchestrator;
use crate::request::{Api, Resumption};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use tokio::time::Instant;
use triptych_core::limits::Limits;
use triptych_core::{Failure, RequestId};
use triptych_runtime::MetricsRegistry;

/// Header that selects what happens to a stream whose worker dies: `go-on` or `never`.
const RESUME_HEADER: &str = "x-triptych-resume";

/// The HTTP API. Cheap to clone.
#[derive(Clone)]
pub struct HttpApi(Arc<HttpApiParts>);

/// The parts of an [`HttpApi`].
pub struct HttpApiParts {
    /// Runs requests.
    pub orchestrator: Arc<Orchestrator>,
    /// Limits on requests.
    pub limits: Limits,
    /// Bound on requests in flight.
    pub admission: Admission,
    /// Identifies clients.
    pub auth: Auth,
    /// Timeouts for slow clients.
    pub times: ClientTimes,
    /// For `/metrics`.
    pub registry: MetricsRegistry,
    /// Origins whose web pages may call the API from a browser.
    pub allowed_origins: Vec<AllowedOrigin>,
    /// Bounds on live transcriptions.
    pub sessions: SessionBounds,
}

impl std::ops::Deref for HttpApi {
    type Target = HttpApiParts;

    fn deref(&self) -> &HttpApiParts {
        &self.0
    }
}

/// A request that was admitted; its body is not read yet.
pub(super) struct AdmittedCall {
    pub(super) id: RequestId,
    pub(super) arrived: Instant,
    pub(super) deadline: Instant,
    pub(super) permit: Permit,
    pub(super) caller: Caller,
    pub(super) resumption: Resumption,
}

impl AdmittedCall {
    /// Asks whether it may have items, before its body is read to the end.
    pub(super) fn with_items(&self) -> Result<(), HttpError> {
        let asked = self.permit.with_items().and_then(|()| self.caller.with_items());
        asked.map_err(|failure| HttpError { closes: true, ..failure.into() })
    }
}

impl HttpApi {
    /// Wraps the parts.
    pub fn new(parts: HttpApiParts) -> Self {
        Self(Arc::new(parts))
    }

    /// Admits a request: identifies its caller, and takes its permits.
    pub(super) fn admit(&self, request: &Request) -> Result<AdmittedCall, HttpError> {
        let caller = self.auth.identify(request.headers())?;
        let permit = self.admission.enter()?;
        let caller = caller.enter()?;
        let id = request_id(request);
        let arrived = Instant::now();
        let resumption = resumption(request.headers())?;
        let deadline = arrived + self.limits.max_request_time;
        Ok(AdmittedCall { id, arrived, deadline, permit, caller, resumption })
    }

    /// Counts and logs a request that is refused before a model is chosen for it.
    pub(super) fn refused(&self, id: RequestId, error: &HttpError) {
        self.orchestrator.observer.refused(&error.failure);
        self.orchestrator.request_log.refused(id, Api::Http, &error.failure);
    }

    /// True if a model is served and the process is not stopping.
    pub(super) fn is_ready(&self) -> bool {
        self.orchestrator.fleet.catalog().is_ready() && !self.orchestrator.drain.is_stopping()
    }
}

/// Counts a request in the rate of its tenant that all proxies share. One without a valid key is for the handler to refuse.
pub(super) async fn count_in_all_proxies(
    State(api): State<HttpApi>,
    request: Request,
    next: Next,
) -> Result<Response, HttpError> {
    if request.method() == Method::POST
        && let Ok(caller) = api.auth.identify(request.headers())
    {
        let counted = caller.account.enter_shared().await.map_err(HttpError::from);
        counted.inspect_err(|e| api.refused(request_id(&request), e))?;
    }
    Ok(next.run(request).await)
}

/// The id that the request was given on arrival.
pub(super) fn request_id(request: &Request) -> RequestId {
    let id = request.extensions().get::<RequestId>().copied();
    id.unwrap_or_else(|| RequestId::from_bits(rand::random()))
}

/// Reads [`RESUME_HEADER`].
fn resumption(headers: &HeaderMap) -> Result<Resumption, Failure> {
    match headers.get(RESUME_HEADER).map(HeaderValue::as_bytes) {
        None | Some(b"go-on") => Ok(Resumption::GoOn),
        Some(b"never") => Ok(Resumption::Never),
        Some(_) => Err(Failure::invalid(format!("the header {RESUME_HEADER} is neither go-on nor never"))),
    }
}
