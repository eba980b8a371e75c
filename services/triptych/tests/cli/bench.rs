//! `triptych bench run` against a small server of OpenAI's API: the model that it chooses, the rate that it reports, and
//! what Ctrl-C leaves.

use super::{refuses, triptych};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use triptych_bench::result::SweepResult;

const MODELS: &str = r#"{"object": "list", "data": [
    {"id": "ears", "object": "model", "modalities": ["audio"]},
    {"id": "eyes", "object": "model", "modalities": ["image"]}]}"#;

/// Two tokens of an answer, and their count.
const ANSWER: &str = concat!(
    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"
);

/// Number of chat requests after which a server says so, and perhaps falls silent.
const ENOUGH: usize = 30;

/// A server: its URL, and a message when it has had [`ENOUGH`] requests.
struct Server {
    url: String,
    had_enough: mpsc::Receiver<()>,
}

/// Starts a server that answers, or one that is silent after enough requests.
fn serve(is_silent_then: bool) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (tell, had_enough) = mpsc::channel();
    let n_chats = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (n_chats, tell) = (n_chats.clone(), tell.clone());
            std::thread::spawn(move || {
                let stream = stream.expect("a connection");
                let Some(path) = read_request(&stream) else { return };
                let is_chat = path.starts_with("/v1/chat");
                let n = if is_chat { n_chats.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
                if n == ENOUGH {
                    // The test may have ended.
                    let _ = tell.send(());
                }
                if n >= ENOUGH && is_silent_then {
                    // Until the client closes the connection.
                    let _ = (&stream).read(&mut [0]);
                    return;
                }
                match path.as_str() {
                    "/v1/models" => answer(&stream, 200, MODELS),
                    _ if is_chat => answer(&stream, 200, ANSWER),
                    _ => answer(&stream, 404, ""),
                }
            });
        }
    });
    Server { url, had_enough }
}

/// Reads a request with its body; its path.
fn read_request(stream: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut n_body = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            n_body = n.trim().parse().ok()?;
        }
    }
    std::io::copy(&mut reader.take(n_body), &mut std::io::sink()).ok()?;
    Some(path)
}

fn answer(mut stream: &TcpStream, status: u16, body: &str) {
    let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    // A client that was stopped has gone.
    let _ = stream.write_all((head + body).as_bytes());
}

/// Small requests, judged by an SLO that every answer meets.
const SMALL: [&str; 9] =
    ["bench", "run", "--slo", "ttft=60s,tpot=60s", "--max-late", "1h", "--seeds", "1", "--workload"];
const IMAGES: &str = "epd-short:images=1,size=8x8,text=5,output=2";

#[test]
fn the_first_model_that_takes_the_items_is_measured_and_a_short_run_reports_what_was_offered() {
    let (server, dir) = (serve(false), tempfile::tempdir().expect("a folder"));
    let json = dir.path().join("r.json");
    let size = ["--rates", "40", "--requests", "20", "--warm-up", "100ms"];
    let place = [IMAGES, "--url", &server.url, "--json", json.to_str().expect("plain")];
    let output = triptych(&[&SMALL[..], &place, &size].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("model eyes: the first of 2 listed that takes images"), "{text}");
    let found = read(&json);
    assert_eq!(found.setup.model, "eyes");
    let run = &found.rates[0].runs[0];
    let offered = run.throughput.offered_per_s;
    // On a busy machine the rate may fail, which is not what is tested.
    let judged = found.goodput.rate.or(found.goodput.fails_at).expect("one rate was judged");
    assert!((offered / 40.0 - 1.0).abs() > 0.02, "{offered} of 40: a seed that is off");
    assert!((judged / offered - 1.0).abs() < 1e-3, "{judged} of {offered}");
    assert!(!found.partial);
}

#[test]
fn where_no_model_takes_the_items_the_list_is_told() {
    let server = serve(false);
    let both = "random-mm:items=2,buckets=8x8x1@0.5+0x1x1@0.5";
    refuses(
        &[&SMALL[..], &[both, "--url", &server.url]].concat(),
        2,
        &["images and audio", "ears, which takes audio", "eyes, which takes images", "--model"],
    );
}

/// Starts a bench of minutes.
fn start(server: &Server, dir: &Path) -> Child {
    let file = |name: &str| dir.join(name).to_str().expect("plain").to_owned();
    let mut command = Command::new(env!("CARGO_BIN_EXE_triptych"));
    command.args(SMALL).args([IMAGES, "--url", &server.url, "--model", "eyes"]);
    command.args(["--rates", "20", "--requests", "10000", "--warm-up", "100ms"]);
    command.args(["--json", &file("r.json"), "--report", &file("r.md")]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

fn interrupt(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, Signal::INT).expect("it runs");
}

fn read(json: &Path) -> SweepResult {
    SweepResult::read(&std::fs::read_to_string(json).expect("a result")).expect("its own document")
}

#[test]
fn ctrl_c_leaves_a_partial_result_and_its_report() {
    let (server, dir) = (serve(false), tempfile::tempdir().expect("a folder"));
    let child = start(&server, dir.path());
    server.had_enough.recv().expect("requests");
    interrupt(&child);
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("the result is partial"), "{text}");
    let found = read(&dir.path().join("r.json"));
    let verdict = &found.rates[0].verdict;
    assert!(found.partial && verdict.n_offered > 0 && verdict.n_offered < 10_000, "{}", verdict.n_offered);
    assert_eq!(verdict.ends.whole, verdict.n_offered, "what was under way has ended");
    assert!(found.goodput.rate.or(found.goodput.fails_at).is_some());
    let page = std::fs::read_to_string(dir.path().join("r.md")).expect("a report");
    assert!(page.contains("1 of 1 results are partial"), "{page}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("goodput"), "the result is printed too");
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let (server, dir) = (serve(true), tempfile::tempdir().expect("a folder"));
    let mut child = start(&server, dir.path());
    let mut stderr = BufReader::new(child.stderr.take().expect("piped")).lines();
    server.had_enough.recv().expect("requests");
    interrupt(&child);
    let said = stderr.by_ref().map_while(Result::ok).any(|line| line.starts_with("stopping"));
    assert!(said, "it says that it waits");
    interrupt(&child);
    assert_eq!(child.wait().expect("it ends").code(), Some(1));
    assert!(!dir.path().join("r.json").exists());
}
