//! A fake PD worker of ours, which loads a request's items from the store as it answers.

use futures::stream::{self, BoxStream, StreamExt};
use std::sync::{Arc, Mutex, OnceLock};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use triptych_core::limits::Limits;
use triptych_core::{EncodedItem, Failure, Fingerprint, Modality, Tower};
use triptych_ec::EcStore;
use triptych_ec::object::decode;
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_server::{PrefillDecodeWorker, PrefillDecodeWorkerServer};
use triptych_runtime::Drain;
use triptych_runtime::grpc::Peers;
use triptych_runtime::serve::serve_grpc;
use triptych_runtime::status::to_status;

/// A fake PD worker of images and videos.
#[derive(Clone)]
pub struct Decoder {
    pub store: Arc<OnceLock<Arc<dyn EcStore>>>,
    tower: Tower,
    answered: Arc<Mutex<Vec<EncodedItem>>>,
}

impl Decoder {
    /// Serves a model with this tower of images; returns its address too.
    pub async fn start(tower: Tower) -> (Self, String) {
        let decoder = Self { store: Arc::default(), tower, answered: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let routes = Routes::new(PrefillDecodeWorkerServer::new(decoder.clone()));
        tokio::spawn(async move { serve_grpc(routes, listener.into(), Peers::Cluster, &Drain::new()).await });
        (decoder, address)
    }

    /// Items of the requests that were answered.
    pub fn answered(&self) -> Vec<EncodedItem> {
        self.answered.lock().unwrap().clone()
    }

    async fn load(&self, items: Vec<v1::EncodedItem>) -> Result<(), Failure> {
        for (i, item) in items.into_iter().enumerate() {
            let item = EncodedItem::try_from(item)?;
            let store = self.store.get().unwrap();
            let object = store.get(&item.key).await.unwrap();
            let loaded = object.and_then(|object| decode(object, &item.key, &Limits::default()).ok());
            if loaded.is_none_or(|loaded| *loaded.item() != item) {
                store.quarantine(&item.key).await.unwrap();
                return Err(Failure::unavailable("not in the store").with_param(format!("items[{i}]")));
            }
            self.answered.lock().unwrap().push(item);
        }
        Ok(())
    }
}

type Events<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl PrefillDecodeWorker for Decoder {
    type GenerateStream = Events<v1::PdGenerateResponse>;
    type WatchStream = Events<v1::WorkerState>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let encoder = |modality: Modality, n: u8, tower: Option<&Tower>| v1::worker_model::Encoder {
            modality: v1::Modality::from(modality).into(),
            fingerprint: Fingerprint::from_bytes([n; 32]).as_bytes().to_vec().into(),
            tower: tower.map(Into::into),
            ..v1::worker_model::Encoder::default()
        };
        let encoders =
            vec![encoder(Modality::Image, 7, Some(&self.tower)), encoder(Modality::Video, 8, None)];
        let model = v1::WorkerModel {
            name: crate::fake::MODEL.into(),
            family: "qwen2_vl".into(),
            encoders,
            chat: Some(Default::default()),
            ..Default::default()
        };
        Ok(Response::new(v1::DescribeResponse { models: vec![model], ..Default::default() }))
    }

    async fn generate(
        &self,
        request: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        assert!(request.originals.is_empty(), "no bytes go to a worker of ours");
        self.load(request.items).await.map_err(|failure| to_status(&failure))?;
        let delta =
            v1::Delta { text: "Hello".into(), token_ids: vec![7], finish_reason: 1, ..Default::default() };
        let usage = Some(v1::Usage { prompt_tokens: 3, completion_tokens: 1, ..Default::default() });
        let summary = v1::Summary { usage, ..Default::default() };
        let kinds = [Kind::Delta(delta), Kind::Summary(summary)];
        let messages = kinds.map(|kind| Ok(v1::PdGenerateResponse { kind: Some(kind) }));
        Ok(Response::new(stream::iter(messages).boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn tokenize(
        &self,
        _: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn detokenize(
        &self,
        _: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn load_adapter(
        &self,
        _: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }

    async fn unload_adapter(
        &self,
        _: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        Err(Status::unimplemented("a fake"))
    }
}
