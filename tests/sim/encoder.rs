//! A model of an encoder worker: real objects, real stores and leases, an encoder that takes simulated time.

use crate::net::{self, address};
use crate::recorder::Recorder;
use crate::reference::{self, MODEL};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use futures::stream::{BoxStream, StreamExt};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncoderOutput, Modality};
use triptych_ec::EcStore;
use triptych_ec::object;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::memory::MemoryStore;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_proto::{convert, v1};
use triptych_runtime::grpc;

/// Encode time of an item without rows.
const FIXED: Duration = Duration::from_millis(30);
/// Encode time of each row.
const PER_TOKEN: Duration = Duration::from_millis(1);
/// Preprocessing time of an item.
const PREPROCESS: Duration = Duration::from_millis(5);
/// Bytes of memory for outputs that it serves as a peer.
const MEMORY: usize = 16 << 20;

type Forward = Shared<BoxFuture<'static, EncoderOutput>>;

struct State {
    name: String,
    recorder: Recorder,
    memory: Arc<MemoryStore>,
    durable: Arc<dyn EcStore>,
    without_reuse: bool,
    running: Mutex<HashMap<ContentKey, Forward>>,
}

#[derive(Clone)]
struct Encoder(Arc<State>);

/// Runs on its host until it is crashed.
pub async fn run(
    name: String,
    recorder: Recorder,
    durable: Arc<dyn EcStore>,
    without_reuse: bool,
) -> turmoil::Result {
    let limits = Limits::default();
    let memory = Arc::new(MemoryStore::new(MEMORY, &limits));
    let peers = EcObjectsService::into_server(Arc::clone(&memory) as Arc<dyn EcStore>, &limits);
    let state = State { name, recorder, memory, durable, without_reuse, running: Mutex::default() };
    let server = grpc::server(grpc::Peers::Cluster)
        .add_service(peers)
        .add_service(EncoderWorkerServer::new(Encoder(Arc::new(state))));
    server.serve_with_incoming(net::incoming().await?).await?;
    Ok(())
}

impl Encoder {
    /// The forward pass of a key: the running one, or a new one. The flag is true for a running one.
    fn forward(&self, key: ContentKey, item: bytes::Bytes) -> (Forward, bool) {
        let mut running = self.0.running.lock().unwrap();
        if let Some(forward) = running.get(&key).filter(|_| !self.0.without_reuse) {
            return (forward.clone(), true);
        }
        self.0.recorder.log(&format!("{} encodes {key:?}", self.0.name));
        self.0.recorder.update(|record| *record.encodes.entry(key).or_default() += 1);
        let state = Arc::clone(&self.0);
        let work = async move {
            sleep(FIXED + PER_TOKEN * reference::n_tokens(&item)).await;
            let output = reference::encode(key, &item);
            let object = object::encode(&output);
            let stored = state.memory.put_if_absent(&key, object.clone()).await;
            stored.expect("memory takes small objects");
            tokio::spawn(publish(Arc::clone(&state), key, object));
            state.running.lock().unwrap().remove(&key);
            output
        };
        let forward = work.boxed().shared();
        running.insert(key, forward.clone());
        // It completes without its caller too: the output is cached.
        tokio::spawn(forward.clone());
        (forward, false)
    }
}

/// Writes the durable copy, after the answer.
async fn publish(state: Arc<State>, key: ContentKey, object: bytes::Bytes) {
    for _ in 0..5 {
        match state.durable.put_if_absent(&key, object.clone()).await {
            Ok(outcome) => {
                return state.recorder.log(&format!("{} published {key:?}: {outcome:?}", state.name));
            }
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    }
}

#[tonic::async_trait]
impl EncoderWorker for Encoder {
    type EncodeStream = BoxStream<'static, Result<v1::EncodeEvent, Status>>;
    type WatchStream = BoxStream<'static, Result<v1::WorkerState, Status>>;

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
        Ok(Response::new(describe(&self.0.name, true)))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        let request = request.into_inner();
        let key = convert::key(&request.key, "key").map_err(|e| Status::invalid_argument(e.to_string()))?;
        let (events, receiver) = mpsc::channel(2);
        let encoder = self.clone();
        tokio::spawn(async move {
            let event = |kind| Ok(v1::EncodeEvent { kind: Some(kind) });
            sleep(PREPROCESS).await;
            let announced = reference::announced(key, &request.item);
            let _ = events.send(event(Kind::Announced((&announced).into()))).await;
            let cached = match encoder.0.without_reuse {
                true => None,
                false => encoder.0.memory.get(&key).await.ok().flatten(),
            };
            let (output, shared) = match cached {
                Some(object) => {
                    tokio::spawn(publish(Arc::clone(&encoder.0), key, object));
                    (reference::encode(key, &request.item), true)
                }
                None => {
                    let (forward, shared) = encoder.forward(key, request.item.clone());
                    (forward.await, shared)
                }
            };
            let peer = address(&encoder.0.name);
            let ready =
                v1::EncodeResponse { item: Some(output.item().into()), peer, shared, ..Default::default() };
            let _ = events.send(event(Kind::Ready(ready))).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let cost = v1::EncodeCost {
            model: MODEL.into(),
            modality: v1::Modality::from(Modality::Image).into(),
            fixed_us: (FIXED + PREPROCESS).as_micros() as u64,
            token_us: PER_TOKEN.as_micros() as f64,
            tokens_per_byte: 1.0,
            p95_ratio: 1.5,
            ..v1::EncodeCost::default()
        };
        let load = v1::WorkerLoad { capacity: 64, costs: vec![cost], ..Default::default() };
        Ok(Response::new(states(v1::WorkerState { load: Some(load), ..Default::default() })))
    }
}

/// A stream of one state that stays open.
pub fn states(state: v1::WorkerState) -> BoxStream<'static, Result<v1::WorkerState, Status>> {
    futures::stream::iter([Ok(state)]).chain(futures::stream::pending()).boxed()
}

/// The description of a simulated worker.
pub fn describe(name: &str, encodes: bool) -> v1::DescribeResponse {
    let encoder = v1::worker_model::Encoder {
        modality: v1::Modality::from(Modality::Image).into(),
        fingerprint: reference::fingerprint().as_bytes().to_vec().into(),
        ..v1::worker_model::Encoder::default()
    };
    let model = v1::WorkerModel {
        name: MODEL.into(),
        family: "sim".into(),
        encoders: vec![encoder],
        max_context: 4096,
        max_items: 8,
        created_s: 1,
        reads_encoder_prompt: false,
        chat: None,
        parent: String::new(),
        adapter: Vec::new().into(),
        adapts_encoder: false,
        foreign_encoders: None,
        not_resumable: false,
    };
    v1::DescribeResponse {
        worker_id: name.into(),
        models: vec![model],
        ec_store: "sim".into(),
        encodes,
        ..Default::default()
    }
}
