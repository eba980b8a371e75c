//! Retries: every part fails in turn, and every request ends with an answer or a typed error.

use crate::fakes::{EncodeStep, Encoder, GenerateStep, Pd, hello, model, text};
use crate::support::{Cluster, IMAGE, Proxy, ask, eventually, memory, models, question};
use std::sync::Arc;
use std::time::Duration;
use tonic::{Code, Request, Status};
use triptych_core::limits::Limits;
use triptych_core::{Failure, Modality};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::store::Op;
use triptych_proto::v1;
use triptych_proto::v1::ItemSource::Encoded;
use triptych_proxy::ProxyConfig;
use triptych_runtime::status::to_status;

fn unavailable() -> Status {
    to_status(&Failure::unavailable("not now"))
}

fn missing(param: &str) -> Status {
    to_status(&Failure::unavailable("an encoder output is not in the store").with_param(param))
}

#[tokio::test]
async fn a_job_that_fails_goes_to_the_other_encoder() {
    let store = memory().await;
    let one = Encoder::new(models(), Arc::clone(&store));
    let two = Encoder::new(models(), Arc::clone(&store));
    let pd = Pd::new(models());
    let p1 = one.serve();
    let p2 = two.serve();
    let p3 = pd.serve();
    let proxy = Proxy::start(&[p1.address, p2.address], &[p3.address], store, |_| {}).await;
    proxy.ready().await;
    one.script([EncodeStep::Fail(unavailable())]);
    two.script([EncodeStep::Fail(unavailable())]);
    // Both fail once: the third attempt succeeds.
    let answer = ask(&proxy, question(&[IMAGE])).await.unwrap();
    assert_eq!(answer.text, "hello world");
    assert_eq!(one.jobs().len() + two.jobs().len(), 3);
    assert!(!one.jobs().is_empty() && !two.jobs().is_empty());
}

#[tokio::test]
async fn a_job_survives_the_restart_of_its_only_encoder() {
    let mut cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::Hold]);
    let port = cluster.encoder_process.address.port();
    let encoder = cluster.encoder.clone();
    let process = &mut cluster.encoder_process;
    let dies_and_returns = async {
        eventually("the job is under way", async || encoder.jobs().len() == 1).await;
        process.kill();
        eventually("the port is free", async || std::net::TcpListener::bind(("127.0.0.1", port)).is_ok())
            .await;
        *process = encoder.serve_at(port);
    };
    let (answer, ()) = futures::join!(ask(&cluster.proxy, question(&[IMAGE])), dies_and_returns);
    assert_eq!(answer.unwrap().sources(), [Encoded]);
    assert_eq!(cluster.encoder.jobs().len(), 2);
}

#[tokio::test]
async fn an_item_that_an_encoder_refuses_is_not_retried_and_the_error_names_it() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::Fail(to_status(&Failure::invalid("the JPEG is cut off")))]);
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "the JPEG is cut off"));
    assert_eq!(status.metadata().get("triptych-param").unwrap(), "items[0]");
    assert_eq!(cluster.encoder.jobs().len(), 1);
}

#[tokio::test]
async fn the_attempts_of_a_job_are_bounded() {
    let cluster = Cluster::start().await;
    cluster.encoder.script((0..50).map(|_| EncodeStep::Fail(unavailable())));
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(cluster.encoder.jobs().len(), 5);
    assert!(status.metadata().contains_key("retry-after-ms"));
}

#[tokio::test]
async fn a_pd_worker_that_fails_before_the_first_token_gets_the_request_again() {
    let mut cluster = Cluster::start().await;
    cluster.pd.script([
        GenerateStep::Fail(unavailable()),
        GenerateStep::SendThenFail(vec![], unavailable()),
        GenerateStep::Send(vec![]),
    ]);
    assert_eq!(ask(&cluster.proxy, question(&[IMAGE])).await.unwrap().text, "hello world");
    assert_eq!((cluster.pd.requests().len(), cluster.encoder.jobs().len()), (4, 1));

    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    let port = cluster.pd_process.address.port();
    let pd = cluster.pd.clone();
    let process = &mut cluster.pd_process;
    let dies_and_returns = async {
        eventually("the request is under way", async || pd.requests().len() == 5).await;
        process.kill();
        eventually("the port is free", async || std::net::TcpListener::bind(("127.0.0.1", port)).is_ok())
            .await;
        *process = pd.serve_at(port);
    };
    let (answer, ()) = futures::join!(ask(&cluster.proxy, question(&[IMAGE])), dies_and_returns);
    assert_eq!(answer.unwrap().text, "hello world");
}

