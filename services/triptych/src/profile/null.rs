//! An encoder and a PD worker that take no time, for the proxy to stand between. Tokens come from a thread of its own, as
//! an engine's do, those of all answers at once.

use crate::error::CliError;
use crate::listen;
use std::pin::Pin;
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::mpsc as asynchronous;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt, iter, pending};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind as Told;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_proto::v1::pd_generate_response::Kind as Said;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};
use triptych_runtime::grpc;

/// The one model.
pub const MODEL: &str = "null";
/// Between two tokens of an answer.
const STEP: Duration = Duration::from_millis(1);
/// Answers that may begin between two steps, and tokens of one that may wait: more than are ever asked for at once.
const MOST: usize = 1024;
/// Largest message.
const MAX_MESSAGE: usize = 64 << 20;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// An answer that is being written.
struct Answer {
    tokens: asynchronous::Sender<()>,
    left: u32,
}

/// Gives every answer a token at each step until they have all they were to have, or nobody reads them.
fn write_answers(begun: &mpsc::Receiver<Answer>) {
    let mut answers: Vec<Answer> = Vec::new();
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

/// Says what it was sent, and nothing about it.
#[derive(Clone)]
struct Null {
    begun: mpsc::SyncSender<Answer>,
}

/// The encoder that it has not.
pub fn fingerprint() -> Fingerprint {
    Fingerprint::of([MODEL.as_bytes()])
}

/// Starts both behind one address.
pub async fn start() -> Result<String, CliError> {
    let listener = listen::bind("the null workers", "127.0.0.1:0").await?;
    let address = listener.local_addr().map_err(|e| CliError::failed("no address", &e))?.to_string();
    let (begun, answers) = mpsc::sync_channel(MOST);
    let steps = std::thread::Builder::new().name("steps".into()).spawn(move || write_answers(&answers));
    steps.map_err(|e| CliError::failed("no thread for steps", &e))?;
    let null = Null { begun };
    let encoder = EncoderWorkerServer::new(null.clone()).max_decoding_message_size(MAX_MESSAGE);
    let pd = PrefillDecodeWorkerServer::new(null).max_decoding_message_size(MAX_MESSAGE);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::spawn(grpc::server().add_service(encoder).add_service(pd).serve_with_incoming(incoming));
    Ok(address)
}

fn description() -> v1::DescribeResponse {
    let encoder = v1::worker_model::Encoder {
        modality: v1::Modality::from(Modality::Image).into(),
        fingerprint: fingerprint().as_bytes().to_vec().into(),
        takes_prompt: false,
    };
    let model = v1::WorkerModel {
        name: MODEL.into(),
        family: MODEL.into(),
        encoders: vec![encoder],
        max_context: 1 << 20,
        max_items: 16,
        created_s: 1,
    };
    v1::DescribeResponse { worker_id: MODEL.into(), models: vec![model], ..Default::default() }
}

fn idle() -> Answers<v1::WorkerState> {
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
impl EncoderWorker for Null {
    type EncodeStream = Answers<v1::EncodeEvent>;
    type WatchStream = Answers<v1::WorkerState>;

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
        Ok(Response::new(Box::pin(iter([Ok(v1::EncodeEvent { kind: Some(Told::Ready(ready)) })]))))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Null {
    type GenerateStream = Answers<v1::PdGenerateResponse>;
    type WatchStream = Answers<v1::WorkerState>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(description()))
    }

    /// As many tokens as were asked for, each a message: the first at once, each other with a step.
    async fn generate(
        &self,
        request: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let sampling = request.get_ref().sampling.as_ref();
        let n = sampling.and_then(|s| s.max_tokens).unwrap_or(1).max(1);
        let delta = move |i: u32| v1::Delta {
            text: "null".into(),
            token_ids: vec![1],
            finish_reason: if i == n { v1::FinishReason::Length } else { v1::FinishReason::Unspecified }
                .into(),
            ..Default::default()
        };
        let said = |kind| Ok(v1::PdGenerateResponse { kind: Some(kind) });
        let usage = v1::Usage { completion_tokens: n, ..Default::default() };
        let summary = v1::Summary { usage: Some(usage), ..Default::default() };
        let first = iter([said(Said::Delta(delta(1)))]);
        let (tokens, written) = asynchronous::channel(MOST);
        if n > 1 {
            let answer = Answer { tokens, left: n - 1 };
            self.begun
                .try_send(answer)
                .map_err(|_| Status::resource_exhausted("too many answers at once"))?;
        }
        let mut place = 1;
        let rest = ReceiverStream::new(written).map(move |()| {
            place += 1;
            said(Said::Delta(delta(place)))
        });
        let deltas = first.chain(rest).chain(iter([said(Said::Summary(summary))]));
        Ok(Response::new(Box::pin(deltas)))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(idle()))
    }
}
