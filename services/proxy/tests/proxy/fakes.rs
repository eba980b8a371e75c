//! Fake workers that record their requests and follow a script. Each has a runtime of its own, so that it can die as a
//! process does: all its connections at once.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_ec::EcStore;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};

/// A model as both fakes announce it.
pub fn model(name: &str, modality: Modality, fingerprint: u8) -> v1::WorkerModel {
    v1::WorkerModel {
        name: name.into(),
        family: "fake".into(),
        encoders: vec![v1::worker_model::Encoder {
            modality: v1::Modality::from(modality).into(),
            fingerprint: Bytes::copy_from_slice(Fingerprint::from_bytes([fingerprint; 32]).as_bytes()),
            ..v1::worker_model::Encoder::default()
        }],
        max_context: 4096,
        max_items: 8,
        created_s: 1_700_000_000,
        reads_encoder_prompt: false,
        chat: None,
        parent: String::new(),
        adapter: Vec::new().into(),
        adapts_encoder: false,
        foreign_encoders: None,
        not_resumable: false,
    }
}

/// As [`model`], with an encoder that reads a text with each item.
pub fn prompted(name: &str, modality: Modality, fingerprint: u8) -> v1::WorkerModel {
    let mut model = model(name, modality, fingerprint);
    model.encoders[0].takes_prompt = true;
    model
}

/// A server with a runtime of its own.
pub struct Process {
    runtime: Option<Runtime>,
    pub address: SocketAddr,
}

impl Process {
    fn start(port: u16, serve: impl FnOnce(TcpListener) -> futures::future::BoxFuture<'static, ()>) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener).unwrap()
        };
        runtime.spawn(serve(listener));
        Self { runtime: Some(runtime), address }
    }

    /// Drops its listener and connections at once.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Publishes the state of a fake worker. `None`: it cannot be watched.
type StateSender = watch::Sender<Option<v1::WorkerState>>;

/// The stream of states.
fn watch_states(
    from: &StateSender,
) -> Result<Response<BoxStream<'static, Result<v1::WorkerState, Status>>>, Status> {
    let mut states = from.subscribe();
    if states.borrow().is_none() {
        return Err(Status::unimplemented("a fake"));
    }
    states.mark_changed();
    let updates = stream::unfold(states, |mut states| async move {
        states.changed().await.ok()?;
        let state = states.borrow_and_update().clone()?;
        Some((Ok(state), states))
    });
    Ok(Response::new(updates.boxed()))
}

/// Scripted reaction of a fake encoder to its next job. Default: [`EncodeStep::Answer`].
pub enum EncodeStep {
    Answer,
    /// Waits for [`Encoder::release`], then answers.
    Hold,
    /// Announces the output, waits for [`Encoder::release`], then answers.
    AnnounceThenHold,
    /// Answers from the memory of this peer; the store has it after [`Encoder::write_behind`].
    AnswerFromPeer(&'static str),
    /// Announces the output, and ends without it.
    EndEarly,
    Fail(Status),
}

/// An encoder worker.
#[derive(Clone)]
pub struct Encoder(Arc<EncoderState>);

struct EncoderState {
    models: Mutex<Vec<v1::WorkerModel>>,
    store: Arc<dyn EcStore>,
    jobs: Mutex<Vec<v1::EncodeRequest>>,
    script: Mutex<VecDeque<EncodeStep>>,
    released: Semaphore,
    cancelled: AtomicUsize,
    unwritten: Mutex<Vec<EncoderOutput>>,
    states: StateSender,
}

impl Encoder {
    pub fn new(models: Vec<v1::WorkerModel>, store: Arc<dyn EcStore>) -> Self {
        Self(Arc::new(EncoderState {
            models: Mutex::new(models),
            store,
            jobs: Mutex::default(),
            script: Mutex::default(),
            released: Semaphore::new(0),
            cancelled: AtomicUsize::new(0),
            unwritten: Mutex::default(),
            states: StateSender::default(),
        }))
    }

    /// Publishes a state to watchers. Before the first one, the worker cannot be watched.
    pub fn report(&self, state: v1::WorkerState) {
        self.0.states.send_replace(Some(state));
    }

    /// Stores the outputs that were answered from a peer.
    pub async fn write_behind(&self) {
        let unwritten = std::mem::take(&mut *self.0.unwritten.lock().unwrap());
        for output in unwritten {
            self.0.store.put_if_absent(&output.item().key, object(&output)).await.unwrap();
        }
    }

