//! Tests against a small HTTP API server with scripted responses.

use super::*;
use crate::discovery::Discovery;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::StreamExt;
use futures::channel::mpsc;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::net::TcpListener;

/// Response to the next request.
enum Step {
    Answer(StatusCode, Value),
    /// Lines as they are sent; the watch ends when the sender is dropped.
    Watch(mpsc::UnboundedReceiver<Value>),
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<(VecDeque<Step>, Vec<String>)>>);

impl Server {
    fn script(&self, steps: impl IntoIterator<Item = Step>) {
        self.0.lock().0.extend(steps);
    }

    fn asked(&self) -> Vec<String> {
        self.0.lock().1.clone()
    }

    async fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let path = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices";
        let routes = Router::new().route(path, get(answer)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        url
    }
}

async fn answer(State(server): State<Server>, RawQuery(query): RawQuery) -> Response {
    let step = {
        let mut state = server.0.lock();
        state.1.push(query.unwrap());
        state.0.pop_front()
    };
    match step {
        Some(Step::Answer(status, body)) => (status, body.to_string()).into_response(),
        Some(Step::Watch(lines)) => {
            let lines = lines.map(|line| Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))));
            Body::from_stream(lines).into_response()
        }
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

fn slice(name: &str, version: u32, addresses: &[&str]) -> Value {
    let pods: Vec<_> =
        addresses.iter().map(|a| json!({"addresses": [a], "conditions": {"ready": true}})).collect();
    json!({
        "metadata": {"name": name, "resourceVersion": version.to_string()},
        "endpoints": pods,
        "ports": [{"name": "grpc", "port": 7001}],
    })
}

fn list(version: u32, next_page: &str, slices: &[Value]) -> Step {
    let metadata = json!({"resourceVersion": version.to_string(), "continue": next_page});
    Step::Answer(StatusCode::OK, json!({"metadata": metadata, "items": slices}))
}

fn watch() -> (mpsc::UnboundedSender<Value>, Step) {
    let (sender, lines) = mpsc::unbounded();
    (sender, Step::Watch(lines))
}

fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

struct Following {
    _discovery: Discovery,
    present: tokio::sync::watch::Receiver<crate::discovery::EndpointSet>,
}

impl Following {
    async fn of(server: &Server) -> Self {
        let service =
            Service { namespace: "prod".into(), name: "encoders".into(), port: Some("grpc".into()) };
        let at = ApiServer { url: server.start().await, ca: None, token: None };
        let source = Kubernetes::new(Role::Encoder, service, at).unwrap();
        let discovery = Discovery::start(vec![Box::new(source)]);
        Self { present: discovery.present(), _discovery: discovery }
    }

    async fn becomes(&mut self, expect: &[&str]) {
        let shown =
            |p: &crate::discovery::EndpointSet| p.iter().map(|e| e.address.clone()).collect::<Vec<_>>();
        let came = self.present.wait_for(|p| shown(p) == expect);
        let came = tokio::time::timeout(Duration::from_secs(60), came).await.map(|r| r.map(|_| ()));
        assert!(matches!(came, Ok(Ok(()))), "{expect:?} never came");
    }
}

#[tokio::test]
async fn pages_are_listed_and_events_are_followed() {
    let server = Server::default();
    let (events, watching) = watch();
    server.script([
        list(5, "more/", &[slice("a", 3, &["10.0.0.1", "10.0.0.2"])]),
        list(5, "", &[slice("b", 4, &["10.0.0.3"])]),
        watching,
    ]);
    let mut following = Following::of(&server).await;
    following.becomes(&["10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.3:7001"]).await;
    events.unbounded_send(event("MODIFIED", slice("a", 6, &["10.0.0.2"]))).unwrap();
    following.becomes(&["10.0.0.2:7001", "10.0.0.3:7001"]).await;
    events.unbounded_send(event("DELETED", slice("b", 7, &[]))).unwrap();
    following.becomes(&["10.0.0.2:7001"]).await;
    events.unbounded_send(event("ADDED", slice("c", 8, &["10.0.0.9"]))).unwrap();
    following.becomes(&["10.0.0.2:7001", "10.0.0.9:7001"]).await;
    let asked = server.asked();
    assert!(asked.iter().all(|q| q.starts_with("labelSelector=kubernetes.io%2Fservice-name%3Dencoders&")));
    assert!(asked[1].ends_with("continue=more%2F") && asked[2].ends_with("resourceVersion=5"), "{asked:?}");
}

#[tokio::test]
async fn a_watch_resumes_at_its_last_version() {
    let server = Server::default();
    let (first, watching_first) = watch();
    let (second, watching_second) = watch();
    server.script([list(1, "", &[]), watching_first, watching_second]);
    let mut following = Following::of(&server).await;
    first.unbounded_send(event("ADDED", slice("a", 2, &["10.0.0.1"]))).unwrap();
    following.becomes(&["10.0.0.1:7001"]).await;
    let bookmark = json!({"metadata": {"resourceVersion": "40"}});
    first.unbounded_send(event("BOOKMARK", bookmark)).unwrap();
    drop(first);
    second.unbounded_send(event("ADDED", slice("b", 41, &["10.0.0.2"]))).unwrap();
    following.becomes(&["10.0.0.1:7001", "10.0.0.2:7001"]).await;
    let asked = server.asked();
    assert!(asked[2].contains("watch=true") && asked[2].ends_with("resourceVersion=40"), "{asked:?}");
}

#[tokio::test]
async fn a_version_that_is_gone_begins_with_a_list() {
    let gone = || json!({"kind": "Status", "code": 410, "message": "too old resource version"});
    let server = Server::default();
    let (events, watching) = watch();
    let (_open, last) = watch();
    server.script([
        list(1, "", &[slice("a", 1, &["10.0.0.1"])]),
        // Once as an event, once as a status.
        watching,
        list(7, "", &[slice("b", 7, &["10.0.0.2"])]),
        Step::Answer(StatusCode::GONE, gone()),
        list(9, "", &[slice("c", 9, &["10.0.0.3"])]),
        last,
    ]);
    let mut following = Following::of(&server).await;
    following.becomes(&["10.0.0.1:7001"]).await;
    events.unbounded_send(event("ERROR", gone())).unwrap();
    following.becomes(&["10.0.0.3:7001"]).await;
    assert_eq!(server.asked().len(), 5, "{:?}", server.asked());
}

#[tokio::test]
async fn a_server_that_fails_leaves_the_last_answer_and_is_asked_again() {
    let server = Server::default();
    let (events, watching) = watch();
    let (_open, last) = watch();
    server.script([
        Step::Answer(StatusCode::FORBIDDEN, json!({})),
        list(1, "", &[slice("a", 1, &["10.0.0.1"])]),
        watching,
        Step::Answer(StatusCode::INTERNAL_SERVER_ERROR, json!({})),
        list(2, "", &[slice("a", 2, &["10.0.0.2"])]),
        last,
    ]);
    let mut following = Following::of(&server).await;
    following.becomes(&["10.0.0.1:7001"]).await;
    following.present.mark_unchanged();
    drop(events);
    // The next set that is seen is the list's: nothing was taken away in between.
    tokio::time::timeout(Duration::from_secs(60), following.present.changed()).await.unwrap().unwrap();
    following.becomes(&["10.0.0.2:7001"]).await;
}
