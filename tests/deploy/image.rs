//! The static binary as in the image: on an empty root, as a user without a name.

use crate::authority::serve_once;
use crate::container::{Container, static_binary};
use crate::dns::Dns;
use std::fs;
use std::net::TcpListener;
use triptych_proto::v1;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::process::{Process, eventually, free_port, signal};
use triptych_tests::samples::{heldout, list};
use triptych_tests::tools::passed;

/// Address of the name server, on the loopback network.
const NAME_SERVER: &str = "127.213.5.3";

#[test]
fn the_binary_needs_no_other_file() {
    // ELF-64: offset, size and number of program headers are at bytes 32, 54 and 56; type 3 is an interpreter.
    let elf = fs::read(static_binary()).expect("the binary");
    let number = |at: usize, n: usize| {
        elf[at..at + n].iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte))
    };
    assert_eq!(&elf[..5], b"\x7fELF\x02");
    let first = number(32, 8);
    let size = number(54, 2);
    let n = number(56, 2);
    let kinds: Vec<_> = (0..n).map(|i| number(first + i * size, 4)).collect();
    assert!(!kinds.is_empty() && !kinds.contains(&3), "an interpreter, so it is not static: {kinds:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_on_an_empty_root_answers_and_finds_names() {
    let dns = Dns::start(NAME_SERVER);
    dns.add("cluster.in.dns", "127.0.0.1");
    let container = Container::new(NAME_SERVER);
    container.put("etc/hosts", "127.0.0.1 localhost cluster.in.file images.in.file\n");
    let version = passed(&mut container.triptych(&["--version"]));
    let expect = format!("triptych {}", env!("CARGO_PKG_VERSION"));
    assert!(version.starts_with(&expect), "{version:?} is not of {expect:?}");
    let http = free_port();
    let at_http = format!("0.0.0.0:{http}");
    let at_grpc = format!("127.0.0.1:{}", free_port());
    let allowed = ["--fetch-allow", "images.in.file"];
    let listeners = ["up", "--http", &at_http, "--grpc", &at_grpc, "--threads", "1"];
    let mut up = container.triptych(&[&listeners[..], &allowed].concat());
    // The sample models are unpacked into the cache folder; no other folder is writable.
    let mut up = Process::spawn(up.env("XDG_CACHE_HOME", "/tmp"));
    let health = |host: &str, port: u16| {
        container.triptych(&["health", "--ready", "--http", &format!("{host}:{port}")])
    };
    eventually("the cluster is ready", async || {
        assert!(up.exited().is_none(), "`up` ended early:\n{}", up.log());
        health("127.0.0.1", http).output().is_ok_and(|o| o.status.success()).then_some(())
    })
    .await;
    for name in ["localhost", "cluster.in.file", "cluster.in.dns", "cluster"] {
        passed(&mut health(name, http));
    }
    let unknown = health("nowhere.in.dns", http).output().expect("it runs");
    assert_eq!(unknown.status.code(), Some(1));
    let line = &list("scenes.jsonl")[0];
    let field = |name: &str| line[name].as_str().expect("text");
    let mut client = connect(&format!("http://{at_grpc}")).await;
    let mut request = about_images(field("question"), vec![heldout(field("file"))]);
    request.model = "shapes-qwen2-vl".into();
    let answer = generate(&mut client, request.clone()).await.expect("an answer");
    assert_eq!(answer.text, field("answer"));
    // The same by a URL whose certificate only the container's roots verify.
    let port = serve_once("images.in.file", heldout(field("file")));
    let url = format!("https://images.in.file:{port}/scene.png");
    request.items[0].source = Some(v1::item::Source::Url(url));
    let answer = generate(&mut client, request).await.expect("an answer");
    assert_eq!(answer.text, field("answer"));
    signal(up.pid(), "TERM");
    assert!(up.wait().await.success(), "{}", up.log());
}

#[test]
fn health_on_an_empty_root_names_the_unreachable_address() {
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("loopback has ports");
    let mut container = Container::new(NAME_SERVER);
    container.variables.push(("TRIPTYCH_ADMIN".into(), closed.to_string()));
    let asked = container.triptych(&["health", "--ready"]).output().expect("it runs");
    let stderr = String::from_utf8_lossy(&asked.stderr);
    assert_eq!(asked.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&closed.to_string()), "{stderr}");
}
