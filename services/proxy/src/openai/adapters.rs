//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in the format of vLLM.

use super::api::{HttpApi, request_id};
use super::body;
use super::error::HttpError;
use crate::orchestrate::NewAdapter;
use axum::extract::{Request, State};
use serde::Deserialize;
use serde::de::IgnoredAny;
use triptych_core::{Failure, ModelName};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadBody {
    lora_name: Option<String>,
    lora_path: Option<String>,
    base_model_name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnloadBody {
    lora_name: Option<String>,
}

fn needed(value: Option<String>, name: &'static str) -> Result<String, Failure> {
    let given = value.filter(|text| !text.is_empty());
    given.ok_or_else(|| Failure::invalid(format!("{name} is missing")).with_param(name))
}

/// The failure of a request without a base model, in the words of its fields.
fn without_base(failure: Failure) -> Failure {
    match failure.param.as_deref() {
        Some("model") => {
            let message = "more than one model is served: name the adapter's in base_model_name";
            Failure::invalid(message).with_param("base_model_name")
        }
        _ => failure,
    }
}

pub(super) async fn load(State(api): State<HttpApi>, request: Request) -> Result<String, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let (asked, _): (LoadBody, IgnoredAny) =
            body::json_twice(&api, &call, &parts.headers, content).await?;
        let adapter = NewAdapter {
            name: needed(asked.lora_name, "lora_name")?,
            path: needed(asked.lora_path, "lora_path")?,
            base: asked.base_model_name.filter(|name| !name.is_empty()).map(ModelName::new),
        };
        Ok::<_, HttpError>((call, adapter))
    };
    let (call, adapter) = read.await.inspect_err(|e| api.refused(id, e))?;
    let (name, names_base) = (adapter.name.clone(), adapter.base.is_some());
    let loaded = api.orchestrator.load_adapter(adapter, &call.caller, call.deadline).await;
    loaded.map_err(|failure| if names_base { failure } else { without_base(failure) })?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

pub(super) async fn unload(State(api): State<HttpApi>, request: Request) -> Result<String, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let (parts, content) = request.into_parts();
        let (asked, _): (UnloadBody, IgnoredAny) =
            body::json_twice(&api, &call, &parts.headers, content).await?;
        Ok::<_, HttpError>((call, needed(asked.lora_name, "lora_name")?))
    };
    let (call, name) = read.await.inspect_err(|e| api.refused(id, e))?;
    api.orchestrator.unload_adapter(&ModelName::new(name.as_str()), &call.caller, call.deadline).await?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}
