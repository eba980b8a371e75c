//! `POST /v1/encoder_outputs`: an item is encoded and stays in the store, and its output has a name that stands for it in
//! later requests (a part `{"type": "encoder_output", "encoder_output": {"id"}}`). The body is a conversation of one item, as
//! that of `/pooling`.

use super::api::{HttpApi, request_id};
use super::body;
use super::chat::ChatBody;
use super::error::HttpError;
use super::sampling::SamplingBody;
use crate::orchestrate::RowsOf;
use crate::request::OutputName;
use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;
use serde::de::IgnoredAny;
use triptych_core::{Failure, Modality};

/// An encoder output in the store.
#[derive(Debug, Serialize)]
pub(super) struct StoredOutput {
    id: String,
    object: &'static str,
    model: String,
    modality: &'static str,
    n_tokens: u32,
    hidden: u32,
}

pub(super) async fn create(
    State(api): State<HttpApi>,
    request: Request,
) -> Result<Json<StoredOutput>, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let (chat, _): (ChatBody, IgnoredAny) =
            body::json_twice(&api, &call, &parts.headers, content).await?;
        chat.check_supported()?;
        let request = chat.into_request(&call, SamplingBody::default())?;
        if request.items.is_empty() {
            let message = "messages have no item, allowed is one image, audio clip or video";
            return Err(Failure::invalid(message).with_param("messages").into());
        }
        Ok::<_, HttpError>((request, call.permit))
    };
    let (request, permit) = read.await.inspect_err(|e| api.refused(id, e))?;
    let secret = request.tenant_secret(&api.orchestrator.materials.tenant_salt);
    let rows = api.orchestrator.rows(request, RowsOf::EachTower, &permit).await?;
    let [item, ..] = &rows.items()[..] else {
        return Err(Failure::internal("an item without an output").into());
    };
    if item.modality == Modality::Text {
        return Err(Failure::internal("a text where an item was asked for").into());
    }
    Ok(Json(StoredOutput {
        id: OutputName::new(item.modality, rows.items().iter().map(|item| item.key).collect(), &secret)
            .to_string(),
        object: "encoder_output",
        model: rows.model.to_string(),
        modality: item.modality.as_str(),
        n_tokens: rows.items().iter().map(|item| item.n_tokens).fold(0, u32::saturating_add),
        hidden: item.hidden,
    }))
}