#[tokio::test]
async fn without_resumption_the_death_of_a_pd_worker_is_an_error_of_the_stream() {
    let mut cluster = Cluster::start().await;
    cluster.pd.script([GenerateStep::SendThenHold(vec![text("hel")])]);
    let mut never = question(&[]);
    never.resumption = v1::Resumption::Never.into();
    let mut stream = cluster.proxy.client().generate(never).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("accepted");
    stream.message().await.unwrap().expect("the first text");
    cluster.pd_process.kill();
    let status = stream.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("the answer, which is incomplete"), "{status}");
    assert_eq!(cluster.pd.requests().len(), 1);
}

#[tokio::test]
async fn an_item_that_the_pd_worker_does_not_find_is_encoded_again() {
    let cluster = Cluster::start().await;
    let mut by_key = unavailable();
    by_key.metadata_mut().insert("triptych-missing-item", 0.into());
    cluster.pd.script([GenerateStep::Fail(missing("items[1]")), GenerateStep::SendThenFail(vec![], by_key)]);
    let answer = ask(&cluster.proxy, question(&[IMAGE, b"other"])).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.sources()), ("hello world", vec![Encoded, Encoded]));
    let mut jobs = cluster.encoder.jobs();
    jobs.sort();
    assert_eq!(jobs, [&b"other"[..], b"other", IMAGE, IMAGE]);
    assert_eq!(cluster.pd.requests().len(), 3);
}

#[tokio::test]
async fn an_item_that_is_never_found_ends_the_request_with_its_name() {
    let cluster = Cluster::start().await;
    cluster.pd.script((0..50).map(|_| GenerateStep::Fail(missing("items[0]"))));
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.metadata().get("triptych-param").unwrap(), "items[0]");
    assert_eq!((cluster.encoder.jobs().len(), cluster.pd.requests().len()), (5, 5));
    cluster.pd.script([]);
}

#[tokio::test]
async fn a_store_that_does_not_answer_counts_as_empty() {
    let store = memory().await;
    let encoder = Encoder::new(models(), Arc::clone(&store));
    let pd = Pd::new(models());
    let p1 = encoder.serve();
    let p2 = pd.serve();
    let faults = Faults::default();
    let faulty = Arc::new(Faulty::new(store, faults.clone()));
    let forgets = |config: &mut ProxyConfig| config.encodes.believed_for = Duration::ZERO;
    let proxy = Proxy::start(&[p1.address], &[p2.address], faulty, forgets).await;
    proxy.ready().await;
    faults.stand(Op::Heads, Fault::Error);
    for n_jobs in [1, 2] {
        assert_eq!(ask(&proxy, question(&[IMAGE])).await.unwrap().sources(), [Encoded]);
        assert_eq!(encoder.jobs().len(), n_jobs);
    }
}

#[tokio::test]
async fn a_request_ends_at_the_limit_and_at_the_clients_deadline() {
    let limits = Limits { max_request_time: Duration::from_millis(300), ..Limits::default() };
    let cluster = Cluster::with(|config| config.limits = limits).await;
    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    let status = ask(&cluster.proxy, question(&[])).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(status.message().contains("not answered within 0.3 s"), "{status}");

    let patient = Cluster::start().await;
    patient.pd.script([GenerateStep::SendThenHold(vec![])]);
    let mut request = Request::new(question(&[]));
    request.metadata_mut().insert("grpc-timeout", "200m".parse().unwrap());
    let mut stream = patient.proxy.client().generate(request).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("accepted");
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn an_encoder_with_another_fingerprint_is_refused_and_the_model_is_not_ready() {
    let cluster = Cluster::start().await;
    let other = vec![model("vl", Modality::Image, 9), model("asr", Modality::Audio, 2)];
    cluster.encoder.announce(other);
    eventually("the difference is noticed", async || cluster.proxy.get("/readyz").await.0 == 503).await;
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("\"vl\" is not ready"), "{status}");
    assert!(cluster.encoder.jobs().is_empty() && cluster.pd.requests().is_empty());
    cluster.encoder.announce(models());
    cluster.proxy.ready().await;
    assert_eq!(ask(&cluster.proxy, question(&[IMAGE])).await.unwrap().text, "hello world");
}

#[tokio::test]
async fn a_protocol_violation_of_a_worker_is_an_internal_error() {
    let cluster = Cluster::start().await;
    let mut wrong_choice = hello();
    wrong_choice
        .insert(0, crate::fakes::delta(triptych_proto::v1::Delta { choice: 3, ..Default::default() }));
    cluster.pd.script([GenerateStep::Send(wrong_choice)]);
    let status = ask(&cluster.proxy, question(&[])).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::Internal, "internal error; the server's log has the cause")
    );
}
