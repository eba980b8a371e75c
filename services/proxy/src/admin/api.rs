//! State that every route of the admin API shares, and its errors.

use super::changes::ModelChanges;
use crate::admission::Admission;
use crate::auth::Auth;
use crate::cache::EncoderCache;
use crate::orchestrate::Orchestrator;
use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::sync::Arc;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::status::http_status_of;

/// An answer without content.
pub(super) const DONE: StatusCode = StatusCode::NO_CONTENT;

/// The parts that it acts on. Cheap to clone.
#[derive(Clone)]
pub struct AdminApi {
    /// Requests and workers.
    pub orchestrator: Arc<Orchestrator>,
    /// Bound on requests in flight.
    pub admission: Admission,
    /// Quotas.
    pub auth: Auth,
    /// The store of encoder outputs.
    pub cache: EncoderCache,
    /// Changes of models.
    pub changes: ModelChanges,
}

/// A failure as this API answers it.
#[derive(Debug)]
pub(super) struct AdminError(Failure);

impl From<Failure> for AdminError {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let Self(failure) = self;
        let body = json!({"error": {"message": failure.message, "code": failure.class.as_str()}});
        (http_status_of(&failure), Json(body)).into_response()
    }
}

pub(super) fn not_found(message: String) -> AdminError {
    Failure::new(FailureClass::NotFound, message).into()
}

/// A body of JSON, whatever its content type says, so that `curl -d` will do.
pub(super) fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, AdminError> {
    serde_json::from_slice(bytes).map_err(|e| Failure::invalid(format!("the body: {e}")).into())
}
