//! Workers that join, leave, drain, fail and fill up. Requests see nothing of it, or an error with a pause.

use crate::fakes::{EncodeStep, Encoder, GenerateStep, Pd, Process, text};
use crate::support::{IMAGE, Proxy, ask, eventually, memory, models, question};
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tonic::{Code, Request};
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_runtime::discovery::{Endpoint, EndpointSink, Role, Source};
use triptych_runtime::status::to_status;

/// A discovery source that a test controls.
struct TestSource(watch::Receiver<Vec<(Role, SocketAddr)>>);

impl Source for TestSource {
    fn describe(&self) -> String {
        "a test".into()
    }

    fn run(mut self: Box<Self>, tell: EndpointSink) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            loop {
                let set = self.0.borrow_and_update().clone();
                let endpoint = |(role, at): (Role, SocketAddr)| Endpoint { role, address: at.to_string() };
                tell.publish(set.into_iter().map(endpoint).collect());
                if self.0.changed().await.is_err() {
                    return std::future::pending().await;
                }
            }
        })
    }
}

/// A proxy without workers, and the sender of its members.
async fn without_workers() -> (Proxy, watch::Sender<Vec<(Role, SocketAddr)>>) {
    let (sender, receiver) = watch::channel(Vec::new());
    let source = Box::new(TestSource(receiver));
    let proxy = Proxy::start(&[], &[], memory().await, |config| config.discovery.push(source)).await;
    (proxy, sender)
}

fn load(queued_us: u64) -> v1::WorkerState {
    let cost = v1::EncodeCost {
        model: "vl".into(),
        modality: v1::Modality::Image.into(),
        fixed_us: 1000,
        p95_ratio: 1.0,
        ..Default::default()
    };
    let load = v1::WorkerLoad { queued_us, costs: vec![cost], ..Default::default() };
    v1::WorkerState { load: Some(load), ..Default::default() }
}

fn draining() -> v1::WorkerState {
    v1::WorkerState { draining: true, ..Default::default() }
}

/// Two encoders and a PD worker behind a proxy.
struct TwoEncoders {
    encoders: [Encoder; 2],
    pd: Pd,
    proxy: Proxy,
    _processes: [Process; 3],
}

async fn two_encoders(reports: Option<v1::WorkerState>) -> TwoEncoders {
    let store = memory().await;
    let encoders = [(); 2].map(|()| Encoder::new(models(), Arc::clone(&store)));
    if let Some(report) = reports {
        encoders.iter().for_each(|encoder| encoder.report(report.clone()));
    }
    let pd = Pd::new(models());
    let [one, two, three] = [encoders[0].serve(), encoders[1].serve(), pd.serve()];
    let proxy = Proxy::start(&[one.address, two.address], &[three.address], store, |_| {}).await;
    eventually("all are known", async || {
        proxy.metric("triptych_fleet_workers{role=\"encoder\",state=\"ready\"}").await == 2.0
    })
    .await;
    proxy.ready().await;
    TwoEncoders { encoders, pd, proxy, _processes: [one, two, three] }
}

#[tokio::test]
async fn a_proxy_starts_without_workers_and_discovers_them_later() {
    let (proxy, members) = without_workers().await;
    assert_eq!(proxy.get("/healthz").await.0, 200);
    assert_eq!(proxy.get("/readyz").await.0, 503);
    assert_eq!(ask(&proxy, question(&[])).await.unwrap_err().code(), Code::Unavailable);
    let encoder = Encoder::new(models(), memory().await);
    let pd = Pd::new(models());
    let p1 = encoder.serve();
    let p2 = pd.serve();
    members.send_replace(vec![(Role::Encoder, p1.address), (Role::Pd, p2.address)]);
    proxy.ready().await;
    assert_eq!(ask(&proxy, question(&[IMAGE])).await.unwrap().text, "hello world");
}

#[tokio::test]
async fn a_worker_that_leaves_finishes_its_streams_and_gets_no_new_ones() {
    let (proxy, members) = without_workers().await;
    let old = Pd::new(models());
    let new = Pd::new(models());
    let p1 = old.serve();
    let p2 = new.serve();
    let encoder = Encoder::new(models(), memory().await);
    let p3 = encoder.serve();
    members.send_replace(vec![(Role::Encoder, p3.address), (Role::Pd, p1.address)]);
    proxy.ready().await;
    old.script([GenerateStep::SendThenHold(vec![text("he")])]);
    let mut stream = proxy.client().generate(question(&[])).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("accepted");
    stream.message().await.unwrap().expect("the first text");
    members.send_replace(vec![(Role::Encoder, p3.address), (Role::Pd, p2.address)]);
    eventually("the new one is used", async || {
        let _ = ask(&proxy, question(&[])).await;
        !new.requests().is_empty()
    })
    .await;
    assert_eq!(old.requests().len(), 1);
    old.release(1);
    let mut last = None;
    while let Some(message) = stream.message().await.unwrap() {
        last = message.kind;
    }
    assert!(matches!(last, Some(v1::generate_response::Kind::Summary(_))));
}

