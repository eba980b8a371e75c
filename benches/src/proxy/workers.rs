//! An encoder and a PD worker that take no time.

use anyhow::Result;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind as EncodeKind;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_proto::v1::pd_generate_response::Kind as GenerateKind;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};
use triptych_runtime::grpc;

/// The one model.
pub const MODEL: &str = "null";
/// Largest message.
const MAX_MESSAGE: usize = 64 << 20;

type Stream<T> = BoxStream<'static, Result<T, Status>>;

/// Says what it was sent, and nothing about it.
struct Null;

/// The encoder that it has not.
pub fn fingerprint() -> Fingerprint {
    Fingerprint::of([b"null".as_slice()])
}

/// Starts an encoder; its address.
pub async fn encoder() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let service = EncoderWorkerServer::new(Null).max_decoding_message_size(MAX_MESSAGE);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::spawn(grpc::server(grpc::Peers::Cluster).add_service(service).serve_with_incoming(incoming));
    Ok(address)
}

/// Starts a PD worker; its address.
pub async fn pd() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let service = PrefillDecodeWorkerServer::new(Null).max_decoding_message_size(MAX_MESSAGE);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::spawn(grpc::server(grpc::Peers::Cluster).add_service(service).serve_with_incoming(incoming));
    Ok(address)
}

fn description() -> v1::DescribeResponse {
    let encoder = v1::worker_model::Encoder {
        modality: v1::Modality::from(Modality::Image).into(),
        fingerprint: fingerprint().as_bytes().to_vec().into(),
        ..v1::worker_model::Encoder::default()
    };
    let model = v1::WorkerModel {
        name: MODEL.into(),
        family: "null".into(),
        encoders: vec![encoder],
        max_context: 4096,
        max_items: 16,
        created_s: 1,
        reads_encoder_prompt: false,
        chat: None,
        parent: String::new(),
        adapter: Vec::new().into(),
        adapts_encoder: false,
        foreign_encoders: None,
        not_resumable: false,
    };
    v1::DescribeResponse { worker_id: "null".into(), models: vec![model], ..Default::default() }
}

fn idle() -> Stream<v1::WorkerState> {
    let load = v1::WorkerLoad { capacity: 4096, ..Default::default() };
    let state = v1::WorkerState { load: Some(load), ..Default::default() };
    stream::iter([Ok(state)]).chain(stream::pending()).boxed()
}

fn output(request: &v1::EncodeRequest) -> Option<EncoderOutput> {
    let item = EncodedItem {
        key: ContentKey::from_slice(&request.key)?,
        fingerprint: fingerprint(),
        modality: Modality::Image,
        n_tokens: 1,
        hidden: 1,
        dtype: DType::F32,
        extent: Extent::Grid { t: 1, h: 1, w: 1 },
        checksum: [0; 32],
    };
    EncoderOutput::seal(item, from_f32(&[1.0], DType::F32)).ok()
}

#[tonic::async_trait]
impl EncoderWorker for Null {
    type EncodeStream = Stream<v1::EncodeEvent>;
    type WatchStream = Stream<v1::WorkerState>;

    async fn load_encoder_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented("it has no adapters"))
    }

    async fn unload_encoder_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented("it has no adapters"))
    }

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(description()))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        let output = output(request.get_ref()).ok_or_else(|| Status::invalid_argument("no key"))?;
        let ready = v1::EncodeResponse { item: Some(output.item().into()), ..Default::default() };
        Ok(Response::new(
            stream::iter([Ok(v1::EncodeEvent { kind: Some(EncodeKind::Ready(ready)) })]).boxed(),
        ))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Null {
    type GenerateStream = Stream<v1::PdGenerateResponse>;
    type WatchStream = Stream<v1::WorkerState>;

    async fn tokenize(
        &self,
        _: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        Err(Status::unimplemented("it has no tokens"))
    }

    async fn load_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented("it has no adapters"))
    }

    async fn unload_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented("it has no adapters"))
    }

    async fn detokenize(
        &self,
        _: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        Err(Status::unimplemented("it has no tokens"))
    }

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(description()))
    }

    async fn generate(
        &self,
        _: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let delta = v1::Delta {
            text: "null".into(),
            token_ids: vec![1],
            finish_reason: v1::FinishReason::Stop.into(),
            ..Default::default()
        };
        let response = |kind| Ok(v1::PdGenerateResponse { kind: Some(kind) });
        let summary = v1::Summary { usage: Some(v1::Usage::default()), ..Default::default() };
        Ok(Response::new(
            stream::iter([response(GenerateKind::Delta(delta)), response(GenerateKind::Summary(summary))])
                .boxed(),
        ))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}
