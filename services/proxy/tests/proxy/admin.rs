//! The admin API: requests are found and ended, workers drained, limits changed, caches reset; and who may.

use crate::fakes::{GenerateStep, Pd, hello};
use crate::support::{Cluster, IMAGE, ask, client, eventually, listener, memory, models, question};
use serde_json::{Value, json};
use std::net::SocketAddr;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proxy::{AdminToken, RequestBounds};

/// A cluster with an admin port.
struct Administered {
    cluster: Cluster,
    admin: SocketAddr,
}

async fn administered(token: Option<&str>) -> Administered {
    let dir = tempfile::tempdir().unwrap();
    let token = token.map(|token| {
        let path = dir.path().join("token");
        std::fs::write(&path, token).unwrap();
        AdminToken::read(&path).unwrap()
    });
    let listener = listener().await;
    let admin = listener.local_addr().unwrap();
    let cluster = Cluster::with(|config| {
        config.admin = Some(listener);
        config.admin_token = token;
    })
    .await;
    Administered { cluster, admin }
}

impl Administered {
    fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        client().request(method.parse().unwrap(), format!("http://{}/admin/{path}", self.admin))
    }

    /// Status and JSON of an answer; `null` for an empty one.
    async fn call(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let answer = self.request(method, path).body(body.to_owned()).send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() })
    }
}

#[tokio::test]
async fn a_request_is_found_by_its_id_and_ended() {
    let administered = administered(None).await;
    let Cluster { pd, proxy, pd_process, .. } = &administered.cluster;
    pd.script([GenerateStep::SendThenHold(vec![hello().remove(0)])]);
    let mut stream = proxy.client().generate(question(&[IMAGE])).await.unwrap().into_inner();
    let mut id = String::new();
    loop {
        match stream.message().await.unwrap().unwrap().kind {
            Some(Kind::Accepted(accepted)) => id = accepted.request_id,
            Some(Kind::Delta(_)) => break,
            other => panic!("{other:?}"),
        }
    }
    let (status, found) = administered.call("GET", &format!("requests/{id}"), "").await;
    assert_eq!(status, 200);
    assert_eq!(
        (&found["state"], &found["model"], &found["items"]),
        (&json!("decode"), &json!("vl"), &json!(1))
    );
    assert_eq!(found["pd_worker"], json!(format!("pd@{}", pd_process.address)));
    let (_, all) = administered.call("GET", "requests", "").await;
    assert_eq!(all["requests"].as_array().unwrap().len(), 1);
    let (status, _) = administered.call("DELETE", &format!("requests/{id}"), "").await;
    assert_eq!(status, 204);
    let e = stream.message().await.unwrap_err();
    assert!(e.code() == tonic::Code::Cancelled && e.message().contains("operator"), "{e:?}");
    eventually("it has ended", async || {
        administered.call("GET", &format!("requests/{id}"), "").await.1["outcome"] == "cancelled"
    })
    .await;
    let (status, e) = administered.call("DELETE", &format!("requests/{id}"), "").await;
    assert!(status == 404 && e["error"]["code"] == "not_found", "{e}");
    assert_eq!(administered.call("GET", "requests/nonsense", "").await.0, 404);
}

