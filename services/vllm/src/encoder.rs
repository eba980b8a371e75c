//! The service of an encoder worker over a vLLM server.
//!
//! An instance that only encodes is asked for one token about the item: its EC connector publishes the output while it answers.
//! Where it publishes under the proxy's keys, the job has ended when the store has the object, whose head describes the output
//! to workers of ours ([`published`]). An instance that encodes what it reads has nothing to do before: its items go with their
//! bytes.

mod published;

use crate::failure::CallError;
use crate::items::{AskedItem, check, encoder_instance, own_encoder};
use crate::pd::NO_ADAPTERS;
use crate::server::VllmServer;
use crate::states::{States, watch};
use futures::stream::{self, BoxStream, StreamExt};
use http::HeaderMap;
use published::WRITE_BEHIND;
use serde_json::json;
use std::time::Instant;
use tonic::{Request, Response, Status};
use triptych_core::{DType, EncodedItem, Extent, Failure, Modality};
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_server::EncoderWorker;
use triptych_proto::{convert, v1};
use triptych_runtime::status::to_status;

/// Events of a job.
type Events = BoxStream<'static, Result<v1::EncodeEvent, Status>>;

/// An encode job.
struct EncodeJob {
    model: String,
    item: AskedItem,
}

impl EncodeJob {
    fn read(request: v1::EncodeRequest) -> Result<Self, Failure> {
        let form = convert::item_form(&request)?;
        let modality = convert::modality(request.modality)?;
        let options = convert::options(request.options.clone().unwrap_or_default(), form)?;
        check(modality, &options, &request.item)?;
        let output = EncodedItem {
            key: convert::key(&request.key, "key")?,
            fingerprint: convert::fingerprint(&request.fingerprint, "fingerprint")?,
            modality,
            n_tokens: 1,
            hidden: 1,
            dtype: DType::F32,
            extent: nominal_extent(modality),
            checksum: [0; 32],
        };
        let original =
            v1::OriginalItem { data: request.item, options: request.options, is_embeddings: false };
        Ok(Self { model: request.model, item: AskedItem { output, original } })
    }
}

/// Extent of an output that the proxy only names: vLLM finds its size by itself.
fn nominal_extent(modality: Modality) -> Extent {
    match modality {
        Modality::Image | Modality::Video => Extent::Grid { t: 1, h: 1, w: 1 },
        Modality::Audio => Extent::windows(1, 0),
        Modality::Text => Extent::Tokens,
    }
}

impl VllmServer {
    /// Has an item encoded; returns its output.
    async fn encode_item(&self, job: &EncodeJob, headers: HeaderMap) -> Result<EncodedItem, Status> {
        let fingerprint = job.item.output.fingerprint;
        if fingerprint == own_encoder(&job.model) {
            return Ok(job.item.output.clone());
        }
        if fingerprint == encoder_instance(&job.model) {
            self.ask_encoder(job, headers).await?;
            return Ok(job.item.output.clone());
        }
        self.make_room(&job.item.output).await;
        self.ask_encoder(job, headers).await?;
        let output = self.published(&job.item.output, WRITE_BEHIND).await;
        output.map_err(|failure| to_status(&failure))
    }

    /// Asks for one token about the item, which has it encoded and published.
    async fn ask_encoder(&self, job: &EncodeJob, headers: HeaderMap) -> Result<(), Status> {
        let part = job.item.part(&job.model).map_err(|failure| to_status(&failure))?;
        let body = json!({
            "model": job.model, "max_tokens": 1, "stream": false,
            "messages": [{"role": "user", "content": [part]}],
        });
        let call = (headers, body.to_string().into_bytes());
        let answered = self.http.post(&self.address.url, "/v1/chat/completions", call).await;
        answered.map(drop).map_err(CallError::into_status)
    }
}

#[tonic::async_trait]
impl EncoderWorker for VllmServer {
    type EncodeStream = Events;
    type WatchStream = States;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        self.describe_encoder().await.map(Response::new).map_err(CallError::into_status)
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<States>, Status> {
        watch(self.clone()).await.map(Response::new)
    }

    async fn encode(&self, request: Request<v1::EncodeRequest>) -> Result<Response<Events>, Status> {
        let headers = self.headers(&request.get_ref().request_id, request.metadata());
        let headers = headers.map_err(|failure| to_status(&failure))?;
        let job = EncodeJob::read(request.into_inner()).map_err(|failure| to_status(&failure))?;
        let began = Instant::now();
        let output = self.encode_item(&job, headers).await?;
        let encode_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let item = Some((&output).into());
        let ready = v1::EncodeResponse { item, encode_us, ..v1::EncodeResponse::default() };
        let event = v1::EncodeEvent { kind: Some(Kind::Ready(ready)) };
        Ok(Response::new(stream::iter([Ok(event)]).boxed()))
    }

    async fn load_encoder_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }

    async fn unload_encoder_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented(NO_ADAPTERS))
    }
}
