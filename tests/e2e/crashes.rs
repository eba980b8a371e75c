//! SIGKILL at the worst moments: every request ends with an answer or a typed error, and the cluster mends itself.

use std::time::Duration;
use tonic::Code;
use triptych_ec::testing::RedisServer;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{eventually, signal};
use triptych_tests::samples::{heldout, list};

/// Longest a request may take to end, one way or the other: the default limit and a margin.
const DEADLINE: Duration = Duration::from_secs(150);

fn picture(file: &str) -> v1::GenerateRequest {
    about_images("What is in this picture?", vec![heldout(file)])
}

/// A request that writes for as long as the context allows.
fn endless() -> v1::GenerateRequest {
    let mut request = picture("scene.png");
    request.sampling =
        Some(v1::Sampling { ignore_eos: true, temperature: Some(0.0), n: Some(4), ..Default::default() });
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_encoder_is_replaced_and_its_jobs_are_done_again() {
    let mut cluster = Cluster::start(&[]).await;
    let client = connect(&cluster.grpc).await;
    let files: Vec<String> =
        list("scenes.jsonl").iter().map(|s| s["file"].as_str().expect("a file").to_owned()).collect();
    let encoder = cluster.pid("encoder");
    // Stopped, the encoder has jobs it can never end; then it is killed in the middle of them.
    signal(encoder, "STOP");
    let asked: Vec<_> = files
        .iter()
        .take(6)
        .map(|file| {
            let (mut client, request) = (client.clone(), picture(file));
            tokio::spawn(async move { generate(&mut client, request).await })
        })
        .collect();
    let proxy = &cluster;
    eventually("jobs are in flight", async || {
        (proxy.metric("proxy", "triptych_requests_running").await >= 6.0).then_some(())
    })
    .await;
    signal(encoder, "KILL");
    cluster.wait_replaced("encoder", encoder).await;
    for answer in asked {
        let answer = tokio::time::timeout(DEADLINE, answer).await.expect("ends in time").expect("no panic");
        assert!(!answer.expect("answered by the new encoder").text.is_empty());
    }
    let log = cluster.up.log();
    assert!(log.lines().any(|l| l.contains("encoder-0 ended") && l.contains("comes back")), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pd_worker_killed_in_the_middle_of_a_stream_ends_it_with_a_typed_error() {
    let mut cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let mut stream = client.generate(endless()).await.expect("accepted").into_inner();
    while !matches!(stream.message().await.expect("a stream").and_then(|m| m.kind), Some(Kind::Delta(_))) {}
    let pd = cluster.pid("pd");
    signal(pd, "KILL");
    let end = tokio::time::timeout(DEADLINE, async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(status) => return Err(status),
            }
        }
    });
    let status = end.await.expect("ends in time").expect_err("an error, not a short answer");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    cluster.wait_replaced("pd", pd).await;
    assert!(
        !generate(&mut client, picture("scene.png"))
            .await
            .expect("the cluster is well again")
            .text
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_killed_between_publish_and_load_costs_an_encode_and_no_request() {
    let mut redis = RedisServer::start();
    let cluster = Cluster::start(&["--ec", &redis.url()]).await;
    let mut client = connect(&cluster.grpc).await;
    // Stopped, the PD worker cannot load: the output is published, and then its store dies with it.
    let pd = cluster.pid("pd");
    signal(pd, "STOP");
    let mut asking = client.clone();
    let pending = tokio::spawn(async move { generate(&mut asking, picture("scene.png")).await });
    let encodes = async || cluster.metric("encoder-0", "triptych_encodes_total").await;
    eventually("the output is published", async || (encodes().await == 1.0).then_some(())).await;
    redis.kill();
    redis.restart();
    signal(pd, "CONT");
    let answer = tokio::time::timeout(DEADLINE, pending).await.expect("ends in time").expect("no panic");
    let answer = answer.expect("an answer, from an output that was encoded again");
    assert_eq!(encodes().await, 2.0);
    let again = generate(&mut client, picture("scene.png")).await.expect("the cluster is well");
    assert_eq!(again.text, answer.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_go_away_leave_nothing_behind() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    for _ in 0..20 {
        let mut stream = client.generate(endless()).await.expect("accepted").into_inner();
        let _ = stream.message().await.expect("a stream");
        drop(stream);
    }
    for (worker, metric) in [
        ("pd-0", "triptych_requests_running"),
        ("pd-0", "triptych_requests_waiting"),
        ("pd-0", "triptych_kv_cache_usage_ratio"),
        ("proxy", "triptych_requests_running"),
    ] {
        eventually(metric, async || (cluster.metric(worker, metric).await == 0.0).then_some(())).await;
    }
    assert!(!generate(&mut client, picture("scene.png")).await.expect("an answer").text.is_empty());
}
