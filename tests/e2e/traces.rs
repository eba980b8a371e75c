//! The spans of a request through all processes: kinds, parents, attributes and statuses, by OpenTelemetry's conventions.

use crate::collector::{Collector, Seen, SpanKind, StatusCode, Trace};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::signal;
use triptych_tests::samples::{ask_images, heldout};

const MODEL: &str = "shapes-qwen2-vl";
const QUESTION: &str = "What is in this picture?";
const CHAT: &str = "chat shapes-qwen2-vl";
const HTTP: &str = "POST /v1/chat/completions";
const GRPC: &str = "triptych.v1.Triptych/Generate";
const ENCODE: &str = "triptych.v1.EncoderWorker/Encode";
const DECODE: &str = "triptych.v1.PrefillDecodeWorker/Generate";
/// Attempts to kill a worker in the middle of a stream: a kill may come after the last token.
const TRIES: usize = 40;

/// A cluster with a store process, whose log is all but silent.
async fn cluster(collector: &Collector) -> Cluster {
    Cluster::start(&["--otlp", &collector.endpoint, "--log", "warn", "--ec", "memory"]).await
}

fn chat() -> Value {
    let mut body = ask_images(MODEL, QUESTION, &[&heldout("scene.png")]);
    body["max_tokens"] = 8.into();
    body["temperature"] = json!(0.7);
    // Greedy all the same, so that the answer is one that the model means.
    body["top_k"] = 1.into();
    body["seed"] = 11.into();
    body
}

/// A request that generates to the end of the context, and is not resumed.
fn endless() -> v1::GenerateRequest {
    let mut request = about_images(QUESTION, vec![heldout("scene.png")]);
    request.model = MODEL.into();
    request.resumption = v1::Resumption::Never.into();
    request.sampling =
        Some(v1::Sampling { ignore_eos: true, temperature: Some(0.0), n: Some(4), ..Default::default() });
    request
}

/// Kind, name and role of a span, and the name of its parent.
fn placed<'a>(trace: &'a Trace, span: &'a Seen) -> (SpanKind, &'a str) {
    (span.kind, trace.parent(span).map_or("", |parent| parent.name.as_str()))
}

/// Holds kinds and parents of one request's spans.
fn check_tree(trace: &Trace) {
    use SpanKind::{Client, Internal, Server};
    let expected = [
        ("proxy", CHAT, Internal, HTTP),
        ("proxy", "item", Internal, CHAT),
        ("proxy", "ec exists", Client, "item"),
        ("proxy", "ec acquire lease", Client, "item"),
        ("proxy", "ec release lease", Client, "ec hold lease until stored"),
        ("proxy", ENCODE, Client, "item"),
        ("encoder", ENCODE, Server, ENCODE),
        ("encoder", "encode", Internal, ENCODE),
        ("encoder", "preprocess", Internal, "encode"),
        ("encoder", "forward", Internal, "encode"),
        ("encoder", "publish", Internal, "encode"),
        ("proxy", DECODE, Client, CHAT),
        ("pd", DECODE, Server, DECODE),
        ("pd", "generate", Internal, DECODE),
        ("pd", "load", Internal, "generate"),
        ("pd", "decode", Internal, "generate"),
        ("pd", "ec load", Internal, "generate"),
        ("pd", "ec get", Client, "ec load"),
        ("store", "triptych.v1.EcObjects/Put", Server, "ec put"),
        ("store", "triptych.v1.EcObjects/Head", Server, "ec exists"),
    ];
    for (role, name, kind, parent) in expected {
        assert_eq!(placed(trace, trace.one(role, name)), (kind, parent), "{name} in\n{}", trace.tree());
    }
    let put = trace.one("encoder", "ec put");
    assert!(put.kind == Client && trace.around(put).any(|name| name == "publish"), "{}", trace.tree());
    for span in trace.named("store", "triptych.v1.EcObjects/Head") {
        assert_ne!(trace.parent(span).expect("a client").role(), "store");
    }
}

