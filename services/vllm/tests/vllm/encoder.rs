//! A fake encoder worker of ours, which describes its outputs and publishes them to the store.

use crate::connector::GRID;
use futures::stream::{self, BoxStream, StreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};
use triptych_ec::EcStore;
use triptych_ec::object::encode;
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_server::{EncoderWorker, EncoderWorkerServer};
use triptych_runtime::Drain;
use triptych_runtime::grpc::Peers;
use triptych_runtime::serve::serve_grpc;

/// A fake encoder of images.
#[derive(Clone)]
pub struct Encoder {
    pub store: Arc<std::sync::OnceLock<Arc<dyn EcStore>>>,
    family: &'static str,
    n_encodes: Arc<AtomicUsize>,
    /// Closed: outputs are described and not yet READY.
    gate: Arc<watch::Sender<bool>>,
}

impl Encoder {
    /// Serves a family's images; returns its address too.
    pub async fn start(family: &'static str) -> (Self, String) {
        let gate = Arc::new(watch::Sender::new(true));
        let encoder = Self { store: Arc::default(), family, n_encodes: Arc::default(), gate };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let routes = Routes::new(EncoderWorkerServer::new(encoder.clone()));
        tokio::spawn(async move { serve_grpc(routes, listener.into(), Peers::Cluster, &Drain::new()).await });
        (encoder, address)
    }

    /// Lets outputs become READY, or not.
    pub fn open(&self, is_open: bool) {
        self.gate.send_replace(is_open);
    }

    pub fn n_encodes(&self) -> usize {
        self.n_encodes.load(Ordering::SeqCst)
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of([b"a fake".as_slice()])
}

type Events<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl EncoderWorker for Encoder {
    type EncodeStream = Events<v1::EncodeEvent>;
    type WatchStream = Events<v1::WorkerState>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let encoder = v1::worker_model::Encoder {
            modality: v1::Modality::Image.into(),
            fingerprint: fingerprint().as_bytes().to_vec().into(),
            ..v1::worker_model::Encoder::default()
        };
        let model = v1::WorkerModel {
            name: crate::fake::MODEL.into(),
            family: self.family.into(),
            encoders: vec![encoder],
            ..Default::default()
        };
        Ok(Response::new(v1::DescribeResponse { models: vec![model], ..Default::default() }))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        self.n_encodes.fetch_add(1, Ordering::SeqCst);
        let item = EncodedItem {
            key: ContentKey::from_slice(&request.get_ref().key).unwrap(),
            fingerprint: fingerprint(),
            modality: Modality::Image,
            n_tokens: 6,
            hidden: 1,
            dtype: DType::F32,
            extent: Extent::Grid { t: GRID[0], h: GRID[1], w: GRID[2] },
            checksum: [0; 32],
        };
        let output = EncoderOutput::seal(item, from_f32(&[1.0; 6], DType::F32)).unwrap();
        let (store, mut gate) = (Arc::clone(self.store.get().unwrap()), self.gate.subscribe());
        let described = v1::EncodeEvent { kind: Some(Kind::Announced(output.item().into())) };
        let ready = async move {
            gate.wait_for(|is_open| *is_open).await.unwrap();
            store.put_if_absent(&output.item().key, encode(&output)).await.unwrap();
            let ready = v1::EncodeResponse { item: Some(output.item().into()), ..Default::default() };
            Ok(v1::EncodeEvent { kind: Some(Kind::Ready(ready)) })
        };
        Ok(Response::new(stream::iter([Ok(described)]).chain(stream::once(ready)).boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn load_encoder_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn unload_encoder_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }
}
