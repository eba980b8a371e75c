//! An encoder worker and a PD worker that compute nothing, for the proxy to be measured with.
//!
//! Tokens come from one thread, as an engine's do: one step gives a token to each answer that is under way.

use crate::error::MeasureError;
use std::pin::Pin;
use std::sync::mpsc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc as asynchronous;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt, iter, pending};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind as EncodeKind;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_proto::v1::pd_generate_response::Kind as GenerateKind;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};
use triptych_runtime::Drain;
use triptych_runtime::serve::serve_grpc;

/// Name of the only model.
pub const MODEL: &str = "null";
/// Name of the thread that gives tokens.
pub(super) const STEPS_THREAD: &str = "steps";
/// Time between two tokens of an answer.
const STEP: Duration = Duration::from_millis(1);
/// Capacity of the queues of new answers and of unread tokens: more than a measurement ever has.
const CAPACITY: usize = 1024;
/// Largest message, in bytes.
const MAX_MESSAGE: usize = 64 << 20;

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// An answer under way.
struct PendingAnswer {
    tokens: asynchronous::Sender<()>,
    left: u32,
}

/// Gives every answer a token at each step, until it is complete or its reader is gone. Ends with the workers.
fn run_steps(begun: &mpsc::Receiver<PendingAnswer>) {
    let mut answers: Vec<PendingAnswer> = Vec::new();
    loop {
        if answers.is_empty() {
            let Ok(answer) = begun.recv() else { return };
            answers.push(answer);
        }
        std::thread::sleep(STEP);
        answers.extend(begun.try_iter());
        answers.retain_mut(|answer| {
            answer.left = answer.left.saturating_sub(1);
            answer.tokens.try_send(()).is_ok() && answer.left > 0
        });
    }
}

/// Both services.
#[derive(Clone)]
struct NullWorker {
    begun: mpsc::SyncSender<PendingAnswer>,
}

/// Fingerprint of the encoder that the workers announce.
pub fn fingerprint() -> Fingerprint {
    Fingerprint::of([MODEL.as_bytes()])
}

/// Running null workers. Dropping them stops the server, and with it the thread of steps.
#[derive(Debug)]
pub struct NullWorkers {
    /// The gRPC address of both.
    pub address: String,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Drop for NullWorkers {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Starts both workers behind one address.
///
/// # Errors
/// [`MeasureError::Failed`] without a port or a thread.
pub async fn start() -> Result<NullWorkers, MeasureError> {
    let listener = TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.map_err(|e| MeasureError::failed("the null workers cannot listen", &e))?;
    let address = listener.local_addr().map_err(|e| MeasureError::failed("no address", &e))?.to_string();
    let (begun, answers) = mpsc::sync_channel(CAPACITY);
    let steps = std::thread::Builder::new().name(STEPS_THREAD.into()).spawn(move || run_steps(&answers));
    steps.map_err(|e| MeasureError::failed("no thread for steps", &e))?;
    let null = NullWorker { begun };
    let encoder = EncoderWorkerServer::new(null.clone()).max_decoding_message_size(MAX_MESSAGE);
    let pd = PrefillDecodeWorkerServer::new(null).max_decoding_message_size(MAX_MESSAGE);
    let routes = Routes::new(encoder).add_service(pd);
    let server = serve_grpc(routes, listener.into(), triptych_runtime::grpc::Peers::Cluster, &Drain::new());
    Ok(NullWorkers { address, server: tokio::spawn(server) })
}

fn description() -> v1::DescribeResponse {
    let encoder = v1::worker_model::Encoder {
        modality: v1::Modality::from(Modality::Image).into(),
        fingerprint: fingerprint().as_bytes().to_vec().into(),
        ..v1::worker_model::Encoder::default()
    };
    let model = v1::WorkerModel {
        name: MODEL.into(),
        family: MODEL.into(),
        encoders: vec![encoder],
        max_context: 1 << 20,
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
    v1::DescribeResponse { worker_id: MODEL.into(), models: vec![model], ..Default::default() }
}

fn idle() -> ResponseStream<v1::WorkerState> {
    let load = v1::WorkerLoad { capacity: 4096, ..Default::default() };
    let state = v1::WorkerState { load: Some(load), ..Default::default() };
    Box::pin(iter([Ok(state)]).chain(pending()))
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
impl EncoderWorker for NullWorker {
    type EncodeStream = ResponseStream<v1::EncodeEvent>;
    type WatchStream = ResponseStream<v1::WorkerState>;

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
        Ok(Response::new(Box::pin(iter([Ok(v1::EncodeEvent { kind: Some(EncodeKind::Ready(ready)) })]))))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for NullWorker {
    type GenerateStream = ResponseStream<v1::PdGenerateResponse>;
    type WatchStream = ResponseStream<v1::WorkerState>;

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

    /// Streams as many tokens as were asked for: the first at once, each other with a step, and the seed is how many of these share
    /// a message.
    async fn generate(
        &self,
        request: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let sampling = request.get_ref().sampling.as_ref();
        let n = sampling.and_then(|s| s.max_tokens).unwrap_or(1).max(1);
        let per_message = sampling.and_then(|s| s.seed).unwrap_or(1).max(1);
        let delta = move |i: u32, n_tokens: usize| v1::Delta {
            text: "null".repeat(n_tokens),
            token_ids: vec![1; n_tokens],
            finish_reason: if i == n { v1::FinishReason::Length } else { v1::FinishReason::Unspecified }
                .into(),
            ..Default::default()
        };
        let response = |kind| Ok(v1::PdGenerateResponse { kind: Some(kind) });
        let usage = v1::Usage { completion_tokens: n, ..Default::default() };
        let summary = v1::Summary { usage: Some(usage), ..Default::default() };
        let first = iter([response(GenerateKind::Delta(delta(1, 1)))]);
        let (tokens, written) = asynchronous::channel(CAPACITY);
        if n > 1 {
            let answer = PendingAnswer { tokens, left: n - 1 };
            self.begun
                .try_send(answer)
                .map_err(|_| Status::resource_exhausted("too many answers at once"))?;
        }
        let (mut n_written, mut n_held) = (1, 0);
        let rest = ReceiverStream::new(written).filter_map(move |()| {
            (n_written, n_held) = (n_written + 1, n_held + 1);
            let leaves = n_written == n || n_held as u64 >= per_message;
            leaves.then(|| response(GenerateKind::Delta(delta(n_written, std::mem::take(&mut n_held)))))
        });
        let deltas = first.chain(rest).chain(iter([response(GenerateKind::Summary(summary))]));
        Ok(Response::new(Box::pin(deltas)))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}
