//! Clients that are slow or send too much, over plain sockets.

use crate::support::{Cluster, client};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use triptych_core::limits::Limits;
use triptych_proxy::ClientTimes;

/// Sends bytes, and reads until the server closes.
async fn exchange(address: SocketAddr, send: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(send).await.unwrap();
    let mut answer = Vec::new();
    // A reset after the answer loses nothing.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

fn head(path: &str, headers: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: a\r\n{headers}\r\n\r\n").into_bytes()
}

const CHAT: &str = "/v1/chat/completions";
const SPEECH: &str = "/v1/audio/transcriptions";

#[tokio::test]
async fn a_declared_gigabyte_is_refused_before_it_is_sent() {
    let cluster = Cluster::start().await;
    for (path, headers) in [
        (CHAT, "content-length: 1073741824"),
        (SPEECH, "content-length: 1073741824\r\ncontent-type: multipart/form-data; boundary=x"),
    ] {
        let answer = exchange(cluster.proxy.http, &head(path, headers)).await;
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains("1073741824 bytes or more, the limit is 67108864"), "{answer}");
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
    }
}

#[tokio::test]
async fn an_endless_body_is_refused_at_the_limit_and_the_sender_reads_the_error() {
    let limits = Limits { max_body_bytes: 100_000, ..Limits::default() };
    let cluster = Cluster::with(|config| config.limits = limits).await;
    // Sends all of it before it reads: a connection that closes too soon would lose the answer.
    let chunk = format!("{:x}\r\n{}\r\n", 4096, "a".repeat(4096));
    let mut body = head(CHAT, "transfer-encoding: chunked");
    for _ in 0..500 {
        body.extend_from_slice(chunk.as_bytes());
    }
    let answer = exchange(cluster.proxy.http, &body).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("the limit is 100000"), "{answer}");
}

#[tokio::test]
async fn slow_clients_are_cut_off() {
    let times = ClientTimes { head: Duration::from_millis(300), body_idle: Duration::from_millis(300) };
    let cluster = Cluster::with(|config| config.client_times = times).await;
    let http = cluster.proxy.http;
    // Nothing, half a head, a head that never ends: the connection closes without an answer.
    for start in ["", "POST /v1/chat", "GET /healthz HTTP/1.1\r\nhost: a\r\n"] {
        assert_eq!(exchange(http, start.as_bytes()).await, "");
    }
    // Half a body: the answer names the timeout.
    for (path, headers) in [
        (CHAT, "content-length: 100"),
        (SPEECH, "content-length: 100\r\ncontent-type: multipart/form-data; boundary=x"),
    ] {
        let mut half = head(path, headers);
        half.extend_from_slice(b"{\"mod");
        let answer = exchange(http, &half).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert!(answer.contains("did not arrive in time"), "{answer}");
    }
    // gRPC: nothing, and half a preface. The server may send its settings before it closes.
    for start in ["", "PRI * HTTP/2.0"] {
        exchange(cluster.proxy.grpc, start.as_bytes()).await;
    }
    assert_eq!(cluster.proxy.get("/healthz").await, (200, "ok\n".into()));
    assert!(crate::support::ask(&cluster.proxy, crate::support::question(&[])).await.is_ok());
}

#[tokio::test]
async fn an_overloaded_proxy_answers_with_retry_after() {
    let cluster = Cluster::with(|config| config.max_in_flight = 1).await;
    cluster.pd.script([crate::fakes::GenerateStep::SendThenHold(vec![])]);
    let mut running =
        cluster.proxy.client().generate(crate::support::question(&[])).await.unwrap().into_inner();
    assert_eq!(cluster.proxy.metric("triptych_requests_running{}").await, 1.0);
    let body = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
    let response = client().post(cluster.proxy.url(CHAT)).json(&body).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (429, &"1".parse().unwrap())
    );
    let answer: serde_json::Value = response.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "overloaded");
    let status = cluster.proxy.client().generate(crate::support::question(&[])).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    cluster.pd.release(1);
    while running.message().await.unwrap().is_some() {}
    crate::support::eventually("the permit is free", async || {
        cluster.proxy.metric("triptych_requests_running{}").await == 0.0
    })
    .await;
    assert_eq!(cluster.proxy.post(CHAT, &body).await.0, 200);
}

/// Of eight places seven are for requests with images: those that wait for an encoder do not keep out text.
#[tokio::test]
async fn a_queue_of_images_leaves_room_for_text() {
    let cluster = Cluster::with(|config| config.max_in_flight = 8).await;
    cluster.encoder.script((0..7).map(|_| crate::fakes::EncodeStep::Hold));
    let proxy = &cluster.proxy;
    let image = |i: u8| crate::support::question(&[&[i; 100]]);
    let text = async || crate::support::ask(proxy, crate::support::question(&[])).await;
    let running = async || proxy.metric("triptych_requests_running{}").await;
    let waiting = futures::future::join_all((0..7).map(|i| crate::support::ask(proxy, image(i))));
    let others = async {
        crate::support::eventually("seven wait", async || running().await == 7.0).await;
        let refused = crate::support::ask(proxy, image(7)).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("7 requests"), "{refused}");
        assert!(text().await.is_ok());
        let body = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
        assert_eq!(proxy.post(CHAT, &body).await.0, 200);
        cluster.encoder.release(7);
    };
    let (answers, ()) = futures::join!(waiting, others);
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert!(crate::support::ask(proxy, image(7)).await.is_ok());
}

/// So do uploads: a body is known to have items by its declared length, or by what came of it.
#[tokio::test]
async fn slow_uploads_leave_room_for_text() {
    let cluster = Cluster::with(|config| config.max_in_flight = 8).await;
    let proxy = &cluster.proxy;
    let running = async || proxy.metric("triptych_requests_running{}").await;
    let large = head(CHAT, "content-length: 2000000");
    let mut uploads = Vec::new();
    for n in 1..=7 {
        let mut upload = TcpStream::connect(proxy.http).await.unwrap();
        upload.write_all(&large).await.unwrap();
        uploads.push(upload);
        crate::support::eventually("its body is awaited", async || running().await == f64::from(n)).await;
    }
    assert!(exchange(proxy.http, &large).await.starts_with("HTTP/1.1 429 "));
    let mut undeclared = head(CHAT, "transfer-encoding: chunked");
    undeclared.extend_from_slice(b"180000\r\n");
    undeclared.resize(undeclared.len() + 0x18_0000, b' ');
    assert!(exchange(proxy.http, &undeclared).await.starts_with("HTTP/1.1 429 "));
    let body = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(proxy.post(CHAT, &body).await.0, 200);
}

#[tokio::test]
async fn an_http_client_that_goes_away_ends_its_request() {
    let cluster = Cluster::start().await;
    cluster.pd.script([crate::fakes::GenerateStep::SendThenHold(vec![])]);
    let body = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let mut stream = TcpStream::connect(cluster.proxy.http).await.unwrap();
    stream.write_all(&head(CHAT, &format!("content-length: {}", body.len()))).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    crate::support::eventually("the request is under way", async || cluster.pd.requests().len() == 1).await;
    drop(stream);
    let cancelled = "triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}";
    crate::support::eventually("it is over", async || cluster.proxy.metric(cancelled).await == 1.0).await;
}
