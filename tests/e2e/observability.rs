//! One timeline and one log through all processes, and the names of metrics.

use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{eventually, signal};
use triptych_tests::samples::heldout;

/// Events of a timeline, which is a whole JSON list between any two writes.
fn timeline(path: &Path) -> Vec<Value> {
    let mut file = File::open(path).expect("a timeline");
    file.lock_shared().expect("a lock");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("UTF-8");
    match text.is_empty() {
        true => Vec::new(),
        false => serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeline_is_written_while_nothing_happens_and_readable_after_a_kill() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("timeline.json");
    let flags = ["--trace-file", file.to_str().expect("UTF-8"), "--trace-file-mib", "0", "--log", "warn"];
    let mut cluster = Cluster::start(&flags).await;
    let mut client = connect(&cluster.grpc).await;
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    for round in 0..2 {
        generate(&mut client, request.clone()).await.expect("an answer");
        let ends =
            |name: &str| timeline(&file).iter().filter(|e| e["ph"] == "e" && e["name"] == name).count();
        eventually("the request is in the file", async || {
            (ends("request") > round && ends("decode") > round).then_some(())
        })
        .await;
        let pd = cluster.pid("pd");
        signal(pd, "KILL");
        cluster.wait_replaced("pd", pd).await;
    }
    let pds: std::collections::BTreeSet<_> = timeline(&file)
        .iter()
        .filter(|e| e["name"] == "process_name" && e["args"]["name"] == "pd")
        .map(|e| e["pid"].as_u64())
        .collect();
    assert_eq!(pds.len(), 2, "each process has its name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_processes_write_one_timeline_without_client_data() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("timeline.json");
    let mut cluster = Cluster::start(&["--trace-file", file.to_str().expect("UTF-8")]).await;
    let encoder = cluster.pid("encoder");
    let pd = cluster.pid("pd");
    let mut client = connect(&cluster.grpc).await;
    let question = "What is in this picture?";
    generate(&mut client, about_images(question, vec![heldout("scene.png")])).await.expect("an answer");
    signal(cluster.up.pid(), "INT");
    assert!(cluster.up.wait().await.success());
    let text = std::fs::read_to_string(&file).expect("a timeline");
    assert!(!text.contains(question));
    let events = timeline(&file);
    let has = |phase: &str, name: &str, pid: Option<u32>| {
        let of_pid = |e: &Value| pid.is_none_or(|pid| e["pid"].as_u64() == Some(pid.into()));
        let found = events.iter().any(|e| e["ph"] == phase && e["name"] == name && of_pid(e));
        assert!(found, "no {name} ({phase}) of {pid:?} in\n{text}");
    };
    for (name, pid) in [("preprocess", encoder), ("forward", encoder), ("forward", pd), ("sample", pd)] {
        has("X", name, Some(pid));
    }
    for name in ["request", "encode", "load", "prefill", "decode"] {
        has("b", name, None);
        has("e", name, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_process_has_its_metrics_with_help_and_unit_after_a_request() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    for _ in 0..2 {
        generate(&mut client, request.clone()).await.expect("an answer");
    }
    let expected: [(&str, &[&str]); 3] = [
        (
            "proxy",
            &[
                "time_to_first_token_seconds",
                "e2e_request_latency_seconds",
                "time_per_output_token_seconds",
                "requests",
                "requests_running",
                "item_source",
                "encode_jobs",
                "encode_leases",
                "requests_by_items",
                "request_text_tokens",
                "request_output_tokens",
                "item_tokens",
            ],
        ),
        (
            "encoder-0",
            &[
                "encode_queue_time_seconds",
                "preprocess_time_seconds",
                "encode_time_seconds",
                "encode_batch_items",
                "encode_batch_tokens",
                "encodes",
                "ec_publish_time_seconds",
            ],
        ),
        (
            "pd-0",
            &[
                "pd_queue_time_seconds",
                "prefill_time_seconds",
                "kv_cache_usage_ratio",
                "engine_step_time_seconds",
                "requests_running",
                "requests_waiting",
                "ec_hits",
                "ec_load_time_seconds",
                "prompt_tokens",
                "generation_tokens",
            ],
        ),
    ];
    for (worker, names) in expected {
        let text = cluster.metrics(worker).await;
        for name in names {
            assert!(text.contains(&format!("# HELP triptych_{name} ")), "{worker} has no {name}:\n{text}");
            let series = text.lines().any(|l| l.starts_with(&format!("triptych_{name}")));
            assert!(series, "{worker} has no series of {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_followed_by_its_id_through_the_logs_of_all_processes() {
    let flags =
        ["--log-json", "--log", "warn,triptych_encoder=info,triptych_pd=info,triptych::request=debug"];
    let cluster = Cluster::start(&[&flags[..], &["--request-log", "all"]].concat()).await;
    let mut client = connect(&cluster.grpc).await;
    let question = "What is in this picture?";
    let answer = generate(&mut client, about_images(question, vec![heldout("scene.png")])).await;
    let answer = answer.expect("an answer");
    let line_of = |process: &str| -> Option<Value> {
        let log = cluster.up.log();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut of = lines.filter(|line| line["process"] == process);
        of.find(|line| line.to_string().contains(&answer.request_id))
    };
    for process in ["proxy", "encoder-0", "pd-0"] {
        eventually("a line with the id", async || line_of(process)).await;
    }
    let line = line_of("proxy").expect("it is there");
    let fields = &line["fields"];
    assert_eq!((&fields["message"], &fields["outcome"]), (&"request".into(), &"ok".into()), "{line}");
    assert_eq!(fields["images"], 1, "{line}");
    assert!(fields["pd_worker"].as_str().is_some_and(|worker| worker.starts_with("pd@127.0.0.1:")), "{line}");
    assert!(fields["prompt_tokens"].as_u64() > Some(0) && fields["ttft_ms"].as_f64() > Some(0.0), "{line}");
    // Without the page that `up` prints when it is ready, which shows an example of a question.
    let log: String = cluster.up.log().lines().filter(|line| line.starts_with('{')).collect();
    assert!(!log.contains(question) && !log.contains(&answer.text), "content is in the log");
}