    /// Stores the output of an earlier job again.
    pub async fn publish_again(&self, key: &ContentKey) {
        let jobs = self.0.jobs.lock().unwrap().clone();
        let job = jobs.iter().find(|job| job.key == key.as_bytes().as_slice()).expect("a job it had");
        self.0.store.put_if_absent(key, object(&encode(job))).await.unwrap();
    }

    /// Clears unused steps, and unused permits to end held jobs.
    pub fn clear_script(&self) {
        self.0.script.lock().unwrap().clear();
        self.0.released.forget_permits(usize::MAX >> 3);
    }

    /// True if both are the same worker.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The fencing tokens of the jobs.
    pub fn fences(&self) -> Vec<u64> {
        self.0.jobs.lock().unwrap().iter().map(|job| job.fence).collect()
    }

    pub fn serve(&self) -> Process {
        self.serve_at(0)
    }

    pub fn serve_at(&self, port: u16) -> Process {
        let service = EncoderWorkerServer::new(self.clone()).max_decoding_message_size(64 << 20);
        Process::start(port, |listener| {
            let server = tonic::transport::Server::builder().add_service(service);
            Box::pin(async move { server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap() })
        })
    }

    pub fn script(&self, steps: impl IntoIterator<Item = EncodeStep>) {
        self.0.script.lock().unwrap().extend(steps);
    }

    pub fn release(&self, n: usize) {
        self.0.released.add_permits(n);
    }

    pub fn announce(&self, models: Vec<v1::WorkerModel>) {
        *self.0.models.lock().unwrap() = models;
    }

    /// The items of the jobs it was sent.
    pub fn jobs(&self) -> Vec<Bytes> {
        self.0.jobs.lock().unwrap().iter().map(|job| job.item.clone()).collect()
    }

    /// The tower of each job.
    pub fn towers(&self) -> Vec<u32> {
        self.0.jobs.lock().unwrap().iter().map(|job| job.tower_index).collect()
    }

    /// The prompt of each job's item.
    pub fn prompts(&self) -> Vec<Option<String>> {
        let jobs = self.0.jobs.lock().unwrap();
        jobs.iter().map(|job| job.options.clone().and_then(|o| o.prompt)).collect()
    }

    /// The source language of each job's item.
    pub fn src_langs(&self) -> Vec<Option<String>> {
        let jobs = self.0.jobs.lock().unwrap();
        jobs.iter().map(|job| job.options.clone().and_then(|o| o.src_lang)).collect()
    }

