//! Start, shutdown, and the death of the supervisor.

use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_tests::client::{about_images, connect};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{Process, eventually, is_alive, signal};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_finishes_running_answers_and_exits_with_zero() {
    let mut cluster = Cluster::start(&[]).await;
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