/// Holds attributes of one request's spans.
fn check_attributes(trace: &Trace, answer: &Value, request_id: &str) {
    let usage = &answer["usage"];
    trace.one("proxy", CHAT).has(json!({
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "triptych", "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL, "gen_ai.request.max_tokens": 8, "gen_ai.request.temperature": 0.7,
        "gen_ai.request.seed": 11, "gen_ai.request.top_k": 1, "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "gen_ai.response.id": request_id, "triptych.request.images": 1, "request_id": request_id,
    }));
    trace.one("proxy", ENCODE).has(json!({
        "rpc.system": "grpc", "rpc.service": "triptych.v1.EncoderWorker", "rpc.method": "Encode",
        "rpc.grpc.status_code": 0, "server.address": "127.0.0.1", "triptych.attempt": 0,
    }));
    trace.one("pd", DECODE).has(json!({
        "rpc.system": "grpc", "rpc.service": "triptych.v1.PrefillDecodeWorker", "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
    }));
    trace.one("proxy", "ec exists").has(json!({
        "triptych.ec.store": "grpc", "triptych.ec.outcome": "miss", "triptych.ec.hits": 0, "triptych.ec.keys": 1,
        "rpc.system": "grpc", "rpc.service": "triptych.v1.EcObjects", "server.address": "127.0.0.1",
    }));
    let put = trace.one("encoder", "ec put");
    put.has(json!({"triptych.ec.store": "grpc", "triptych.ec.outcome": "ok"}));
    assert!(put.attributes["triptych.ec.bytes"].as_i64() > Some(0), "{put:#?}");
}

