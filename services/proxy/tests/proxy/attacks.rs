//! Hostile requests to the frontend: each gets a typed answer, and the proxy keeps serving.

use crate::support::{Cluster, IMAGE, ask, client, question};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::{Code, Request};
use triptych_core::item::from_f32;
use triptych_core::{DType, EncoderOutput};
use triptych_proto::v1;

const CHAT: &str = "/v1/chat/completions";

fn about(url: &str) -> Value {
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    json!({"model": "vl", "messages": [{"role": "user", "content": [part]}]})
}

#[tokio::test]
async fn no_notation_of_an_internal_address_is_fetched() {
    let cluster = Cluster::start().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let hosts = [
        "127.0.0.1",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "0x7f.0x0.0x0.0x1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0.0.0.0",
        "0",
        "127.0.0.1.",
        "localhost",
        "localhost.",
        "LOCALHOST",
        "[::]",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]",
        "example.com@127.0.0.1",
        "example.com%40@127.0.0.1",
        "example.com:80@127.0.0.1",
        "127。0。0。1",
        "127｡0｡0｡1",
        "①②⑦.⓪.⓪.①",
        "%31%32%37.0.0.1",
        "169.254.169.254",
        "[fd00:ec2::254]",
        "168.63.129.16",
        "100.100.100.200",
        "[::ffff:169.254.169.254]",
    ];
    for host in hosts {
        let url = format!("http://{host}:{port}/latest/meta-data");
        let (status, answer) = cluster.proxy.post(CHAT, &about(&url)).await;
        assert_eq!(status, 400, "{host}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        // Not every resolver knows a name with a trailing dot.
        let unknown = host.ends_with('.') && message.contains("is not known");
        assert!(message.contains("does not fetch from") || unknown, "{host}: {message}");
        let mut item = question(&[IMAGE]);
        item.items[0].source = Some(v1::item::Source::Url(url));
        let status = ask(&cluster.proxy, item).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{host}");
    }
    let connection = tokio::time::timeout(std::time::Duration::ZERO, listener.accept()).await;
    assert!(connection.is_err(), "a request reached the internal service");
}

#[tokio::test]
async fn invalid_schemes_and_hosts_are_refused() {
    let cluster = Cluster::start().await;
    for url in [
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "dict://127.0.0.1:11211/stat",
        "ftp://127.0.0.1/x",
        "unix:///var/run/docker.sock",
        "jar:http://127.0.0.1!/x",
        "http://",
        "http:///x",
        "http://[::1",
        "http://a b/",
        "http://\u{0}/",
        "//127.0.0.1/x",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:-1/",
    ] {
        let (status, answer) = cluster.proxy.post(CHAT, &about(url)).await;
        assert_eq!(status, 400, "{url}: {answer}");
    }
}