#[tokio::test]
async fn a_drained_worker_gets_nothing_new_until_it_is_resumed() {
    let administered = administered(None).await;
    let Cluster { pd_process, proxy, .. } = &administered.cluster;
    let id = format!("pd@{}", pd_process.address);
    let (_, workers) = administered.call("GET", "workers", "").await;
    let of = |workers: &Value| {
        workers["workers"].as_array().unwrap().iter().find(|w| w["id"] == *id).cloned().unwrap()
    };
    assert_eq!((&of(&workers)["health"], &of(&workers)["drained"]), (&json!("ready"), &json!(false)));
    assert_eq!(of(&workers)["models"].as_array().unwrap().len(), 2);
    assert_eq!(administered.call("POST", &format!("workers/{id}/drain"), "").await.0, 204);
    let (_, workers) = administered.call("GET", "workers", "").await;
    assert_eq!((&of(&workers)["health"], &of(&workers)["drained"]), (&json!("draining"), &json!(true)));
    let body = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(proxy.get("/readyz").await.0, 503, "its only PD worker takes nothing");
    assert_eq!(administered.call("DELETE", &format!("workers/{id}/drain"), "").await.0, 204);
    proxy.ready().await;
    assert_eq!(proxy.post("/v1/chat/completions", &body).await.0, 200);
    for (method, path, body) in [("POST", "drain", ""), ("PUT", "role", r#"{"role":"pd"}"#)] {
        let (status, e) = administered.call(method, &format!("workers/pd@nobody:1/{path}"), body).await;
        assert!(status == 404 && e["error"]["message"].as_str().unwrap().contains(&id), "{e}");
    }
    // One that holds a decoder alone has no other role.
    for (role, expect) in [("encoder", "--with-encoder"), ("prefill", "both, encoder and pd")] {
        let body = json!({ "role": role }).to_string();
        let (status, e) = administered.call("PUT", &format!("workers/{id}/role"), &body).await;
        assert!(status == 400 && e["error"]["message"].as_str().unwrap().contains(expect), "{e}");
    }
}

#[tokio::test]
async fn limits_change_while_requests_run() {
    let administered = administered(None).await;
    let proxy = &administered.cluster.proxy;
    let (_, limits) = administered.call("GET", "limits", "").await;
    assert_eq!((&limits["max_in_flight"], &limits["tenant_in_flight"]), (&json!(64), &json!(0)));
    administered.cluster.pd.script([GenerateStep::SendThenHold(vec![hello().remove(0)])]);
    let mut held = proxy.client().generate(question(&[])).await.unwrap().into_inner();
    while !matches!(held.message().await.unwrap().unwrap().kind, Some(Kind::Delta(_))) {}
    let (status, limits) =
        administered.call("PATCH", "limits", r#"{"max_in_flight": 1, "encode_slo_ms": 9}"#).await;
    assert_eq!((status, &limits["in_flight"], &limits["encode_slo_ms"]), (200, &json!(1), &json!(9)));
    assert_eq!(ask(proxy, question(&[])).await.unwrap_err().code(), tonic::Code::ResourceExhausted);
    administered.call("PATCH", "limits", r#"{"max_in_flight": 2, "tenant_requests_per_s": 1}"#).await;
    ask(proxy, question(&[])).await.unwrap();
    let e = ask(proxy, question(&[])).await.unwrap_err();
    assert!(e.message().contains("1 requests a second"), "{e:?}");
    for wrong in [r#"{"max_in_flight": 0}"#, r#"{"max_inflight": 1}"#, "[", r#"{"tenant_body_mib": -1}"#] {
        let (status, e) = administered.call("PATCH", "limits", wrong).await;
        assert!(status == 400 && !e["error"]["message"].as_str().unwrap().is_empty(), "{wrong}: {e}");
    }
}

#[tokio::test]
async fn a_tenant_s_reset_makes_its_outputs_unfindable_and_no_other_s() {
    let administered = administered(None).await;
    let (proxy, encoder) = (&administered.cluster.proxy, &administered.cluster.encoder);
    let of = |tenant: &str| v1::GenerateRequest { tenant: tenant.into(), ..question(&[IMAGE]) };
    for tenant in ["a", "b", "a", "b"] {
        ask(proxy, of(tenant)).await.unwrap();
    }
    assert_eq!(encoder.jobs().len(), 2, "one for each tenant");
    let (status, begun) = administered.call("POST", "caches/reset", r#"{"tenant": "a"}"#).await;
    assert!(status == 200 && begun["generation"].as_str().unwrap().len() == 16, "{begun}");
    for tenant in ["a", "b", "a"] {
        ask(proxy, of(tenant)).await.unwrap();
    }
    assert_eq!(encoder.jobs().len(), 3, "tenant a's is encoded once more");
    assert_eq!(
        administered.call("POST", "caches/reset", r#"{"tenant": "a", "generation": ""}"#).await.0,
        400
    );
    assert_eq!(administered.call("DELETE", "caches/encoder/00", "").await.0, 400);
    let unknown = format!("caches/encoder/{}", "0".repeat(64));
    assert_eq!(administered.call("DELETE", &unknown, "").await.0, 404);
}

#[tokio::test]
async fn the_token_opens_every_route_and_nothing_else_does() {
    let administered = administered(Some("a-token-of-an-operator")).await;
    for (method, path) in [("GET", "workers"), ("GET", "requests"), ("PATCH", "limits"), ("PUT", "log")] {
        assert_eq!(administered.call(method, path, "{}").await.0, 401, "{method} {path}");
        let wrong =
            administered.request(method, path).bearer_auth("a-token-of-somebody").send().await.unwrap();
        assert_eq!(wrong.status(), 401);
    }
    let right =
        administered.request("GET", "workers").bearer_auth("a-token-of-an-operator").send().await.unwrap();
    assert_eq!(right.status(), 200);
    let probe = client().get(format!("http://{}/healthz", administered.admin)).send().await.unwrap();
    assert_eq!(probe.status(), 200, "probes need no token");
    assert_eq!(administered.cluster.proxy.get("/admin/workers").await.0, 404, "not on the public port");
}

#[tokio::test]
async fn a_page_of_the_web_and_a_port_for_others_are_refused_without_a_token() {
    let administered = administered(None).await;
    let from_page = administered.request("POST", "caches/reset").header("origin", "http://127.0.0.1");
    assert_eq!(from_page.send().await.unwrap().status(), 403);
    let rebound = administered.request("GET", "requests").header("host", "rebound.example");
    assert_eq!(rebound.send().await.unwrap().status(), 403);
    let open = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = open.local_addr().unwrap().port();
    let store = memory().await;
    let pd = Pd::new(models()).serve();
    let _proxy =
        crate::support::Proxy::start(&[], &[pd.address], store, |config| config.admin = Some(open)).await;
    eventually("it answers", async || {
        let url = format!("http://127.0.0.1:{port}/admin/workers");
        client().get(url).send().await.is_ok_and(|answer| answer.status() == 403)
    })
    .await;
}

#[tokio::test]
async fn usage_is_counted_by_tenant_and_written_under_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage.jsonl");
    let log = path.clone();
    let cluster = Cluster::with(move |config| config.accounting_log = Some(log)).await;
    for tenant in ["acme", "acme", "other"] {
        let request = v1::GenerateRequest { tenant: tenant.into(), ..question(&[IMAGE]) };
        ask(&cluster.proxy, request).await.unwrap();
    }
    let lines = || {
        let text = std::fs::read_to_string(&path).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>()
    };
    eventually("three lines", async || lines().len() == 3).await;
    let of_acme: Vec<_> = lines().into_iter().filter(|line| line["tenant"] == "acme").collect();
    assert_eq!(of_acme.len(), 2);
    assert_eq!(
        (&of_acme[0]["outcome"], &of_acme[0]["items"], &of_acme[0]["model"]),
        (&json!("ok"), &json!(1), &json!("vl"))
    );
    let encoded: u64 = of_acme.iter().map(|line| line["encoded_items"].as_u64().unwrap()).sum();
    assert_eq!(encoded, 1, "the second is cached");
    let (_, metrics) = cluster.proxy.get("/metrics").await;
    let counted = metrics.lines().filter(|line| line.starts_with("triptych_tenant_requests_total"));
    assert_eq!(counted.filter(|line| line.contains("outcome=\"ok\"") && line.ends_with(" 2")).count(), 1);
    assert!(!metrics.contains("acme"), "a tenant is a hash there");
}

#[tokio::test]
async fn settings_over_the_bounds_of_the_proxy_are_refused_by_name() {
    let bounds = RequestBounds { n: 2, beams: 3, stops: 1, ..RequestBounds::default() };
    let cluster = Cluster::with(|config| config.bounds = bounds).await;
    let ask = async |more: Value| {
        let mut body = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        cluster.proxy.post("/v1/chat/completions", &body).await
    };
    for (more, param) in [
        (json!({"n": 3}), "n"),
        (json!({"num_beams": 4}), "num_beams"),
        (json!({"stop": ["a", "b"]}), "stop"),
    ] {
        let (status, e) = ask(more.clone()).await;
        assert!(status == 400 && e["error"]["param"] == param, "{more}: {e}");
    }
    assert_eq!(ask(json!({"n": 1, "stop": ["a"]})).await.0, 200);
}

#[tokio::test]
async fn the_status_page_is_whole_and_may_reach_nobody_else() {
    let cluster = Cluster::start().await;
    let answer = client().get(cluster.proxy.url("/")).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"), "{policy}");
    assert!(answer.text().await.unwrap().starts_with("<!doctype html>"));
}
