//! The request log: one line for each request of either API, with facts and without content.

use crate::fakes::{GenerateStep, hello};
use crate::support::{Cluster, IMAGE, ask, client, eventually, question};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber};
use triptych_core::{Failure, FailureClass};
use triptych_proxy::RequestLog;
use triptych_runtime::status::to_status;
use triptych_runtime::trace_context::REQUEST_TARGET;

/// Fields of a line.
type Line = BTreeMap<String, String>;

/// Collects the lines of the request log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<Line>>>);

impl Lines {
    /// Collects on this thread, on which the proxy of a test runs.
    fn collect() -> (Self, DefaultGuard) {
        let lines = Self::default();
        let guard = tracing::subscriber::set_default(lines.clone());
        (lines, guard)
    }

    fn all(&self) -> Vec<Line> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until there are `n` lines.
    async fn wait_for(&self, n: usize) -> Vec<Line> {
        eventually("the lines are written", async || self.all().len() >= n).await;
        self.all()
    }
}

struct Fields<'a>(&'a mut Line);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == REQUEST_TARGET
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::new();
        event.record(&mut Fields(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[track_caller]
fn has(line: &Line, expect: &[(&str, &str)]) {
    for (name, value) in expect {
        assert_eq!(line.get(*name).map(String::as_str), Some(*value), "{name} of {line:?}");
    }
}

#[tokio::test]
async fn a_request_of_either_api_has_a_line_with_its_facts() {
    let (lines, _guard) = Lines::collect();
    let cluster = Cluster::with(|config| config.request_log = RequestLog::All).await;
    let mut named = question(&[IMAGE]);
    named.tenant = "acme".into();
    ask(&cluster.proxy, named).await.unwrap();
    let facts = [("model", "vl"), ("outcome", "ok"), ("finish_reason", "stop"), ("retries", "0")];
    let tokens = [("prompt_tokens", "7"), ("completion_tokens", "2"), ("cached_tokens", "0")];
    let line = &lines.wait_for(1).await[0];
    has(line, &facts);
    has(line, &tokens);
    has(line, &[("api", "grpc"), ("images", "1"), ("audio", "0"), ("cached_items", "0")]);
    assert!(line["pd_worker"].starts_with("pd@127.0.0.1:"), "{line:?}");
    assert_eq!(line["tenant"].len(), 16);
    for time in ["queue_ms", "encode_ms", "load_ms", "prefill_ms", "ttft_ms", "e2e_ms"] {
        assert!(line[time].parse::<f64>().unwrap() >= 0.0, "{time}");
    }
    assert!(!line.contains_key("http_status"));

    let body = json!({"model": "vl", "messages": [{"role": "user", "content": "a secret question"}]});
    let response = client().post(cluster.proxy.url("/v1/chat/completions")).json(&body).send().await.unwrap();
    let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    let line = &lines.wait_for(2).await[1];
    has(line, &facts);
    has(line, &tokens);
    has(line, &[("api", "http"), ("http_status", "200"), ("images", "0"), ("request_id", &id)]);
    let away = to_status(&Failure::unavailable("restarting"));
    cluster.pd.script([GenerateStep::Fail(away), GenerateStep::Send(hello())]);
    ask(&cluster.proxy, question(&[])).await.unwrap();
    has(&lines.wait_for(3).await[2], &[("outcome", "ok"), ("retries", "1")]);
    let text = format!("{:?}", lines.all());
    for content in ["acme", "secret", "what is it", "hello", "world", "pixels"] {
        assert!(!text.contains(content), "{content:?} is in {text}");
    }
}

#[tokio::test]
async fn failures_have_their_outcome() {
    let (lines, _guard) = Lines::collect();
    let cluster = Cluster::with(|config| config.request_log = RequestLog::Errors).await;
    let http = client();
    let post = |body: &'static str| http.post(cluster.proxy.url("/v1/chat/completions")).body(body).send();
    let hi = r#"{"model": "vl", "messages": [{"role": "user", "content": "hi"}]}"#;
    post(hi).await.unwrap();
    assert!(lines.all().is_empty(), "what ends well is no error: {:?}", lines.all());

    // Refused before a model was chosen, refused by the choice of one, failed on the PD worker.
    let refused = post("[]").await.unwrap();
    let id = refused.headers()["x-request-id"].to_str().unwrap().to_owned();
    has(
        &lines.wait_for(1).await[0],
        &[("request_id", &id), ("api", "http"), ("outcome", "invalid_argument"), ("http_status", "400")],
    );
    post(r#"{"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]}"#).await.unwrap();
    has(&lines.wait_for(2).await[1], &[("outcome", "not_found"), ("http_status", "404")]);
    let too_long = Failure::new(FailureClass::TooLarge, "the prompt has 5000 tokens").with_param("prompt");
    cluster.pd.script([GenerateStep::Fail(to_status(&too_long))]);
    post(hi).await.unwrap();
    let line = &lines.wait_for(3).await[2];
    has(line, &[("model", "vl"), ("outcome", "too_large"), ("http_status", "400"), ("retries", "0")]);
    assert!(!line.contains_key("prompt_tokens"));
    let mut unknown = question(&[]);
    unknown.model = "gpt-9".into();
    ask(&cluster.proxy, unknown).await.unwrap_err();
    has(&lines.wait_for(4).await[3], &[("api", "grpc"), ("outcome", "not_found")]);
}

#[tokio::test]
async fn nothing_is_logged_unless_it_is_asked_for() {
    let (lines, _guard) = Lines::collect();
    let cluster = Cluster::start().await;
    ask(&cluster.proxy, question(&[])).await.unwrap();
    let _ = cluster.proxy.post("/v1/chat/completions", &json!({})).await;
    assert!(lines.all().is_empty());
}
