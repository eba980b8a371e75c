//! SIGKILL at the worst moments: every request ends with an answer or a typed error, and the cluster recovers.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tonic::Code;
use triptych_ec::testing::RedisServer;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client, sum_series};
use triptych_tests::process::{children_of, eventually, signal};
use triptych_tests::samples::{ask_images, heldout, list};

/// Largest number of attempts: a kill may come after the last token.
const TRIES: usize = 40;
/// Longest time a request may take to end: the default limit and a margin.
const DEADLINE: Duration = Duration::from_secs(150);

fn image_request(file: &str) -> v1::GenerateRequest {
    about_images("What is in this picture?", vec![heldout(file)])
}

/// A request whose answers are much longer than the model's own limit, so that a kill comes in their middle.
fn endless() -> v1::GenerateRequest {
    let mut request = image_request("scene.png");
    request.sampling = Some(v1::Sampling {
        ignore_eos: true,
        max_tokens: Some(600),
        temperature: Some(0.0),
        n: Some(4),
        ..Default::default()
    });
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
            let mut client = client.clone();
            let request = image_request(file);
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
async fn without_resumption_a_stream_ends_with_a_typed_error_when_its_pd_worker_is_killed() {
    let mut cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let never = v1::GenerateRequest { resumption: v1::Resumption::Never.into(), ..endless() };
    let mut ends = Vec::new();
    while !matches!(ends.last(), Some(Err(_))) {
        assert!(ends.len() < TRIES, "no kill came in the middle of a stream");
        let pd = cluster.pid("pd");
        let mut stream = client.generate(never.clone()).await.expect("accepted").into_inner();
        let mut is_whole = false;
        let read = async {
            let mut killed = false;
            loop {
                match stream.message().await {
                    Ok(Some(message)) => match message.kind {
                        Some(Kind::Delta(_)) if !std::mem::replace(&mut killed, true) => signal(pd, "KILL"),
                        Some(Kind::Summary(_)) => is_whole = true,
                        _ => {}
                    },
                    Ok(None) => return Ok(()),
                    Err(status) => return Err(status),
                }
            }
        };
        let end = tokio::time::timeout(DEADLINE, read).await.expect("ends in time");
        assert!(is_whole == end.is_ok(), "a short answer is no answer: {end:?}");
        ends.push(end);
        cluster.wait_replaced("pd", pd).await;
    }
    let status = ends.pop().and_then(Result::err).expect("the last one failed");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(
        !generate(&mut client, image_request("scene.png"))
            .await
            .expect("the cluster has recovered")
            .text
            .is_empty()
    );
}

/// Sampled with a seed, so that another worker has to sample the same; several choices, each of which has to resume.
fn sampled() -> v1::GenerateRequest {
    let mut request = endless();
    if let Some(sampling) = &mut request.sampling {
        (sampling.temperature, sampling.seed) = (Some(0.9), Some(11));
        sampling.repetition_penalty = Some(1.1);
    }
    request
}

/// Kills the PD worker that is generating, if there is one: it may have just finished.
async fn kill_generating_worker(cluster: &Cluster) {
    for name in ["pd-0", "pd-1"] {
        // A worker that was killed before may not have restarted yet.
        let metrics = reqwest_client().get(format!("{}/metrics", cluster.admin(name))).send().await;
        let Ok(metrics) = metrics else { continue };
        let metrics = metrics.text().await.unwrap_or_default();
        if sum_series(&metrics, "triptych_requests_running") > 0.0
            && let [pid] = children_of(cluster.up.pid(), name)[..]
        {
            return signal(pid, "KILL");
        }
    }
}

/// Number of streams that were resumed.
async fn resumed(cluster: &Cluster) -> f64 {
    cluster.metric("proxy", "triptych_resumed_streams_total").await
}

/// Reads a stream to its end: the text of each choice, and the number of tokens. Runs `act` after the first delta.
async fn read(
    mut stream: tonic::Streaming<v1::GenerateResponse>,
    act: impl AsyncFnOnce(),
) -> (BTreeMap<u32, String>, u32) {
    let mut texts: BTreeMap<u32, String> = BTreeMap::new();
    let mut act = Some(act);
    loop {
        match stream.message().await.expect("no failure").expect("a summary ends it").kind {
            Some(Kind::Delta(delta)) => {
                texts.entry(delta.choice).or_default().push_str(&delta.text);
                if let Some(act) = act.take() {
                    act().await;
                }
            }
            Some(Kind::Summary(summary)) => return (texts, summary.usage.expect("counts").completion_tokens),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_of_a_stopped_encoder_are_hedged_and_answered_by_the_other() {
    let cluster = Cluster::start(&["--encoders", "2"]).await;
    let client = connect(&cluster.grpc).await;
    // Bytes after the end of a PNG change its key and not its pixels.
    let another = |n: u8| {
        let image = [heldout("scene.png"), vec![n]].concat();
        let mut client = client.clone();
        let request = about_images("What is in this picture?", vec![image]);
        async move { generate(&mut client, request).await.expect("an answer").text }
    };
    // Both encoders learn the cost of an item.
    for n in 0..24 {
        assert!(!another(n).await.is_empty());
    }
    let stopped = cluster.pids("encoder")[0];
    signal(stopped, "STOP");
    let answers = futures::future::join_all((100..116).map(another));
    let answers = tokio::time::timeout(DEADLINE, answers).await.expect("ends in time");
    assert!(answers.iter().all(|text| !text.is_empty()));
    let hedged = cluster.metrics("proxy").await;
    assert!(hedged.contains("triptych_encode_jobs_total{why=\"hedge\"}"), "{hedged}");
    signal(stopped, "CONT");
    assert!(!another(200).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_stream_is_unchanged_when_its_pd_worker_is_killed() {
    let mut cluster = Cluster::start(&["--pds", "2"]).await;
    let mut client = connect(&cluster.grpc).await;
    let undisturbed = client.generate(sampled()).await.expect("accepted").into_inner();
    let undisturbed = read(undisturbed, async || {}).await;
    assert_eq!(undisturbed.0.len(), 4, "answers");
    for _ in 0..TRIES {
        let stream = client.generate(sampled()).await.expect("accepted").into_inner();
        let disturbed = read(stream, async || kill_generating_worker(&cluster).await);
        let disturbed = tokio::time::timeout(DEADLINE, disturbed).await.expect("ends in time");
        assert_eq!(disturbed, undisturbed);
        if resumed(&cluster).await > 0.0 {
            return;
        }
        cluster.wait_ready().await;
    }
    panic!("no kill came in the middle of a stream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http_stream_is_unchanged_when_its_pd_worker_is_killed() {
    let mut cluster = Cluster::start(&["--pds", "2"]).await;
    let mut body = ask_images("shapes-qwen2-vl", "What is in this picture?", &[&heldout("scene.png")]);
    // Long enough that a kill after its first words comes before its last.
    let long =
        [("stream", json!(true)), ("ignore_eos", json!(true)), ("n", json!(2)), ("max_tokens", json!(600))];
    for (field, value) in long {
        body[field] = value;
    }
    (body["temperature"], body["seed"]) = (json!(0.9), json!(12));
    let url = format!("{}/v1/chat/completions", cluster.http);
    let ask = async |cluster: &Cluster, kills: bool| {
        let mut response = reqwest_client().post(&url).json(&body).send().await.expect("an answer");
        let mut all = Vec::new();
        let mut killed = !kills;
        while let Some(bytes) = response.chunk().await.expect("no failure") {
            all.extend_from_slice(&bytes);
            if !killed && all.windows(9).any(|w| w == b"\"content\"") {
                kill_generating_worker(cluster).await;
                killed = true;
            }
        }
        let text = String::from_utf8(all).expect("events are text");
        assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
        let mut texts: BTreeMap<u64, String> = BTreeMap::new();
        for event in
            text.lines().filter_map(|l| serde_json::from_str::<Value>(l.strip_prefix("data: ")?).ok())
        {
            for choice in event["choices"].as_array().into_iter().flatten() {
                let index = choice["index"].as_u64().expect("an index");
                texts.entry(index).or_default().push_str(choice["delta"]["content"].as_str().unwrap_or(""));
            }
        }
        texts
    };
    let undisturbed = ask(&cluster, false).await;
    assert_eq!(undisturbed.len(), 2, "answers");
    for _ in 0..TRIES {
        let disturbed = tokio::time::timeout(DEADLINE, ask(&cluster, true)).await.expect("ends in time");
        assert_eq!(disturbed, undisturbed);
        if resumed(&cluster).await > 0.0 {
            return;
        }
        cluster.wait_ready().await;
    }
    panic!("no kill came in the middle of a stream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_resumes_when_the_only_pd_worker_has_restarted() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let undisturbed = client.generate(sampled()).await.expect("accepted").into_inner();
    let undisturbed = read(undisturbed, async || {}).await;
    let stream = client.generate(sampled()).await.expect("accepted").into_inner();
    let disturbed = read(stream, async || signal(cluster.pid("pd"), "KILL"));
    let disturbed = tokio::time::timeout(DEADLINE, disturbed).await.expect("ends in time");
    assert_eq!(disturbed, undisturbed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_killed_between_publish_and_load_costs_neither_a_request_nor_an_encode() {
    let mut redis = RedisServer::start();
    let cluster = Cluster::start(&["--ec", &redis.url()]).await;
    let mut client = connect(&cluster.grpc).await;
    // Stopped, the PD worker cannot load: the output is published, and then its store dies with it.
    let pd = cluster.pid("pd");
    signal(pd, "STOP");
    let mut asking = client.clone();
    let pending = tokio::spawn(async move { generate(&mut asking, image_request("scene.png")).await });
    let encodes = async || cluster.metric("encoder-0", "triptych_encodes_total").await;
    eventually("the output is published", async || (encodes().await == 1.0).then_some(())).await;
    redis.kill();
    redis.restart();
    signal(pd, "CONT");
    let answer = tokio::time::timeout(DEADLINE, pending).await.expect("ends in time").expect("no panic");
    let answer = answer.expect("an answer, from the output that the encoder still has");
    assert_eq!(encodes().await, 1.0, "they were published again");
    let again = generate(&mut client, image_request("scene.png")).await.expect("the cluster is well");
    assert_eq!(again.text, answer.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_requests_release_everything_they_held() {
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
    assert!(!generate(&mut client, image_request("scene.png")).await.expect("an answer").text.is_empty());
}