#[tokio::test]
async fn oversized_headers_and_metadata_cost_at_most_their_connection() {
    let cluster = Cluster::start().await;
    let send = async |head: Vec<u8>| {
        let mut stream = TcpStream::connect(cluster.proxy.http).await.unwrap();
        // The server may close while we still send.
        let _ = stream.write_all(&head).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    };
    let long = format!("GET /healthz HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    let many: String = (0..5000).map(|i| format!("x{i}: y\r\n")).collect();
    let many = format!("GET /healthz HTTP/1.1\r\nhost: a\r\n{many}\r\n");
    let path = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "z".repeat(1 << 20));
    for head in [long, many, path] {
        let answer = send(head.into_bytes()).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let mut request = Request::new(question(&[]));
    for i in 0..64 {
        let name = tonic::metadata::MetadataKey::from_bytes(format!("x-{i}").as_bytes()).unwrap();
        request.metadata_mut().insert(name, "y".repeat(16 << 10).parse().unwrap());
    }
    assert!(cluster.proxy.client().generate(request).await.is_err());
    assert!(ask(&cluster.proxy, question(&[])).await.is_ok());
    assert_eq!(cluster.proxy.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn hostile_json_is_refused_by_depth_and_count() {
    let cluster = Cluster::start().await;
    let post = async |body: String| {
        let response = client().post(cluster.proxy.url(CHAT)).body(body).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let deep = |open: &str, n: usize| format!("{{\"unknown\": {}", open.repeat(n));
    for (body, expect) in [
        (deep("[", 100_000), ""),
        (deep("{\"a\":", 100_000), ""),
        (format!("{{\"response_format\": {}", "{\"json_schema\":".repeat(100_000)), ""),
        (format!("{{\"messages\": [{}]}}", vec!["{\"role\":\"user\"}"; 300_000].join(",")), "values"),
        (
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": [{}]}}]}}",
                vec!["{\"type\":\"text\",\"text\":\"\"}"; 300_000].join(",")
            ),
            "values",
        ),
        (
            format!(
                "{{\"logit_bias\": {{{}}}}}",
                (0..300_000).map(|i| format!("\"{i}\":1")).collect::<Vec<_>>().join(",")
            ),
            "values",
        ),
        // One value may nest objects without a comma.
        (
            format!("{{\"tools\": [{}]}}", vec!["{\"a\":{\"a\":{\"a\":{}}}}"; 10_000].join(",")),
            "lists and objects",
        ),
        (format!("{{\"n\": {}1}}", "0".repeat(1 << 20)), ""),
        (format!("{{\"temperature\": 1{}}}", "0".repeat(1 << 20)), ""),
    ] {
        let start = &body[..40].to_owned();
        let (status, answer) = post(body).await;
        assert_eq!(status, 400, "{start}: {answer}");
        assert!(answer.contains(expect) && answer.len() < 4096, "{start}: {answer}");
    }
    let words = json!({"model": "vl", "messages": [{"role": "user", "content": ",".repeat(300_000)}]});
    assert_eq!(cluster.proxy.post(CHAT, &words).await.0, 200, "commas in a text are text");
}

/// Largest resident size of this process so far, in bytes.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// The growth of this process that a message of 32 MiB, or a body, may cause: its bytes at both ends, a few times.
const MAX_GROWTH: usize = 512 << 20;

/// Two bytes were 200 in memory: 32 MiB of empty messages took 4.7 GB before they were refused.
#[tokio::test]
async fn a_message_of_empty_lists_takes_no_memory() {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let field = |number: u32, bytes: &[u8]| {
        let mut out = Vec::new();
        encode_key(number, WireType::LengthDelimited, &mut out);
        encode_varint(bytes.len() as u64, &mut out);
        [out, bytes.to_vec()].concat()
    };
    let cluster = Cluster::start().await;
    let before = peak_bytes();
    for mib in [3, 32] {
        let n = mib << 19;
        // As field 2 of the message: its prompt.
        let prompts = [
            ("Chat.messages", field(1, &[10, 0].repeat(n))),
            ("Message.parts", field(1, &field(1, &[18, 0].repeat(n)))),
            ("TokenIds.ids", field(2, &field(2, &field(1, &vec![0; 2 * n])))),
        ];
        for (name, prompt) in prompts {
            let status = raw(&cluster, prompt).await;
            assert_eq!(status.code(), Code::InvalidArgument, "{name}: {status:?}");
            assert!(status.message().contains(name), "{name}: {status:?}");
        }
    }
    let grown = peak_bytes() - before;
    assert!(grown < MAX_GROWTH, "the peak grew by {} MiB", grown >> 20);
    assert!(ask(&cluster.proxy, question(&[])).await.is_ok());
}

/// Sends bytes as the prompt of a request.
async fn raw(cluster: &Cluster, prompt: Vec<u8>) -> tonic::Status {
    use triptych_proto::codec::BoundedCodec;
    let mut client =
        tonic::client::Grpc::new(triptych_runtime::grpc::channel(&cluster.proxy.grpc.to_string()).unwrap());
    client.ready().await.unwrap();
    // A field with the number of the prompt.
    let frame = v1::PutFrame { kind: Some(v1::put_frame::Kind::Data(prompt.into())) };
    let codec = BoundedCodec::<v1::PutFrame, v1::GenerateResponse>::default();
    let path = http::uri::PathAndQuery::from_static("/triptych.v1.Triptych/Generate");
    client.server_streaming(Request::new(frame), path, codec).await.unwrap_err()
}

/// The worst lists of a body, at the limits on its values and at ten times them.
#[tokio::test]
async fn lists_of_a_body_take_memory_within_a_bound() {
    let cluster = Cluster::start().await;
    let list = |value: &str, n: usize| format!("[{}]", vec![value; n].join(","));
    let message = |content: String| format!("[{{\"role\":\"user\",\"content\":{content}}}]");
    let before = peak_bytes();
    for scale in [1, 10] {
        let (values, containers) = (scale * 250_000, scale * 16_000);
        let bodies = [
            (CHAT, "messages", list("{}", containers)),
            (CHAT, "messages", message(list("{}", containers))),
            (CHAT, "tools", list("{\"a\":0}", containers)),
            (CHAT, "tools", list("0", values)),
            (CHAT, "stop", list("\"\"", values)),
            (CHAT, "bad_words", list("\"\"", values)),
            (CHAT, "stop_token_ids", list("0", values)),
            (CHAT, "modalities", list("\"\"", values)),
            (CHAT, "logit_bias", list("\"1\":1", values).replace('[', "{").replace(']', "}")),
            (CHAT, "structured_outputs", format!("{{\"choice\":{}}}", list("\"\"", values))),
            (
                CHAT,
                "response_format",
                format!(
                    "{{\"type\":\"json_schema\",\"json_schema\":{{\"schema\":{}}}}}",
                    list("{\"a\":0}", containers)
                ),
            ),
            ("/v1/completions", "prompt", list("[]", containers)),
            ("/v1/completions", "prompt", list("\"\"", values)),
            ("/v1/completions", "encoder_prompt", list("4294967296", values)),
            ("/v1/completions", "items", list("{}", containers)),
        ];
        for (path, field, value) in bodies {
            let body = format!("{{\"model\": \"vl\", {field:?}: {value}}}");
            let start = body[..60].to_owned();
            let response = client().post(cluster.proxy.url(path)).body(body).send().await.unwrap();
            let (status, answer) = (response.status().as_u16(), response.text().await.unwrap());
            assert_eq!(status, 400, "{path} {start}: {answer}");
            assert!(answer.len() < 4096, "{path} {start}");
        }
    }
    let grown = peak_bytes() - before;
    assert!(grown < MAX_GROWTH, "the peak grew by {} MiB", grown >> 20);
}

#[tokio::test]
async fn too_many_items_are_refused_before_any_is_read() {
    let cluster = Cluster::start().await;
    let crowd = vec![question(&[b"x"]).items[0].clone(); 10_000];
    let status =
        ask(&cluster.proxy, v1::GenerateRequest { items: crowd, ..question(&[]) }).await.unwrap_err();
    assert!(status.message().contains("10000 items"), "{status}");
    let parts = vec![json!({"type": "image_url", "image_url": {"url": "http://192.0.2.1/x"}}); 5000];
    let body = json!({"model": "vl", "messages": [{"role": "user", "content": parts}]});
    let (status, answer) = cluster.proxy.post(CHAT, &body).await;
    assert_eq!(status, 400);
    assert!(answer["error"]["message"].as_str().unwrap().contains("5000 items"), "{answer}");
    assert!(cluster.encoder.jobs().is_empty());
}

/// The content key covers bytes and options: a difference in any of them is another item with an encode of its own.
#[tokio::test]
async fn any_difference_in_bytes_or_options_gives_another_key() {
    let cluster = Cluster::start().await;
    let pixels = [7_u8; 24];
    let bmp = |width: i32, height: i32| {
        let mut bytes = b"BM".to_vec();
        bytes.extend((width * 1000 + height).to_le_bytes());
        bytes.extend(pixels);
        bytes
    };
    let images = [bmp(2, 4), bmp(4, 2), bmp(8, 1), [bmp(2, 4), vec![0]].concat(), bmp(2, 4)[1..].to_vec()];
    for image in &images {
        ask(&cluster.proxy, question(&[image])).await.unwrap();
    }
    let mut seen: Vec<_> = cluster.pd.requests().iter().map(|r| r.items[0].key.clone()).collect();
    let options = [
        v1::ItemOptions { start_ms: Some(0), ..Default::default() },
        v1::ItemOptions { start_ms: Some(1), ..Default::default() },
        v1::ItemOptions { vad: true, ..Default::default() },
        v1::ItemOptions { prompt: Some("x".into()), ..Default::default() },
    ];
    for options in options {
        let mut request = question(&[&images[0]]);
        request.items[0].options = Some(options);
        // The encoder decides which options a modality takes; the proxy makes the key.
        if ask(&cluster.proxy, request).await.is_ok() {
            seen.push(cluster.pd.requests().last().unwrap().items[0].key.clone());
        }
    }
    let n = seen.len();
    assert!(n > images.len());
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), n);
}

/// A forged object with a matching checksum can be detected with a signing key only (`ec::object`). This test covers the
/// half that needs no key: an object of another encoder's fingerprint is a miss.
#[tokio::test]
async fn an_object_with_a_foreign_fingerprint_is_a_miss() {
    let store = crate::support::memory().await;
    let cluster =
        Cluster::over(Arc::clone(&store), |config| config.encodes.believed_for = std::time::Duration::ZERO)
            .await;
    ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
    let real = cluster.pd.requests()[0].items[0].clone();
    let key = triptych_core::ContentKey::from_slice(&real.key).unwrap();
    let honest = triptych_core::EncodedItem::try_from(real).unwrap();
    let foreign = triptych_core::EncodedItem {
        fingerprint: triptych_core::Fingerprint::from_bytes([9; 32]),
        ..honest.clone()
    };
    let poisoned = EncoderOutput::seal(foreign, from_f32(&[666.0; 4], DType::F32)).unwrap();
    store.delete(&key).await.unwrap();
    store.put_if_absent(&key, triptych_ec::object::encode(&poisoned)).await.unwrap();
    let before = cluster.encoder.jobs().len();
    ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
    assert_eq!(cluster.encoder.jobs().len(), before + 1, "another encoder's object is a miss");
}
