//! `GET /v1/models` and `/v1/models/{id}`.

use super::api::HttpApi;
use super::error::HttpError;
use crate::fleet::catalog::Served;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde::Serialize;
use std::collections::BTreeSet;
use triptych_core::ModelName;

#[derive(Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// A model: OpenAI's fields, and context length and modalities as extensions.
#[derive(Serialize)]
pub(super) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: u32,
    modalities: Vec<&'static str>,
    /// Of an adapter: its base model.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
}

impl From<&Served> for Model {
    fn from(m: &Served) -> Self {
        Self {
            id: m.name.to_string(),
            object: "model",
            created: m.created_s,
            owned_by: "triptych",
            max_model_len: m.max_context,
            modalities: m.modalities().map(|m| m.as_str()).collect(),
            parent: m.adapter.as_ref().map(|(base, _)| base.to_string()),
        }
    }
}

pub(super) async fn list(
    State(api): State<HttpApi>,
    headers: HeaderMap,
) -> Result<Json<ModelList>, HttpError> {
    let caller = api.auth.identify(&headers)?;
    let catalog = api.orchestrator.fleet.catalog();
    let models = catalog.models().into_values().filter(|served| caller.may_use(&served.name));
    Ok(Json(ModelList { object: "list", data: models.map(Model::from).collect() }))
}

pub(super) async fn one(
    State(api): State<HttpApi>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Json<Model>, HttpError> {
    let caller = api.auth.identify(&headers)?;
    let catalog = api.orchestrator.fleet.catalog();
    let name = ModelName::new(id);
    caller.check_model(&name)?;
    match catalog.models().get(&name) {
        Some(served) => Ok(Json(Model::from(*served))),
        // The same text as for a request that names it.
        None => match catalog.choose(Some(&name), &BTreeSet::new()) {
            Err(failure) => Err(failure.into()),
            Ok(route) => Ok(Json(Model::from(&route.served))),
        },
    }
}
