//! Encoder weights of PD workers that are loaded for the first encode, dropped when idle, and loaded again, while requests
//! without images go on: none is lost, and answers are the same.

use crate::role_flips::{MODEL, question};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::task::JoinSet;
use triptych_ec::testing::RedisServer;
use triptych_proto::v1;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::eventually;

const WORKERS: [&str; 2] = ["pd-0", "pd-1"];

/// Sum of a metric over the workers, of the model under test.
async fn sum(cluster: &Cluster, name: &str, label: &str) -> f64 {
    let mut sum = 0.0;
    for worker in WORKERS {
        let text = cluster.metrics(worker).await;
        let of_model = |line: &&str| {
            line.starts_with(&format!("{name}{{")) && line.contains(MODEL) && line.contains(label)
        };
        let values =
            text.lines().filter(of_model).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        sum += values.sum::<f64>();
    }
    sum
}

async fn loaded(cluster: &Cluster) -> f64 {
    sum(cluster, "triptych_encoder_weights_loaded", "").await
}

async fn loads(cluster: &Cluster) -> f64 {
    sum(cluster, "triptych_encoder_weight_loads_total", "outcome=\"ok\"").await
}

/// Clients that ask without images and without end; answers so far, and those that are not like the first.
async fn text_load(cluster: &Cluster) -> (JoinSet<()>, Arc<AtomicU64>, Arc<AtomicU64>) {
    let ask = || {
        let mut request = about_images("What is in this picture?", Vec::new());
        request.model = MODEL.into();
        request.sampling = Some(v1::Sampling { temperature: Some(0.0), ..Default::default() });
        request
    };
    let expect = generate(&mut connect(&cluster.grpc).await, ask()).await.expect("an answer").text;
    let (answered, lost) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..2 {
        let mut connection = connect(&cluster.grpc).await;
        let (answered, lost, expect) = (Arc::clone(&answered), Arc::clone(&lost), expect.clone());
        clients.spawn(async move {
            loop {
                match generate(&mut connection, ask()).await {
                    Ok(answer) if answer.text == expect => answered.fetch_add(1, Ordering::SeqCst),
                    other => {
                        eprintln!("a text: {other:?}");
                        lost.fetch_add(1, Ordering::SeqCst)
                    }
                };
            }
        });
    }
    (clients, answered, lost)
}

/// Answers to so many images at a time that nobody has asked about; all are the same.
async fn images(cluster: &Cluster, client: u64) -> String {
    let mut asked = JoinSet::new();
    for n in 0..3 {
        let mut connection = connect(&cluster.grpc).await;
        asked.spawn(
            async move { generate(&mut connection, question(client, n)).await.expect("an answer").text },
        );
    }
    let answers = asked.join_all().await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    answers[0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_are_loaded_for_an_encode_dropped_when_idle_and_loaded_again_under_load() {
    let redis = RedisServer::start();
    let store = redis.url();
    let lazy = ["--encoder-weights", "lazy", "--encoder-weights-idle", "1", "--roles", "auto"];
    let args = ["--encoders", "0", "--pds", "2", "--with-encoder", "--ec", &store];
    let cluster = Cluster::start(&[&args[..], &lazy].concat()).await;
    let (_clients, answered, lost) = text_load(&cluster).await;
    assert_eq!((loaded(&cluster).await, loads(&cluster).await), (0.0, 0.0), "nobody has encoded anything");
    let mut before = 0.0;
    let mut answers = Vec::new();
    for round in 1..=2 {
        answers.push(images(&cluster, round).await);
        let now = loads(&cluster).await;
        assert!(now > before && now <= before + 2.0, "a load on each worker at most: {before} {now}");
        before = now;
        // Idle for a second, while texts are answered.
        let texts = answered.load(Ordering::SeqCst);
        eventually("weights are dropped", async || (loaded(&cluster).await == 0.0).then_some(())).await;
        let dropped = sum(&cluster, "triptych_encoder_weight_drops_total", "reason=\"idle\"").await;
        assert_eq!(dropped, now, "each load was followed by a drop");
        eventually("texts are answered", async || (answered.load(Ordering::SeqCst) > texts).then_some(()))
            .await;
        assert_eq!(lost.load(Ordering::SeqCst), 0, "round {round}");
    }
    assert_eq!(answers[0], answers[1]);
    let log = cluster.up.log();
    assert!(log.contains("encoder weights loaded") && log.contains("encoder weights dropped"), "{log}");
}
