//! A model of a PD worker: real loads of real objects, tokens that are a function of prompt and rows.

use crate::encoder::{describe, states};
use crate::net;
use crate::recorder::Recorder;
use crate::reference;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use triptych_core::limits::Limits;
use triptych_core::{EncodedItem, Failure};
use triptych_ec::EcStore;
use triptych_ec::object;
use triptych_ec::store::remote::{RemoteStore, RemoteTuning};
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};
use triptych_runtime::{deadline, grpc, status};

const PREFILL: Duration = Duration::from_millis(10);
const PER_TOKEN: Duration = Duration::from_millis(20);
/// Timeout of one lookup of a pending item.
const LOOKUP: Duration = Duration::from_millis(500);

#[derive(Clone)]
struct Pd {
    name: String,
    recorder: Recorder,
    store: Arc<dyn EcStore>,
}

type Events = mpsc::Sender<Result<v1::PdGenerateResponse, Status>>;

/// Runs on its host until it is crashed.
pub async fn run(name: String, recorder: Recorder, store: Arc<dyn EcStore>) -> turmoil::Result {
    let pd = PrefillDecodeWorkerServer::new(Pd { name, recorder, store });
    grpc::server(grpc::Peers::Cluster).add_service(pd).serve_with_incoming(net::incoming().await?).await?;
    Ok(())
}

impl Pd {
    /// The digest of an item's rows, from a peer or the store.
    async fn load(
        &self,
        i: usize,
        item: &EncodedItem,
        hint: &v1::ItemHint,
        until: Instant,
    ) -> Result<[u8; 32], Failure> {
        let missing = || Failure::unavailable("an encoder output is gone").with_param(format!("items[{i}]"));
        loop {
            let mut found = None;
            for peer in &hint.peers {
                found = found.or(self.at_peer(peer, item).await);
            }
            if found.is_none() {
                found = self.store.get(&item.key).await.map_err(Failure::from)?;
            }
            if let Some(bytes) = found {
                let output = object::decode(bytes, &item.key, &Limits::default()).map_err(|_| missing())?;
                return Ok(reference::digest(output.rows()));
            }
            if !hint.pending {
                return Err(missing());
            }
            if Instant::now() >= until {
                return Err(Failure::unavailable("an item did not arrive in time"));
            }
            let before = Instant::now();
            let _ = self.store.wait(&item.key, LOOKUP).await;
            // A store that is down answers at once.
            if before.elapsed() < LOOKUP / 10 {
                sleep(LOOKUP / 10).await;
            }
        }
    }

    async fn at_peer(&self, peer: &str, item: &EncodedItem) -> Option<Bytes> {
        let tuning = RemoteTuning { op_timeout: LOOKUP, ..RemoteTuning::default() };
        let store = RemoteStore::with_dial(peer, tuning, &Limits::default(), Arc::new(net::channel)).ok()?;
        store.get(&item.key).await.ok().flatten()
    }

    async fn answer(
        &self,
        request: v1::PdGenerateRequest,
        until: Instant,
        events: &Events,
    ) -> Result<(), Failure> {
        let items = request.items.into_iter().map(EncodedItem::try_from).collect::<Result<Vec<_>, _>>()?;
        let mut digests = Vec::new();
        for (i, item) in items.iter().enumerate() {
            let hint = request.hints.get(i).cloned().unwrap_or_default();
            digests.push(self.load(i, item, &hint, until).await?);
        }
        sleep(PREFILL).await;
        let prompt = prompt_text(request.prompt.as_ref());
        let max_tokens = request.sampling.and_then(|s| s.max_tokens).unwrap_or(8) as usize;
        let first = request.resume.first().map_or(0, |choice| choice.token_ids.len());
        if first > 0 {
            self.recorder.log(&format!("{} resumes {} after {first} tokens", self.name, request.request_id));
            self.recorder.update(|record| record.resumed += 1);
        }
        for idx in first..max_tokens {
            sleep(PER_TOKEN).await;
            let token = reference::token(&prompt, &digests, idx);
            let last = idx + 1 == max_tokens;
            let finish = if last { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
            let delta = v1::Delta {
                choice: 0,
                text: reference::text(token),
                token_ids: vec![token],
                finish_reason: finish.into(),
                ..Default::default()
            };
            if events.send(response(Kind::Delta(delta))).await.is_err() {
                return Ok(());
            }
        }
        let usage = v1::Usage { completion_tokens: max_tokens as u32, ..Default::default() };
        let summary = v1::Summary { usage: Some(usage), ..Default::default() };
        let _ = events.send(response(Kind::Summary(summary))).await;
        Ok(())
    }
}

fn response(kind: Kind) -> Result<v1::PdGenerateResponse, Status> {
    Ok(v1::PdGenerateResponse { kind: Some(kind) })
}

/// The text of the one message that clients of the simulation send.
pub fn prompt_text(prompt: Option<&v1::Prompt>) -> String {
    match prompt.and_then(|p| p.kind.as_ref()) {
        Some(v1::prompt::Kind::Singleton(one)) => match &one.kind {
            Some(v1::text_or_tokens::Kind::Text(text)) => text.clone(),
            _ => String::new(),
        },
        _ => String::new(),
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Pd {
    type GenerateStream = BoxStream<'static, Result<v1::PdGenerateResponse, Status>>;
    type WatchStream = BoxStream<'static, Result<v1::WorkerState, Status>>;

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
        Ok(Response::new(describe(&self.name, false)))
    }

    async fn generate(
        &self,
        request: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let time = deadline::asked(request.metadata()).ok().flatten().unwrap_or(Duration::from_secs(60));
        let until = Instant::now() + time;
        let (events, receiver) = mpsc::channel(64);
        let pd = self.clone();
        let request = request.into_inner();
        tokio::spawn(async move {
            let work = timeout_at(until, pd.answer(request, until, &events));
            let gone = events.clone();
            tokio::select! {
                ended = work => {
                    let late = || Failure::new(triptych_core::FailureClass::DeadlineExceeded, "out of time");
                    if let Err(failure) = ended.unwrap_or_else(|_| Err(late())) {
                        let _ = events.send(Err(status::to_status(&failure))).await;
                    }
                }
                () = gone.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let load = v1::WorkerLoad { capacity: 64, ..Default::default() };
        Ok(Response::new(states(v1::WorkerState { load: Some(load), ..Default::default() })))
    }
}
