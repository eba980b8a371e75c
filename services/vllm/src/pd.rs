//! The service of a PD worker over a vLLM server.

use crate::ask::{Ask, tokenize};
use crate::failure::CallError;
use crate::server::VllmServer;
use crate::states::{States, watch};
use crate::stream::{Messages, messages};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Instant;
use tonic::{Request, Response, Status};
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorker;
use triptych_runtime::status::to_status;

/// Adapters of vLLM are loaded by its own API.
pub(crate) const NO_ADAPTERS: &str = "a vLLM server's adapters are loaded by its own API";

/// Answer of `/tokenize`.
#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
    #[serde(default)]
    token_strs: Option<Vec<String>>,
    #[serde(default)]
    max_model_len: u32,
}

/// Answer of `/detokenize`.
#[derive(Deserialize)]
struct Text {
    prompt: String,
}

impl VllmServer {
    async fn ask<T: for<'a> Deserialize<'a>>(&self, path: &str, body: &Value) -> Result<T, Status> {
        let answer =
            self.http.post(&self.address.url, path, (Default::default(), body.to_string().into_bytes()));
        let answer = answer.await.map_err(CallError::into_status)?;
        let unreadable = |e: serde_json::Error| CallError::Unreadable(e.to_string()).into_status();
        serde_json::from_slice(&answer).map_err(unreadable)
    }
}

fn refused(failure: Failure) -> Status {
    to_status(&failure)
}

#[tonic::async_trait]
impl PrefillDecodeWorker for VllmServer {
    type GenerateStream = Messages;
    type WatchStream = States;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        self.describe_pd().await.map(Response::new).map_err(CallError::into_status)
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<States>, Status> {
        watch(self.clone()).await.map(Response::new)
    }

    async fn generate(&self, request: Request<v1::PdGenerateRequest>) -> Result<Response<Messages>, Status> {
        let headers = self.headers(&request.get_ref().request_id, request.metadata()).map_err(refused)?;
        let mut ask = Ask::read(request.into_inner(), &self.address).map_err(refused)?;
        let body = Value::Object(std::mem::take(&mut ask.body)).to_string().into_bytes();
        let began = Instant::now();
        match self.http.open(&self.address.url, ask.path, (headers, body)).await {
            Ok(response) => Ok(Response::new(messages(self.clone(), ask, (response, began)))),
            Err(e) => Err(self.explained(e, &ask).await),
        }
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let body = tokenize(request.into_inner()).map_err(refused)?;
        let tokens: Tokens = self.ask("/tokenize", &Value::Object(body)).await?;
        Ok(Response::new(v1::TokenizeResponse {
            token_ids: tokens.tokens,
            texts: tokens.token_strs.unwrap_or_default(),
            max_context: tokens.max_model_len,
        }))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let v1::DetokenizeRequest { model, token_ids } = request.into_inner();
        let text: Text = self.ask("/detokenize", &json!({"model": model, "tokens": token_ids})).await?;
        Ok(Response::new(v1::DetokenizeResponse { text: text.prompt }))
    }

    async fn load_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn unload_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }
}
