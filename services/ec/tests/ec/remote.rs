//! The remote store against a real server: the conformance suite, and what only a peer can do wrong.

use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::object::encode;
use triptych_ec::server::{serve, tuned_server};
use triptych_ec::store::Op;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::remote::{RemoteStore, RemoteTuning};
use triptych_ec::testing::free_port;
use triptych_ec::{EcError, EcSetting, EcStore, PutOutcome, open};
use triptych_proto::v1::ec_objects_client::EcObjectsClient;
use triptych_proto::v1::ec_objects_server::{EcObjects, EcObjectsServer};
use triptych_proto::v1::put_frame::{Kind, Start};
use triptych_proto::v1::{
    DeleteRequest, DeleteResponse, GetFrame, GetRequest, HeadRequest, HeadResponse, LeaseRequest,
    LeaseResponse, ListRequest, ListResponse, PutFrame, PutResult, WaitRequest,
};

use crate::{LIMIT, key};

struct Serving {
    authority: String,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Serving {
    async fn start(store: Arc<dyn EcStore>, limits: &Limits) -> Self {
        Self::start_on("127.0.0.1:0", store, limits).await
    }

    async fn start_on(address: &str, store: Arc<dyn EcStore>, limits: &Limits) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel::<()>();
        let limits = limits.clone();
        let task = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            serve(listener, store, &limits, stopped).await.unwrap();
        });
        Self { authority, stop: Some(stop), task }
    }

    fn client(&self, limits: &Limits) -> RemoteStore {
        RemoteStore::new(&self.authority, RemoteTuning::default(), limits).unwrap()
    }

    async fn stop(mut self) {
        drop(self.stop.take());
        tokio::time::timeout(LIMIT, self.task).await.expect("the server stops").unwrap();
    }
}