#[tokio::test]
async fn a_draining_worker_gets_no_new_jobs() {
    let cluster = two_encoders(Some(load(0))).await;
    cluster.encoders[0].report(draining());
    let drains = async || {
        cluster.proxy.metric("triptych_fleet_workers{role=\"encoder\",state=\"draining\"}").await == 1.0
    };
    eventually("it is known", drains).await;
    for n in 0..8u8 {
        ask(&cluster.proxy, question(&[&[n]])).await.unwrap();
    }
    assert_eq!((cluster.encoders[0].jobs().len(), cluster.encoders[1].jobs().len()), (0, 8));
    assert_eq!(cluster.pd.requests().len(), 8);
}

#[tokio::test]
async fn jobs_go_to_the_encoder_with_the_shorter_queue() {
    let cluster = two_encoders(Some(load(0))).await;
    cluster.encoders[0].report(load(60_000_000));
    // After the report has arrived, no job goes there; earlier ones do not count.
    eventually("the queue is known", async || {
        let before = cluster.encoders[0].jobs().len();
        for n in 0..8u8 {
            ask(&cluster.proxy, question(&[&[n, before as u8]])).await.unwrap();
        }
        cluster.encoders[0].jobs().len() == before
    })
    .await;
}

#[tokio::test]
async fn an_item_that_would_be_late_is_refused_at_admission_with_a_pause() {
    let cluster = two_encoders(Some(load(30_000_000))).await;
    let n = AtomicU16::new(0);
    let asked = async || {
        let item = n.fetch_add(1, Ordering::Relaxed).to_le_bytes();
        let mut request = Request::new(question(&[&item]));
        request.metadata_mut().insert("grpc-timeout", "5S".parse().unwrap());
        let mut stream = cluster.proxy.client().generate(request).await.unwrap().into_inner();
        stream.message().await.unwrap().expect("accepted");
        stream.message().await
    };
    let n_jobs = || cluster.encoders.iter().map(|encoder| encoder.jobs().len()).sum::<usize>();
    // A proxy without reports of the queues admits every request.
    eventually("the queues are known", async || asked().await.is_err()).await;
    let before = n_jobs();
    let status = asked().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let pause: u64 = status.metadata().get("retry-after-ms").unwrap().to_str().unwrap().parse().unwrap();
    assert!((20_000..=26_000).contains(&pause), "{pause}");
    assert!(status.message().contains("try again in"), "{status}");
    assert_eq!(n_jobs(), before);
    assert!(cluster.proxy.metric("triptych_admission_rejections_total{stage=\"encode\"}").await >= 1.0);
    // A request with enough time is admitted.
    ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
}

#[tokio::test]
async fn an_encoder_that_keeps_failing_is_ejected() {
    let cluster = two_encoders(None).await;
    let unwell = to_status(&Failure::unavailable("unwell"));
    cluster.encoders[0].script((0..200).map(|_| EncodeStep::Fail(unwell.clone())));
    let n = AtomicU16::new(0);
    eventually("it is ejected", async || {
        // A retry budget may be spent meanwhile: a failure is no surprise here.
        let item = n.fetch_add(1, Ordering::Relaxed).to_le_bytes();
        let _ = ask(&cluster.proxy, question(&[&item])).await;
        cluster.proxy.metric("triptych_fleet_workers{role=\"encoder\",state=\"ejected\"}").await == 1.0
    })
    .await;
    let before = cluster.encoders[0].jobs().len();
    for n in 0..8u8 {
        ask(&cluster.proxy, question(&[&[n, 255, 255]])).await.unwrap();
    }
    assert_eq!(cluster.encoders[0].jobs().len(), before);
    let cause = "triptych_worker_ejections_total{role=\"encoder\",cause=\"failures\"}";
    assert_eq!(cluster.proxy.metric(cause).await, 1.0);
    tokio::time::timeout(Duration::from_secs(60), ask(&cluster.proxy, question(&[]))).await.unwrap().unwrap();
}