/// Holds that nothing failed, and that each process has names of its own.
fn check_processes(trace: &Trace) {
    let mut instances = BTreeSet::new();
    for span in &trace.0 {
        // Who waits at a peer and at the store drops one of the calls.
        let ends_well = span.end() == (None, StatusCode::Unset) || span.name.ends_with("EcObjects/Wait");
        assert!(ends_well, "{span:#?}");
        let of = |name: &str| span.resource[name].as_str().expect(name).to_owned();
        assert!(!of("service.version").is_empty());
        assert_eq!(of("service.instance.id").len(), 36);
        instances.insert((of("service.name"), of("service.instance.id")));
    }
    assert_eq!(instances.len(), 4, "an instance for each process: {instances:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_one_trace_with_the_conventions_kinds_parents_and_attributes() {
    let collector = Collector::start().await;
    let cluster = cluster(&collector).await;
    let (trace_id, parent_id) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let response = reqwest_client()
        .post(format!("{}/v1/chat/completions?secret=query", cluster.http))
        .header("traceparent", format!("00-{trace_id}-{parent_id}-01"))
        .json(&chat())
        .send()
        .await
        .expect("the proxy answers");
    let request_id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let answer: Value = response.json().await.expect("JSON");
    let is_whole = |trace: &Trace| {
        let has = |role, name| trace.has(role, name);
        has("proxy", HTTP)
            && has("encoder", ENCODE)
            && has("pd", DECODE)
            && has("encoder", "ec put")
            && has("store", "triptych.v1.EcObjects/Put")
            && has("proxy", "ec release lease")
            && has("pd", "ec get")
    };
    let trace = collector.trace("a trace through all processes", is_whole).await;
    println!("{}", trace.tree());

    let http = trace.one("proxy", HTTP);
    assert_eq!((http.trace.as_str(), http.parent.as_str()), (trace_id, parent_id));
    assert_eq!(http.kind, SpanKind::Server);
    let (host, port) = cluster.http.trim_start_matches("http://").split_once(':').expect("a port");
    http.has(json!({
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions",
        "url.scheme": "http", "http.response.status_code": 200, "server.address": host,
        "server.port": port.parse::<u16>().expect("a number"), "network.protocol.version": "1.1",
    }));
    check_tree(&trace);
    check_attributes(&trace, &answer, &request_id);
    check_processes(&trace);
    let text: String = trace.0.iter().map(|span| format!("{:?}{}", span.attributes, span.events)).collect();
    let said = answer["choices"][0]["message"]["content"].as_str().expect("text");
    for content in [QUESTION, said, "secret=query"] {
        assert!(!text.contains(content), "{content:?} is in a span");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_has_its_class_and_is_an_error_where_it_is_one() {
    let collector = Collector::start().await;
    let cluster = cluster(&collector).await;
    let (status, _) = cluster.chat(ask_images(MODEL, QUESTION, &[b"no image at all"])).await;
    assert_eq!(status, 400);
    let trace = collector
        .trace("a refused image", |trace| trace.has("proxy", HTTP) && trace.has("encoder", ENCODE))
        .await;
    println!("{}", trace.tree());
    let (class, error) = (Some("invalid_argument"), StatusCode::Error);
    // What a client got wrong is no error of the server that tells it so.
    let http = trace.one("proxy", HTTP);
    assert_eq!(http.end(), (class, StatusCode::Unset));
    http.has(json!({"http.response.status_code": 400}));
    assert_eq!(trace.one("proxy", CHAT).end(), (class, error));
    let call = trace.one("proxy", ENCODE);
    assert_eq!(call.end(), (class, error));
    call.has(json!({"rpc.grpc.status_code": 3}));
    let served = trace.one("encoder", ENCODE);
    assert_eq!(served.end(), (class, StatusCode::Unset));
    served.has(json!({"rpc.grpc.status_code": 3}));
    assert_eq!(trace.one("encoder", "encode").end(), (class, error));

    let (status, _) = cluster.chat(json!({"model": MODEL, "messages": 7})).await;
    assert_eq!(status, 400);
    let is_alone = |trace: &Trace| trace.has("proxy", HTTP) && !trace.has("proxy", CHAT);
    let trace = collector.trace("a malformed body", is_alone).await;
    assert_eq!(trace.one("proxy", HTTP).end(), (class, StatusCode::Unset));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_fails_in_the_middle_is_an_error_over_grpc_and_http() {
    let collector = Collector::start().await;
    let mut cluster = cluster(&collector).await;
    let mut client = connect(&cluster.grpc).await;
    let mut n_failed = 0;
    for _ in 0..TRIES {
        let pd = cluster.pid("pd");
        let mut stream = client.generate(endless()).await.expect("accepted").into_inner();
        let mut killed = false;
        let end = loop {
            match stream.message().await {
                Ok(Some(message)) if matches!(message.kind, Some(Kind::Delta(_))) && !killed => {
                    killed = true;
                    signal(pd, "KILL");
                }
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        cluster.wait_replaced("pd", pd).await;
        n_failed += usize::from(end.is_err());
        if n_failed > 0 {
            break;
        }
    }
    assert!(n_failed > 0, "no kill came in the middle of a stream");
    let has_failed = |name: &'static str| {
        move |trace: &Trace| {
            trace.named("proxy", name).any(|span| span.end().0 == Some("unavailable"))
                && trace.has("proxy", CHAT)
        }
    };
    let trace = collector.trace("a failed call", has_failed(GRPC)).await;
    println!("{}", trace.tree());
    let (class, error) = (Some("unavailable"), StatusCode::Error);
    assert_eq!(trace.one("proxy", GRPC).kind, SpanKind::Server);
    assert_eq!(trace.one("proxy", GRPC).end(), (class, error));
    trace.one("proxy", GRPC).has(json!({"rpc.grpc.status_code": 14}));
    assert_eq!(trace.one("proxy", CHAT).end(), (class, error));
    assert_eq!(trace.one("proxy", DECODE).end(), (class, error));
    let written = trace.one("proxy", CHAT).attributes["gen_ai.usage.output_tokens"].as_i64();
    assert!(written > Some(0), "what was written is counted: {written:?}");

    let mut body = chat();
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    body["n"] = 4.into();
    body.as_object_mut().expect("an object").remove("max_tokens");
    for _ in 0..TRIES {
        let pd = cluster.pid("pd");
        let request = reqwest_client().post(format!("{}/v1/chat/completions", cluster.http));
        let mut response =
            request.header("x-triptych-resume", "never").json(&body).send().await.expect("an answer");
        assert_eq!(response.status().as_u16(), 200);
        let mut text = String::new();
        while let Some(piece) = response.chunk().await.expect("a whole stream") {
            if text.is_empty() {
                signal(pd, "KILL");
            }
            text.push_str(&String::from_utf8_lossy(&piece));
        }
        cluster.wait_replaced("pd", pd).await;
        if text.contains("\"error\"") {
            break;
        }
    }
    let trace = collector.trace("a failed HTTP stream", has_failed(HTTP)).await;
    let http = trace.one("proxy", HTTP);
    assert_eq!(http.end(), (class, error));
    http.has(json!({"http.response.status_code": 200}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_client_goes_away_is_cancelled_and_no_error() {
    let collector = Collector::start().await;
    let cluster = cluster(&collector).await;
    let mut client = connect(&cluster.grpc).await;
    let mut stream = client.generate(endless()).await.expect("accepted").into_inner();
    while !matches!(stream.message().await.expect("a piece").and_then(|m| m.kind), Some(Kind::Delta(_))) {}
    drop(stream);
    let trace = collector
        .trace("a cancelled call", |trace| {
            trace.has("proxy", GRPC) && trace.has("proxy", CHAT) && trace.has("pd", DECODE)
        })
        .await;
    for (role, name) in [("proxy", GRPC), ("proxy", CHAT), ("pd", DECODE), ("pd", "generate")] {
        assert_eq!(trace.one(role, name).end(), (Some("cancelled"), StatusCode::Unset), "{name}");
    }
    trace.one("proxy", GRPC).has(json!({"rpc.grpc.status_code": 1}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_shows_a_miss_and_a_hit_and_what_it_moved() {
    let collector = Collector::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let store = format!("disk:{}", dir.path().display());
    for (outcome, hits) in [("miss", 0), ("ok", 1)] {
        let cluster = Cluster::start(&["--ec", &store, "--otlp", &collector.endpoint]).await;
        let mut client = connect(&cluster.grpc).await;
        let mut request = about_images(QUESTION, vec![heldout("scene.png")]);
        request.model = MODEL.into();
        let answer = generate(&mut client, request).await.expect("an answer");
        let is_it = |trace: &Trace| {
            let is_mine = |span: &Seen| span.attributes.get("request_id") == Some(&json!(answer.request_id));
            trace.named("proxy", CHAT).any(is_mine)
                && trace.has("pd", DECODE)
                && trace.has("pd", "ec get")
                && trace.has("proxy", "ec exists")
                && (hits > 0 || trace.has("encoder", "ec put"))
        };
        let trace = collector.trace("the request", is_it).await;
        let looked = trace.one("proxy", "ec exists");
        assert_eq!(looked.kind, SpanKind::Internal, "no other process");
        looked.has(
            json!({"triptych.ec.store": "disk", "triptych.ec.outcome": outcome, "triptych.ec.hits": hits}),
        );
        let key = looked.attributes["triptych.item"].as_str().expect("a short key");
        assert_eq!(key.len(), 12);
        if hits == 0 {
            trace.one("encoder", "ec put").has(json!({"triptych.ec.outcome": "ok", "triptych.item": key}));
        } else {
            assert!(!trace.has("proxy", ENCODE), "{}", trace.tree());
            let got = trace.one("pd", "ec get");
            got.has(json!({"triptych.ec.store": "disk", "triptych.ec.outcome": "ok", "triptych.item": key}));
            assert!(got.attributes["triptych.ec.bytes"].as_i64() > Some(0), "{got:#?}");
        }
        let folder = dir.path().display().to_string();
        assert!(!format!("{:?}", trace.0).contains(&folder), "where the store is, is the operator's");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_and_watches_are_no_traces() {
    let collector = Collector::start().await;
    let cluster = cluster(&collector).await;
    for path in ["healthz", "readyz", "metrics", "health"] {
        let response = reqwest_client().get(format!("{}/{path}", cluster.http)).send().await;
        assert!(response.expect("an answer").status().is_success());
    }
    let models = reqwest_client().get(format!("{}/v1/models", cluster.http)).send().await;
    assert!(models.expect("an answer").status().is_success());
    collector.trace("the list of models", |trace| trace.has("proxy", "GET /v1/models")).await;
    let names: BTreeSet<_> = collector.all().0.into_iter().map(|span| span.name).collect();
    // `up` asks for the models when it says that it is ready.
    let calls = ["GET /v1/models", "triptych.v1.Triptych/ListModels"].map(str::to_owned);
    assert!(names.is_subset(&calls.into()), "{names:?}");
}
