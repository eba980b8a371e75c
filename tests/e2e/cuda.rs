//! A cluster on CUDA: real processes on the libraries that stand in for the driver and cublasLt.

use std::ffi::OsString;
use std::fs;
use triptych_cuda_standin::Standin;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_runtime::watchdog::DEVICE_LOST_EXIT_CODE;
use triptych_tests::client::{about_audio, about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{Process, free_port};
use triptych_tests::samples::{heldout, list};

/// Flags of a cluster on CUDA; bf16 since the stand-in computes it sooner.
const ON_CUDA: [&str; 4] = ["--device", "cuda", "--precision", "bf16"];

/// The variable by which a process finds the stand-in's libraries.
fn libraries() -> (&'static str, OsString) {
    ("LD_LIBRARY_PATH", std::env::join_paths(Standin::folders()).expect("folders without a colon"))
}

/// The first value of a metric, whatever its labels.
fn value(metrics: &str, name: &str) -> Option<f64> {
    let rest = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(['{', ' ']))?;
    rest.rsplit(' ').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_on_cuda_answers_and_replaces_a_worker_whose_device_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let lost = folder.path().join("lost");
    let variables = [libraries(), ("CUDA_STANDIN_LOST", lost.clone().into_os_string())];
    let mut cluster = Cluster::start_with(&ON_CUDA, &variables).await;
    let log = cluster.up.log();
    assert_eq!(log.matches("computing on CUDA device=cuda:0").count(), 4, "two models, two stages: {log}");
    let mut client = connect(&cluster.grpc).await;
    let scene = list("scenes.jsonl").into_iter().nth(1).expect("a scene");
    let [file, text] = ["file", "question"].map(|key| scene[key].as_str().expect("a text"));
    let mut question = about_images(text, vec![heldout(file)]);
    let answer = generate(&mut client, question.clone()).await.expect("an answer");
    assert_eq!(answer.text, scene["answer"].as_str().expect("an answer"));
    let captured = ["graph_replays_total", "graph_tokens_total", "graph_memory_bytes"];
    let metrics = cluster.metrics("encoder-0").await;
    for name in captured.map(|name| format!("triptych_encode_{name}")) {
        assert!(value(&metrics, &name).is_some_and(|n| n > 0.0), "{name}: {metrics}");
    }
    for name in ["triptych_encode_eager_forwards_total", "triptych_encode_graph_padding_tokens_total"] {
        assert!(value(&metrics, name).is_some(), "{name}: {metrics}");
    }
    let metrics = cluster.metrics("pd-0").await;
    for name in captured.map(|name| format!("triptych_decode_{name}")) {
        assert!(value(&metrics, &name).is_some_and(|n| n > 0.0), "{name}: {metrics}");
    }
    for name in ["triptych_decode_eager_steps_total", "triptych_decode_graph_padding_tokens_total"] {
        assert!(value(&metrics, name).is_some(), "{name}: {metrics}");
    }

    // The PD worker loses its device in the middle of a stream.
    question.sampling = Some(v1::Sampling {
        ignore_eos: true,
        temperature: Some(0.0),
        max_tokens: Some(24),
        min_tokens: Some(24),
        ..Default::default()
    });
    let expected = generate(&mut client, question.clone()).await.expect("an answer").text;
    let pd = cluster.pid("pd");
    let mut stream = client.generate(question).await.expect("accepted").into_inner();
    let mut text = String::new();
    while let Some(message) = stream.message().await.expect("the stream goes on") {
        if let Some(Kind::Delta(delta)) = message.kind {
            text.push_str(&delta.text);
            fs::write(&lost, pd.to_string()).expect("a file");
        }
    }
    assert_eq!(text, expected);
    cluster.wait_replaced("pd", pd).await;
    let log = cluster.up.log();
    assert!(log.contains("the compute device is lost"), "{log}");
    let ended = format!("pd-0 ended (pid {pd}, exit status: {DEVICE_LOST_EXIT_CODE})");
    assert!(log.contains(&ended), "no `{ended}` in {log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_found_is_taken_and_one_that_is_not_there_is_an_error() {
    let cluster = Cluster::start_with(&["--precision", "bf16"], &[libraries()]).await;
    assert!(cluster.up.log().contains("computing on CUDA device=cuda:0"), "{}", cluster.up.log());
    assert!(
        !cluster.up.log().contains("tpot_slo_ms"),
        "its cores are not what computes: {}",
        cluster.up.log()
    );
    let mut client = connect(&cluster.grpc).await;
    let digits = list("digits.jsonl").into_iter().next().expect("a clip");
    let file = digits["file"].as_str().expect("a file");
    let request = about_audio(heldout(file), v1::SpeechTask::default());
    let answer = generate(&mut client, request).await.expect("an answer");
    assert_eq!(answer.text.trim(), digits["text"].as_str().expect("a text"));

    let [http, grpc] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
    let mut up = Process::start(&["up", "--device", "cuda", "--http", &http, "--grpc", &grpc]);
    let status = up.wait().await;
    assert!(!status.success());
    assert!(up.log().contains("libcuda.so.1 is not found"), "{}", up.log());
}
