//! Operation: models, probes, health, reflection, metrics, shutdown.

use crate::fakes::{GenerateStep, Pd, hello};
use crate::support::{Cluster, Proxy, ask, eventually, memory, models, question};
use serde_json::{Value, json};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use triptych_proto::v1;
use triptych_runtime::grpc;

#[tokio::test]
async fn models_are_listed_over_http_and_grpc() {
    let cluster = Cluster::start().await;
    let (_, list) = cluster.proxy.get("/v1/models").await;
    let list: Value = serde_json::from_str(&list).unwrap();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!((&list["object"], ids), (&json!("list"), vec!["asr", "vl"]));
    let (_, one) = cluster.proxy.get("/v1/models/vl").await;
    let one: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(
        (&one["object"], &one["created"], &one["modalities"]),
        (&json!("model"), &json!(1_700_000_000), &json!(["image"]))
    );
    let listed =
        cluster.proxy.client().list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((listed[0].name.as_str(), listed[0].max_context), ("asr", 4096));
    assert_eq!(listed[1].modalities().collect::<Vec<_>>(), [v1::Modality::Image]);
}

async fn health(proxy: &Proxy, service: &str) -> ServingStatus {
    let mut client = HealthClient::new(grpc::channel(&proxy.grpc.to_string()).unwrap());
    let request = HealthCheckRequest { service: service.into() };
    client.check(request).await.unwrap().into_inner().status()
}

#[tokio::test]
async fn readiness_follows_the_workers() {
    let pd = Pd::new(models());
    let process = pd.serve();
    // Without an encoder the proxy is not ready; text is answered.
    let proxy = Proxy::start(&[], &[process.address], memory().await, |_| {}).await;
    eventually("the PD worker is known", async || ask(&proxy, question(&[])).await.is_ok()).await;
    assert_eq!(proxy.get("/readyz").await.0, 503);
    for live in ["/healthz", "/health"] {
        assert_eq!(proxy.get(live).await, (200, "ok\n".into()), "{live}");
    }
    assert_eq!(health(&proxy, "triptych.v1.Triptych").await, ServingStatus::NotServing);

    let cluster = Cluster::start().await;
    for service in ["", "triptych.v1.Triptych"] {
        eventually("health is SERVING", async || {
            health(&cluster.proxy, service).await == ServingStatus::Serving
        })
        .await;
    }
}

#[tokio::test]
async fn metrics_have_the_documented_names() {
    let cluster = Cluster::start().await;
    ask(&cluster.proxy, question(&[b"image"])).await.unwrap();
    let _ = cluster.proxy.post("/v1/chat/completions", &json!({})).await;
    let (_, text) = cluster.proxy.get("/metrics").await;
    for line in [
        "triptych_requests_total{model=\"vl\",outcome=\"ok\"} 1",
        "triptych_requests_total{model=\"\",outcome=\"invalid_argument\"} 1",
        "triptych_requests_running{} 0",
        "triptych_time_to_first_token_seconds_count{model=\"vl\"} 1",
        "triptych_time_per_output_token_seconds_count{model=\"vl\"} 1",
        "triptych_e2e_request_latency_seconds_count{model=\"vl\"} 1",
        "triptych_prompt_tokens_total{model=\"vl\"} 7",
        "triptych_generation_tokens_total{model=\"vl\"} 2",
        "triptych_item_source_total{source=\"encoded\",modality=\"image\"} 1",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}

#[tokio::test]
async fn shutdown_finishes_running_streams_and_refuses_new_ones() {
    let cluster = Cluster::start().await;
    let Cluster { proxy, pd, .. } = cluster;
    pd.script([GenerateStep::SendThenHold(vec![]), GenerateStep::SendThenHold(vec![hello().remove(0)])]);
    let mut grpc = proxy.client().generate(question(&[])).await.unwrap().into_inner();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    eventually("the first request is at the worker", async || pd.requests().len() == 1).await;
    let mut http =
        crate::support::client().post(proxy.url("/v1/chat/completions")).json(&body).send().await.unwrap();
    assert!(http.chunk().await.unwrap().is_some());
    proxy.drain.begin();
    eventually("the listener is closed", async || tokio::net::TcpStream::connect(proxy.http).await.is_err())
        .await;
    assert!(!proxy.running.is_finished());
    pd.release(2);
    let mut kinds = Vec::new();
    while let Some(message) = grpc.message().await.unwrap() {
        kinds.push(message.kind.unwrap());
    }
    assert!(matches!(kinds.last(), Some(v1::generate_response::Kind::Summary(_))));
    let mut rest = String::new();
    while let Some(piece) = http.chunk().await.unwrap() {
        rest += std::str::from_utf8(&piece).unwrap();
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    drop((grpc, http));
    proxy.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn reflection_lists_what_is_served_in_both_versions() {
    let cluster = Cluster::start().await;
    // `ServerReflectionRequest { list_services: "" }` in a gRPC frame, and "*": tools send either.
    let frame = [0, 0, 0, 0, 3, 0x3a, 1, b'*'];
    for version in ["v1", "v1alpha"] {
        let http = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
        let path = format!("grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        let request = http.post(format!("http://{}/{path}", cluster.proxy.grpc)).body(frame.to_vec());
        let response =
            request.header("content-type", "application/grpc").header("te", "trailers").send().await.unwrap();
        let body = String::from_utf8_lossy(&response.bytes().await.unwrap()).into_owned();
        let reflection = format!("grpc.reflection.{version}.ServerReflection");
        for service in ["triptych.v1.Triptych", "grpc.health.v1.Health", &reflection] {
            assert!(body.contains(service), "{version}: {body}");
        }
        // The schema has them; a proxy does not answer them.
        for other in ["EncoderWorker", "PrefillDecodeWorker", "EcObjects"] {
            assert!(!body.contains(other), "{version}: {body}");
        }
    }
}
