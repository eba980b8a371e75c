//! Requests through a proxy, and the same work sent to its workers directly.

use super::null_workers::{MODEL, fingerprint};
use crate::error::MeasureError;
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::transport::Channel;
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;

/// Bytes of a small item.
pub(super) const SMALL_ITEM: usize = 4 << 10;
/// Limit for the start of the processes.
const START: Duration = Duration::from_secs(60);
/// Pause between two readiness checks.
const PAUSE: Duration = Duration::from_millis(50);

/// Bytes of a request's item, tokens of its answer, and how many of them share a message.
#[derive(Clone, Copy)]
pub(super) struct RequestKind {
    pub(super) item: Option<usize>,
    pub(super) tokens: u32,
    pub(super) per_message: u32,
}

impl RequestKind {
    /// A token for a text.
    pub(super) const TEXT: Self = Self { item: None, tokens: 1, per_message: 1 };
}

/// Connections to the proxy and to the workers behind it.
#[derive(Clone)]
pub(super) struct Client {
    proxy: TriptychClient<Channel>,
    encoder: EncoderWorkerClient<Channel>,
    pd: PrefillDecodeWorkerClient<Channel>,
    /// Counter that makes the content of every item unique.
    n_items: u64,
}

impl Client {
    /// Connects lazily to a proxy and to a worker.
    pub(super) fn new(proxy: &str, worker: &str) -> Result<Self, MeasureError> {
        let channel =
            |at: &str| grpc::channel(at).map_err(|e| MeasureError::failed(format!("cannot reach {at}"), &e));
        Ok(Self {
            proxy: TriptychClient::new(channel(proxy)?),
            encoder: EncoderWorkerClient::new(channel(worker)?),
            pd: PrefillDecodeWorkerClient::new(channel(worker)?),
            n_items: 0,
        })
    }

    /// The same connections with items that no other client sends.
    pub(super) fn with_items_of(&self, i: usize) -> Self {
        let n_items = rand::random::<u64>().wrapping_add(i as u64);
        Self { n_items, ..self.clone() }
    }

    /// Waits until the proxy has found its workers.
    pub(super) async fn wait(&mut self) -> Result<(), MeasureError> {
        let began = Instant::now();
        loop {
            match self.through_proxy(RequestKind { item: Some(SMALL_ITEM), ..RequestKind::TEXT }).await {
                Ok(_) => return Ok(()),
                Err(e) if began.elapsed() > START => return Err(e),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn item(&mut self, kind: RequestKind) -> Option<bytes::Bytes> {
        self.n_items += 1;
        let mut bytes = vec![0x5a; kind.item?];
        bytes[..8].copy_from_slice(&self.n_items.to_le_bytes());
        Some(bytes.into())
    }

    /// Time from sending a request to the end of its answer, through the proxy.
    pub(super) async fn through_proxy(&mut self, kind: RequestKind) -> Result<Duration, MeasureError> {
        let item = |data| v1::Item {
            modality: v1::Modality::from(Modality::Image).into(),
            source: Some(v1::item::Source::Data(data)),
            options: None,
        };
        let request = v1::GenerateRequest {
            model: MODEL.into(),
            prompt: Some(prompt()),
            items: self.item(kind).map(item).into_iter().collect(),
            sampling: Some(sampling(kind)),
            ..Default::default()
        };
        let started = Instant::now();
        let failed = |e: Status| MeasureError::failed("the proxy between null workers failed", &e);
        let mut messages = self.proxy.generate(request).await.map_err(failed)?.into_inner();
        while messages.message().await.map_err(failed)?.is_some() {}
        Ok(started.elapsed())
    }

    /// Time of the same encode and generation, sent to the workers directly.
    pub(super) async fn direct(&mut self, kind: RequestKind) -> Result<Duration, MeasureError> {
        let item = self.item(kind);
        let failed = |e: Status| MeasureError::failed("a null worker failed", &e);
        let started = Instant::now();
        if let Some(item) = item {
            let request = v1::EncodeRequest {
                model: MODEL.into(),
                key: vec![1; 32].into(),
                modality: v1::Modality::from(Modality::Image).into(),
                item,
                fingerprint: fingerprint().as_bytes().to_vec().into(),
                ..Default::default()
            };
            let mut events = self.encoder.encode(request).await.map_err(failed)?.into_inner();
            while events.message().await.map_err(failed)?.is_some() {}
        }
        let request = v1::PdGenerateRequest {
            model: MODEL.into(),
            prompt: Some(prompt()),
            sampling: Some(sampling(kind)),
            ..Default::default()
        };
        let mut messages = self.pd.generate(request).await.map_err(failed)?.into_inner();
        while messages.message().await.map_err(failed)?.is_some() {}
        Ok(started.elapsed())
    }
}

fn prompt() -> v1::Prompt {
    let text = v1::text_or_tokens::Kind::Text("What is in this picture?".into());
    v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(v1::TextOrTokens { kind: Some(text) })) }
}

fn sampling(kind: RequestKind) -> v1::Sampling {
    v1::Sampling { max_tokens: Some(kind.tokens), seed: Some(kind.per_message.into()), ..Default::default() }
}
