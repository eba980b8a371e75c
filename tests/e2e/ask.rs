//! `triptych ask` of a cluster whose PD worker is frozen.

use parking_lot::Mutex;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::Arc;
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{binary, eventually, signal};

/// Exit status of a question whose time is over.
const TIMED_OUT: i32 = 124;
const QUESTION: &str = "Why?";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_to_a_frozen_worker_says_what_it_waits_for_and_ends_at_its_timeout() {
    let cluster = Cluster::start(&[]).await;
    let pd = cluster.pid("pd");
    signal(pd, "STOP");
    let mut command = Command::new(binary());
    command.args(["ask", QUESTION, "--grpc", &cluster.grpc, "--timeout", "1s"]).stdin(Stdio::null());
    let ended = tokio::task::spawn_blocking(move || command.output()).await.expect("no panic");
    let ended = ended.expect("the binary runs");
    let error = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(TIMED_OUT), "{error}");
    assert!(error.contains("1s") && error.contains("waiting for"), "{error}");

    // On a terminal, which `script` of util-linux makes, and without a limit.
    let asked = format!("{} ask {QUESTION} --grpc {} --max-tokens 4", binary().display(), cluster.grpc);
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &asked, "/dev/null"]);
    let mut child = script.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("util-linux has it");
    let shown = Arc::<Mutex<Vec<u8>>>::default();
    let (mut terminal, written) = (child.stdout.take().expect("piped"), Arc::clone(&shown));
    let reading = std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = terminal.read(&mut piece) {
            written.lock().extend(&piece[..n]);
        }
    });
    let shows = |text: &str| String::from_utf8_lossy(&shown.lock()).contains(text);
    eventually("it says what it waits for", async || shows("waiting for its first token").then_some(()))
        .await;
    // Nobody could have answered until now.
    signal(pd, "CONT");
    let status =
        tokio::task::spawn_blocking(move || child.wait()).await.expect("no panic").expect("own child");
    reading.join().expect("no panic");
    assert!(status.success(), "{}", String::from_utf8_lossy(&shown.lock()));
}