fn memory() -> Arc<dyn EcStore> {
    Arc::new(MemoryStore::new(64 << 20, &conformance::limits()))
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_conforms() {
    let serving = Serving::start(memory(), &conformance::limits()).await;
    let setting: EcSetting = format!("grpc://{}", serving.authority).parse().unwrap();
    let store = open(&setting, &conformance::limits()).await.unwrap();
    assert_eq!(store.describe(), setting.to_string());
    conformance::run(store).await;
}

#[tokio::test]
async fn the_servers_limit_reaches_the_client() {
    let limits = Limits { max_object_bytes: 1000, ..Limits::default() };
    let serving = Serving::start(memory(), &limits).await;
    let store = serving.client(&Limits::default());
    let e = store.put_if_absent(&key(1), vec![0; 3 << 20].into()).await.unwrap_err();
    assert!(matches!(e, EcError::TooLarge { limit: 1000, actual: 3_145_728 }), "{e:?}");
}

#[tokio::test]
async fn uploads_that_break_their_word_are_refused_and_leave_nothing() {
    let serving = Serving::start(memory(), &conformance::limits()).await;
    let mut client = EcObjectsClient::connect(format!("http://{}", serving.authority)).await.unwrap();
    let start = |key: &[u8], len| PutFrame {
        kind: Some(Kind::Start(Start { key: Bytes::copy_from_slice(key), len })),
    };
    let data = |n| PutFrame { kind: Some(Kind::Data(vec![0; n].into())) };
    let k = [1; 32];
    let cases = [
        ("nothing", vec![]),
        ("no start", vec![data(3)]),
        ("an empty frame", vec![PutFrame { kind: None }]),
        ("a short key", vec![start(&k[1..], 3), data(3)]),
        ("two starts", vec![start(&k, 3), start(&k, 3)]),
        ("too few bytes", vec![start(&k, 3), data(2)]),
        ("too many bytes", vec![start(&k, 3), data(4)]),
        ("a length over the limit", vec![start(&k, u64::MAX), data(3)]),
        ("a frame over the limit", vec![start(&k, 3 << 20), data(3 << 20)]),
    ];
    for (name, frames) in cases {
        let result = client.put(tokio_stream::iter(frames)).await;
        assert!(result.is_err(), "{name}: {result:?}");
    }
    assert!(client.head(HeadRequest { keys: vec![Bytes::new()] }).await.is_err());
    assert!(client.head(HeadRequest { keys: vec![Bytes::from_static(&[1; 32]); 257] }).await.is_err());
    assert_eq!(serving.client(&conformance::limits()).get(&key(1)).await.unwrap(), None);
}

#[tokio::test]
async fn a_stopped_server_is_unavailable_and_its_replacement_is_used() {
    let limits = conformance::limits();
    let first = Serving::start(memory(), &limits).await;
    let (store, authority) = (first.client(&limits), first.authority.clone());
    let object = encode(&sample_output(key(1), 64));
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    first.stop().await;
    let e = tokio::time::timeout(LIMIT, store.get(&key(1))).await.expect("it must not hang").unwrap_err();
    assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
    let second = Serving::start_on(&authority, memory(), &limits).await;
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
    assert_eq!(store.put_if_absent(&key(1), object).await.unwrap(), PutOutcome::Stored);
    second.stop().await;
}

#[tokio::test]
async fn a_closed_port_is_unavailable() {
    let authority = format!("127.0.0.1:{}", free_port());
    let store = RemoteStore::new(&authority, RemoteTuning::default(), &Limits::default()).unwrap();
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
}

#[tokio::test]
async fn failures_of_the_store_behind_keep_their_meaning() {
    let faults = Faults::default();
    let behind: Arc<dyn EcStore> = Arc::new(Faulty::new(memory(), faults.clone()));
    let serving = Serving::start(behind, &conformance::limits()).await;
    let tuning = RemoteTuning {
        op_timeout: Duration::from_millis(300),
        timeouts_to_reconnect: 1,
        ..Default::default()
    };
    let store = RemoteStore::new(&serving.authority, tuning, &conformance::limits()).unwrap();
    let patient = serving.client(&conformance::limits());
    faults.queue(Op::Get, Fault::Error);
    assert!(matches!(patient.get(&key(1)).await, Err(EcError::Unavailable { .. })));
    faults.stand(Op::Get, Fault::Hang);
    assert!(matches!(store.get(&key(1)).await, Err(EcError::TimedOut { .. })));
    faults.clear();
    let deadline = Instant::now() + LIMIT;
    while let Err(e) = store.get(&key(1)).await {
        let slow_machine = matches!(e, EcError::TimedOut { .. }) && Instant::now() < deadline;
        assert!(slow_machine, "a new channel works: {e:?}");
    }
}

/// A peer that lies about lengths.
struct Liar(Vec<GetFrame>);

#[tonic::async_trait]
impl EcObjects for Liar {
    type GetStream = std::pin::Pin<Box<dyn Stream<Item = Result<GetFrame, Status>> + Send>>;

    async fn get(&self, _: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let frames: Vec<_> = self.0.iter().cloned().map(Ok).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(frames))))
    }
    async fn head(&self, request: Request<HeadRequest>) -> Result<Response<HeadResponse>, Status> {
        let n = request.into_inner().keys.len() + 1;
        Ok(Response::new(HeadResponse { entries: vec![Default::default(); n] }))
    }
    async fn put(&self, _: Request<Streaming<PutFrame>>) -> Result<Response<PutResult>, Status> {
        Err(Status::unimplemented("put"))
    }
    async fn delete(&self, _: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        Err(Status::unimplemented("delete"))
    }
    async fn lease(&self, _: Request<LeaseRequest>) -> Result<Response<LeaseResponse>, Status> {
        Err(Status::unimplemented("lease"))
    }
    async fn wait(&self, _: Request<WaitRequest>) -> Result<Response<HeadResponse>, Status> {
        Err(Status::unimplemented("wait"))
    }
    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        Err(Status::unimplemented("list"))
    }
}

#[tokio::test]
async fn a_peer_that_lies_about_lengths_is_not_believed() {
    let frame = |len, n| GetFrame { len, data: vec![0; n].into() };
    let cases = [
        ("no frames", vec![]),
        ("a length over the limit", vec![frame(u64::MAX, 10)]),
        ("too few bytes", vec![frame(10, 9)]),
        ("too many bytes", vec![frame(10, 9), frame(0, 2)]),
        ("bytes of nothing", vec![frame(0, 1)]),
    ];
    for (name, frames) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let liar = tuned_server()
            .add_service(EcObjectsServer::new(Liar(frames)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let liar = tokio::spawn(liar);
        let store = RemoteStore::new(&authority, RemoteTuning::default(), &Limits::default()).unwrap();
        assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })), "{name}");
        assert!(matches!(store.heads(&[key(1)]).await, Err(EcError::Unavailable { .. })), "{name}");
        liar.abort();
    }
}
