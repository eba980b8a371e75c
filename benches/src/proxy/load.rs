//! The same work through the proxy and straight to the workers, timed.

use crate::workers::{MODEL, fingerprint};
use anyhow::{Context, Result};
use bytes::Bytes;
use hdrhistogram::Histogram;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;
use tonic::transport::Channel;
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;

/// Bytes of an image.
const IMAGE: usize = 1 << 20;

/// Times of one kind of request.
pub struct Measured(Histogram<u64>);

impl Measured {
    /// None yet.
    pub fn new() -> Result<Self> {
        Ok(Self(Histogram::new(3)?))
    }

    /// Times one request.
    pub async fn time(&mut self, work: impl Future<Output = Result<()>>) -> Result<()> {
        let started = Instant::now();
        work.await?;
        self.0.record(u64::try_from(started.elapsed().as_micros())?)?;
        Ok(())
    }

    /// The time that this share of the requests did not pass.
    pub fn ms(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64 / 1e3
    }
}

/// Connections to all three.
#[derive(Clone)]
pub struct Client {
    proxy: TriptychClient<Channel>,
    encoder: EncoderWorkerClient<Channel>,
    pd: PrefillDecodeWorkerClient<Channel>,
    /// Makes every image another.
    next: Arc<AtomicU64>,
}

impl Client {
    /// Connects when it is first used.
    pub async fn connect(proxy: &str, encoder: &str, pd: &str) -> Result<Self> {
        Ok(Self {
            proxy: TriptychClient::new(grpc::channel(proxy)?),
            encoder: EncoderWorkerClient::new(grpc::channel(encoder)?),
            pd: PrefillDecodeWorkerClient::new(grpc::channel(pd)?),
            next: Arc::default(),
        })
    }

    fn image(&self) -> Bytes {
        let mut bytes = vec![0x5a; IMAGE];
        bytes[..8].copy_from_slice(&self.next.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        bytes.into()
    }

    fn prompt(i: usize) -> v1::Prompt {
        let text = v1::text_or_tokens::Kind::Text(format!("What is in these pictures? {i}"));
        let one = v1::TextOrTokens { kind: Some(text) };
        v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(one)) }
    }

    /// Through the proxy, to the end of the answer.
    pub async fn through(&self, n_images: usize, i: usize) -> Result<()> {
        let item = |_| v1::Item {
            modality: v1::Modality::from(Modality::Image).into(),
            source: Some(v1::item::Source::Data(self.image())),
            options: None,
        };
        let request = v1::GenerateRequest {
            model: MODEL.into(),
            prompt: Some(Self::prompt(i)),
            items: (0..n_images).map(item).collect(),
            ..Default::default()
        };
        let mut pieces = self.proxy.clone().generate(request).await?.into_inner();
        while pieces.message().await?.is_some() {}
        Ok(())
    }

    /// The encodes at once, then the generation, as the proxy would.
    pub async fn straight(&self, n_images: usize, i: usize) -> Result<()> {
        let encodes = (0..n_images).map(|_| {
            let mut encoder = self.encoder.clone();
            let item = self.image();
            async move {
                let request = v1::EncodeRequest {
                    model: MODEL.into(),
                    key: vec![1; 32].into(),
                    modality: v1::Modality::from(Modality::Image).into(),
                    item,
                    fingerprint: fingerprint().as_bytes().to_vec().into(),
                    ..Default::default()
                };
                let mut events = encoder.encode(request).await?.into_inner();
                while events.message().await?.is_some() {}
                anyhow::Ok(())
            }
        });
        futures::future::try_join_all(encodes).await?;
        let request = v1::PdGenerateRequest {
            model: MODEL.into(),
            prompt: Some(Self::prompt(i)),
            ..Default::default()
        };
        let mut pieces = self.pd.clone().generate(request).await?.into_inner();
        while pieces.message().await?.is_some() {}
        Ok(())
    }

    /// Requests per second, so many at once.
    pub async fn burst(&self, n_images: usize, n: usize, at_once: usize) -> Result<f64> {
        let started = Instant::now();
        let next = Arc::new(AtomicUsize::new(0));
        let clients = (0..at_once).map(|_| {
            let client = self.clone();
            let next = Arc::clone(&next);
            tokio::spawn(async move {
                while let i = next.fetch_add(1, Ordering::Relaxed)
                    && i < n
                {
                    client.through(n_images, i).await?;
                }
                anyhow::Ok(())
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.context("a client panicked")??;
        }
        Ok(n as f64 / started.elapsed().as_secs_f64())
    }
}
