//! Start, shutdown, and the death of the supervisor.

use futures::future::{join, join_all};
use serde_json::json;
use std::os::unix::process::CommandExt;
use std::process::Command;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_tests::client::{about_images, connect};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::{Process, binary, eventually, free_port, is_alive, signal};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_finishes_running_answers_and_exits_with_zero() {
    let mut cluster = Cluster::start(&["--ec", "memory"]).await;
    let children: Vec<u32> =
        ["proxy", "encoder", "pd", "store"].iter().flat_map(|r| cluster.pids(r)).collect();
    assert_eq!(children.len(), 4);
    let mut client = connect(&cluster.grpc).await;
    let mut request = about_images("Hello", Vec::new());
    request.model = "shapes-qwen2-vl".into();
    let sampling = v1::Sampling { ignore_eos: true, max_tokens: Some(64), ..Default::default() };
    request.sampling = Some(sampling);
    let mut stream = client.generate(request).await.expect("accepted").into_inner();
    while !matches!(stream.message().await.expect("a stream").and_then(|m| m.kind), Some(Kind::Delta(_))) {}
    signal(cluster.up.pid(), "INT");
    let mut summary = None;
    while let Some(message) = stream.message().await.expect("the stream goes on to its end") {
        if let Some(Kind::Summary(s)) = message.kind {
            summary = s.usage;
        }
    }
    assert_eq!(summary.expect("a complete answer").completion_tokens, 64);
    assert!(cluster.up.wait().await.success());
    assert!(children.into_iter().all(|pid| !is_alive(pid)), "a worker outlived the supervisor");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_supervisor_leaves_no_worker_behind() {
    let cluster = Cluster::start(&[]).await;
    let children: Vec<u32> =
        ["proxy", "encoder", "pd", "store"].iter().flat_map(|r| cluster.pids(r)).collect();
    signal(cluster.up.pid(), "KILL");
    eventually("the workers end", async || children.iter().all(|pid| !is_alive(*pid)).then_some(())).await;
}

#[tokio::test]
async fn a_failed_start_prints_the_cause_and_exits_with_an_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("free");
    let taken = listener.local_addr().expect("bound").to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let empty = dir.path().to_str().expect("UTF-8");
    let cases: [(&[&str], &str); 5] = [
        (&["up", "--http", &taken], "--http"),
        (&["up", "--model", "/no/such/directory"], "/no/such/directory"),
        (&["up", "--model", empty], "config.json"),
        (&["up", "--ec", "ftp://x"], "redis://"),
        (&["ask", "hi", "--image", "/no/such/file.png"], "/no/such/file.png"),
    ];
    for (args, expect) in cases {
        let mut process = Process::start(args);
        let status = process.wait().await;
        assert!(!status.success(), "{args:?} ended well");
        eventually("the log is read", async || process.log().contains(expect).then_some(())).await;
    }
}

/// Streams of each API.
const N: usize = 16;
/// Tokens of a stream: it still runs when the PD worker is frozen.
const N_TOKENS: u32 = 400;

/// Running streams of a cluster, each with its first text read.
struct Streams {
    http: Vec<reqwest::Response>,
    grpc: Vec<tonic::Streaming<v1::GenerateResponse>>,
}