    /// Number of jobs whose caller went away while they were held.
    pub fn cancelled(&self) -> usize {
        self.0.cancelled.load(Ordering::SeqCst)
    }
}

/// Counts a held job that is dropped before it is released.
struct Held(Option<Encoder>);

impl Held {
    async fn until_released(encoder: &Encoder) {
        let mut held = Self(Some(encoder.clone()));
        encoder.0.released.acquire().await.unwrap().forget();
        held.0 = None;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(encoder) = &self.0 {
            encoder.0.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Encoder {
    /// Ends a job: the output is stored, or left to [`Encoder::write_behind`].
    async fn answer(&self, output: EncoderOutput, peer: &str) -> v1::EncodeEvent {
        if peer.is_empty() {
            self.0.store.put_if_absent(&output.item().key, object(&output)).await.unwrap();
        } else {
            self.0.unwritten.lock().unwrap().push(output.clone());
        }
        let response = v1::EncodeResponse {
            item: Some(output.item().into()),
            queue_us: 1,
            preprocess_us: 20,
            encode_us: 300,
            publish_us: 4000,
            peer: peer.into(),
            shared: false,
        };
        v1::EncodeEvent { kind: Some(v1::encode_event::Kind::Ready(response)) }
    }
}

fn object(output: &EncoderOutput) -> Bytes {
    triptych_ec::object::encode(output)
}

/// The announcement of an output: everything but its checksum.
fn announced(output: &EncoderOutput) -> v1::EncodeEvent {
    let item = EncodedItem { checksum: [0; 32], ..output.item().clone() };
    v1::EncodeEvent { kind: Some(v1::encode_event::Kind::Announced((&item).into())) }
}

#[tonic::async_trait]
impl EncoderWorker for Encoder {
    type EncodeStream = futures::stream::BoxStream<'static, Result<v1::EncodeEvent, Status>>;
    type WatchStream = futures::stream::BoxStream<'static, Result<v1::WorkerState, Status>>;

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        watch_states(&self.0.states)
    }

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
        let models = self.0.models.lock().unwrap().clone();
        Ok(Response::new(v1::DescribeResponse {
            worker_id: "fake".into(),
            models,
            ec_store: "memory".into(),
            ..Default::default()
        }))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        assert!(request.metadata().contains_key("grpc-timeout"));
        let request = request.into_inner();
        self.0.jobs.lock().unwrap().push(request.clone());
        let step = self.0.script.lock().unwrap().pop_front().unwrap_or(EncodeStep::Answer);
        let output = encode(&request);
        let events: Self::EncodeStream = match step {
            EncodeStep::Fail(status) => return Err(status),
            EncodeStep::Answer => stream::iter([Ok(self.answer(output, "").await)]).boxed(),
            EncodeStep::AnswerFromPeer(peer) => stream::iter([Ok(self.answer(output, peer).await)]).boxed(),
            EncodeStep::EndEarly => stream::iter([Ok(announced(&output))]).boxed(),
            EncodeStep::Hold => {
                Held::until_released(self).await;
                stream::iter([Ok(self.answer(output, "").await)]).boxed()
            }
            EncodeStep::AnnounceThenHold => {
                let encoder = self.clone();
                let first = announced(&output);
                let end = stream::once(async move {
                    Held::until_released(&encoder).await;
                    Ok(encoder.answer(output, "").await)
                });
                stream::iter([Ok(first)]).chain(end).boxed()
            }
        };
        Ok(Response::new(events))
    }
}

fn encode(request: &v1::EncodeRequest) -> EncoderOutput {
    let item = EncodedItem {
        key: triptych_proto::convert::key(&request.key, "key").unwrap(),
        fingerprint: triptych_proto::convert::fingerprint(&request.fingerprint, "fingerprint").unwrap(),
        modality: triptych_proto::convert::modality(request.modality).unwrap(),
        n_tokens: 2,
        hidden: 2,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    };
    EncoderOutput::seal(item, from_f32(&[request.item.len() as f32; 4], DType::F32)).unwrap()
}

/// Scripted reaction of a fake PD worker to its next request. Default: [`hello`].
pub enum GenerateStep {
    /// These messages, and the end of the stream.
    Send(Vec<v1::PdGenerateResponse>),
    /// These messages, then the failure.
    SendThenFail(Vec<v1::PdGenerateResponse>, Status),
    /// These messages, then silence until [`Pd::release`], then [`hello`].
    SendThenHold(Vec<v1::PdGenerateResponse>),
    /// A failure instead of a stream.
    Fail(Status),
}

/// A PD worker.
#[derive(Clone)]
pub struct Pd(Arc<PdState>);

struct PdState {
    models: Vec<v1::WorkerModel>,
    adapter_changes: Mutex<Vec<String>>,
    requests: Mutex<Vec<v1::PdGenerateRequest>>,
    script: Mutex<VecDeque<GenerateStep>>,
    released: Arc<Semaphore>,
    states: StateSender,
}

impl Pd {
    /// Publishes a state to watchers. Before the first one, the worker cannot be watched.
    pub fn report(&self, state: v1::WorkerState) {
        self.0.states.send_replace(Some(state));
    }

    pub fn new(models: Vec<v1::WorkerModel>) -> Self {
        Self(Arc::new(PdState {
            models,
            requests: Mutex::default(),
            adapter_changes: Mutex::default(),
            script: Mutex::default(),
            released: Arc::new(Semaphore::new(0)),
            states: StateSender::default(),
        }))
    }

    /// Loads and unloads of adapters that it was asked for, once.
    pub fn take_adapter_changes(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.adapter_changes.lock().unwrap())
    }

    pub fn serve(&self) -> Process {
        self.serve_at(0)
    }

    pub fn serve_at(&self, port: u16) -> Process {
        let service = PrefillDecodeWorkerServer::new(self.clone());
        Process::start(port, |listener| {
            let server = tonic::transport::Server::builder().add_service(service);
            Box::pin(async move { server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap() })
        })
    }

    pub fn script(&self, steps: impl IntoIterator<Item = GenerateStep>) {
        self.0.script.lock().unwrap().extend(steps);
    }

    pub fn release(&self, n: usize) {
        self.0.released.add_permits(n);
    }