/// A cluster whose `up` leads a process group of its own, as a shell starts it, and its streams.
async fn cluster_with_streams(args: &[&str]) -> (Cluster, Streams) {
    let http = format!("127.0.0.1:{}", free_port());
    let grpc = format!("127.0.0.1:{}", free_port());
    let mut command = Command::new(binary());
    command.args(["up", "--http", &http, "--grpc", &grpc]).args(args).process_group(0);
    let up = Process::spawn(&mut command);
    let mut cluster = Cluster { up, http: format!("http://{http}"), grpc: format!("http://{grpc}") };
    cluster.wait_ready().await;
    let body = json!({
        "model": "shapes-qwen2-vl", "stream": true, "max_tokens": N_TOKENS, "ignore_eos": true,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    let url = format!("{}/v1/chat/completions", cluster.http);
    let http = (0..N).map(async |_| {
        let mut response = reqwest_client().post(&url).json(&body).send().await.expect("accepted");
        assert!(response.chunk().await.expect("a stream").is_some());
        response
    });
    let mut request = about_images("Hello", Vec::new());
    request.model = "shapes-qwen2-vl".into();
    let sampling = v1::Sampling { ignore_eos: true, max_tokens: Some(N_TOKENS), ..Default::default() };
    request.sampling = Some(sampling);
    let grpc = (0..N).map(async |_| {
        let mut client = connect(&cluster.grpc).await;
        let mut stream = client.generate(request.clone()).await.expect("accepted").into_inner();
        while !matches!(stream.message().await.expect("a stream").and_then(|m| m.kind), Some(Kind::Delta(_)))
        {
        }
        stream
    });
    // All at once, so that the first still runs when the last has begun.
    let (http, grpc) = join(join_all(http), join_all(grpc)).await;
    let streams = Streams { http, grpc };
    (cluster, streams)
}

impl Streams {
    /// Reads all to their ends: how many ended whole, and how many with an error. A broken connection is neither.
    async fn ends(self) -> (usize, usize) {
        let (mut whole, mut failed) = (0, 0);
        for mut response in self.http {
            let mut text = String::new();
            while let Some(piece) = response.chunk().await.expect("no broken connection") {
                text += &String::from_utf8_lossy(&piece);
            }
            whole += usize::from(text.ends_with("data: [DONE]\n\n"));
            failed += usize::from(
                text.trim_end().rsplit("\n\n").next().is_some_and(|e| e.starts_with("data: {\"error\"")),
            );
        }
        for mut stream in self.grpc {
            let mut last = None;
            loop {
                match stream.message().await {
                    Ok(Some(message)) => last = message.kind,
                    Ok(None) => {
                        whole += usize::from(matches!(last, Some(Kind::Summary(_))));
                        break;
                    }
                    Err(status) => {
                        assert!(status.message().contains("stopping"), "{status}");
                        failed += 1;
                        break;
                    }
                }
            }
        }
        (whole, failed)
    }
}

/// Stops `up` while the PD worker is frozen, so that every stream runs on into the drain: `target` is its pid, or its
/// process group.
async fn stop_in_the_middle(cluster: &Cluster, name: &str, target: &str) {
    signal(cluster.pid("pd"), "STOP");
    let sent = Command::new("kill").args([&format!("-{name}"), "--", target]).status();
    assert!(sent.expect("kill runs").success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stream_ends_whole_on_either_signal() {
    for (name, to_group) in [("TERM", false), ("INT", false), ("INT", true)] {
        let (mut cluster, streams) = cluster_with_streams(&[]).await;
        let (up, pd) = (cluster.up.pid(), cluster.pid("pd"));
        let target = if to_group { format!("-{up}") } else { up.to_string() };
        stop_in_the_middle(&cluster, name, &target).await;
        let http = cluster.http.trim_start_matches("http://").to_owned();
        eventually("the proxy listens no more", async || {
            tokio::net::TcpStream::connect(&http).await.is_err().then_some(())
        })
        .await;
        assert!(is_alive(pd) && cluster.up.exited().is_none(), "workers stop after the proxy");
        signal(pd, "CONT");
        assert_eq!(streams.ends().await, (2 * N, 0), "SIG{name}");
        assert!(cluster.up.wait().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_are_cut_end_with_an_error_and_the_exit_says_how_many() {
    // The grace period is over, and, in the second case, the user asks again.
    for (grace, again) in [("0", false), ("60", true)] {
        let (mut cluster, streams) = cluster_with_streams(&["--drain-grace", grace]).await;
        let (up, pd) = (cluster.up.pid(), cluster.pid("pd"));
        stop_in_the_middle(&cluster, "TERM", &up.to_string()).await;
        if again {
            eventually("it is stopping", async || cluster.up.log().contains("draining").then_some(())).await;
            signal(up, "TERM");
        }
        let (whole, failed) = streams.ends().await;
        assert!(failed > 0 && whole + failed == 2 * N, "{whole} ended whole, {failed} with an error");
        signal(pd, "CONT");
        assert_eq!(cluster.up.wait().await.code(), Some(1));
        let said = format!("{failed} requests were cut");
        eventually("the log is read", async || cluster.up.log().contains(&said).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_clusters_at_the_same_address_one_says_that_it_is_in_use() {
    let http = format!("127.0.0.1:{}", free_port());
    let grpc = format!("127.0.0.1:{}", free_port());
    let mut two = [(); 2].map(|()| Process::start(&["up", "--http", &http, "--grpc", &grpc]));
    let ended =
        eventually("one of them ends", async || two.iter_mut().position(|up| up.exited().is_some())).await;
    let [first, second] = &mut two;
    let (failed, other) = if ended == 0 { (first, second) } else { (second, first) };
    assert_eq!(failed.wait().await.code(), Some(1));
    eventually("the error names address and flag", async || {
        let log = failed.log();
        let last = log.lines().rev().find(|line| line.starts_with("error: "))?;
        ((last.contains(&http) && last.contains("--http"))
            || (last.contains(&grpc) && last.contains("--grpc")))
        .then_some(())
    })
    .await;
    assert!(!failed.log().contains("Triptych is ready"), "{}", failed.log());
    eventually("the other one is ready", async || other.log().contains("Triptych is ready").then_some(()))
        .await;
}