    /// Skips the next `n` steps.
    pub fn skip(&self, n: usize) {
        self.0.script.lock().unwrap().drain(..n);
    }

    pub fn requests(&self) -> Vec<v1::PdGenerateRequest> {
        self.0.requests.lock().unwrap().clone()
    }
}

/// A text delta of the first choice.
pub fn text(text: &str) -> v1::PdGenerateResponse {
    delta(v1::Delta { text: text.into(), token_ids: vec![1], ..v1::Delta::default() })
}

pub fn delta(delta: v1::Delta) -> v1::PdGenerateResponse {
    v1::PdGenerateResponse { kind: Some(Kind::Delta(delta)) }
}

pub fn summary(summary: v1::Summary) -> v1::PdGenerateResponse {
    v1::PdGenerateResponse { kind: Some(Kind::Summary(summary)) }
}

/// Two pieces of text and a summary.
pub fn hello() -> Vec<v1::PdGenerateResponse> {
    let end = v1::Delta {
        text: " world".into(),
        token_ids: vec![2],
        finish_reason: v1::FinishReason::Stop.into(),
        ..v1::Delta::default()
    };
    let times = v1::StageTimes { queue_us: 10, load_us: 50, prefill_us: 60, ..v1::StageTimes::default() };
    vec![
        text("hello"),
        delta(end),
        summary(v1::Summary {
            usage: Some(v1::Usage { prompt_tokens: 7, completion_tokens: 2, ..v1::Usage::default() }),
            times: Some(times),
            language: "en".into(),
            duration_s: 1.5,
            ..v1::Summary::default()
        }),
    ]
}

type Stream = BoxStream<'static, Result<v1::PdGenerateResponse, Status>>;

fn send(messages: Vec<v1::PdGenerateResponse>) -> Stream {
    stream::iter(messages).map(Ok).boxed()
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Pd {
    type GenerateStream = Stream;
    type WatchStream = futures::stream::BoxStream<'static, Result<v1::WorkerState, Status>>;

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        watch_states(&self.0.states)
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let request = request.into_inner();
        let texts = if request.with_texts { vec!["h".into(), "i".into()] } else { Vec::new() };
        let n_special = u32::from(!request.without_special_tokens);
        Ok(Response::new(v1::TokenizeResponse {
            token_ids: vec![5, 6 + n_special],
            texts,
            max_context: 4096,
        }))
    }

    /// Adapters whose path says so have a part for the encoder, or were loaded before.
    async fn load_adapter(
        &self,
        request: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        let v1::LoadAdapterRequest { name, path, .. } = request.into_inner();
        self.0.adapter_changes.lock().unwrap().push(format!("load {name}"));
        Ok(Response::new(v1::LoadAdapterResponse {
            adapter: vec![1; 32].into(),
            was_loaded: path.contains("known"),
            adapts_encoder: path.contains("encoder"),
        }))
    }

    async fn unload_adapter(
        &self,
        request: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        self.0.adapter_changes.lock().unwrap().push(format!("unload {}", request.into_inner().name));
        Ok(Response::new(v1::UnloadAdapterResponse {}))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        Ok(Response::new(v1::DetokenizeResponse { text: format!("{:?}", request.into_inner().token_ids) }))
    }

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let models = self.0.models.clone();
        Ok(Response::new(v1::DescribeResponse {
            worker_id: "fake".into(),
            models,
            ec_store: "memory".into(),
            ..Default::default()
        }))
    }

    async fn generate(&self, request: Request<v1::PdGenerateRequest>) -> Result<Response<Stream>, Status> {
        assert!(request.metadata().contains_key("grpc-timeout"));
        self.0.requests.lock().unwrap().push(request.into_inner());
        let step = self.0.script.lock().unwrap().pop_front().unwrap_or_else(|| GenerateStep::Send(hello()));
        let stream = match step {
            GenerateStep::Send(messages) => send(messages),
            GenerateStep::SendThenFail(messages, status) => {
                send(messages).chain(stream::once(async { Err(status) })).boxed()
            }
            GenerateStep::SendThenHold(messages) => {
                let released = Arc::clone(&self.0.released);
                let held = stream::once(async move {
                    released.acquire_owned().await.unwrap().forget();
                    send(hello())
                });
                send(messages).chain(held.flatten()).boxed()
            }
            GenerateStep::Fail(status) => return Err(status),
        };
        Ok(Response::new(stream))
    }
}
