//! An OTLP collector that keeps the spans that it gets.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Wire;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Status as SpanStatus;
pub use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
pub use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};
use triptych_tests::process::eventually;

/// A span as it was exported.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Attributes of its process.
    pub resource: Map<String, Value>,
    pub name: String,
    pub kind: SpanKind,
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub status: StatusCode,
    pub attributes: Map<String, Value>,
    /// Names and attributes of its events.
    pub events: String,
    pub start: u64,
}

/// A running collector.
pub struct Collector {
    pub endpoint: String,
    spans: Arc<Mutex<Vec<Seen>>>,
}

/// The spans of one trace.
pub struct Trace(pub Vec<Seen>);

struct Service(Arc<Mutex<Vec<Seen>>>);

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for spans in request.into_inner().resource_spans {
            let resource = attributes(spans.resource.map(|r| r.attributes).unwrap_or_default());
            let seen = spans.scope_spans.into_iter().flat_map(|s| s.spans).map(|span| Seen {
                resource: resource.clone(),
                kind: span.kind(),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                status: span.status.as_ref().map_or(StatusCode::Unset, SpanStatus::code),
                events: format!("{:?}", span.events),
                start: span.start_time_unix_nano,
                attributes: attributes(span.attributes),
                name: span.name,
            });
            self.0.lock().extend(seen);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// # Panics
/// If a name is there twice.
fn attributes(pairs: Vec<KeyValue>) -> Map<String, Value> {
    let mut map = Map::new();
    for pair in pairs {
        let before = map.insert(pair.key.clone(), value(pair.value));
        assert_eq!(before, None, "{} is there twice", pair.key);
    }
    map
}

fn value(value_of: Option<AnyValue>) -> Value {
    match value_of.and_then(|v| v.value) {
        Some(Wire::StringValue(text)) => text.into(),
        Some(Wire::BoolValue(is)) => is.into(),
        Some(Wire::IntValue(n)) => n.into(),
        Some(Wire::DoubleValue(x)) => x.into(),
        Some(Wire::ArrayValue(list)) => list.values.into_iter().map(|v| value(Some(v))).collect(),
        other => json!(format!("{other:?}")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Collector {
    /// Listens on a free port.
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let spans = Arc::<Mutex<Vec<Seen>>>::default();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Service(spans.clone())))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        Self { endpoint, spans }
    }

    /// The first trace that is as wanted, once it is.
    pub async fn trace(&self, what: &str, is_wanted: impl Fn(&Trace) -> bool) -> Trace {
        let found = async || {
            let mut traces = BTreeMap::<String, Vec<Seen>>::new();
            for span in self.spans.lock().iter() {
                traces.entry(span.trace.clone()).or_default().push(span.clone());
            }
            traces.into_values().map(Trace).find(&is_wanted)
        };
        let unlike = OnFailure(|| eprintln!("{what} is none of\n{}", self.all().tree()));
        let trace = eventually(what, found).await;
        std::mem::forget(unlike);
        trace
    }

    /// All spans so far.
    pub fn all(&self) -> Trace {
        Trace(self.spans.lock().clone())
    }
}

/// Says what there is when a wait ends in a panic.
struct OnFailure<F: Fn()>(F);

impl<F: Fn()> Drop for OnFailure<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Seen {
    /// Role of its process.
    pub fn role(&self) -> &str {
        self.resource["service.name"]
            .as_str()
            .and_then(|name| name.strip_prefix("triptych-"))
            .expect("a role")
    }

    /// Holds attributes against what they should be.
    pub fn has(&self, expected: Value) {
        for (name, value) in expected.as_object().expect("attributes") {
            assert_eq!(self.attributes.get(name), Some(value), "{name} of {self:#?}");
        }
    }

    /// The class of its failure, and its status.
    pub fn end(&self) -> (Option<&str>, StatusCode) {
        (self.attributes.get("error.type").and_then(Value::as_str), self.status)
    }
}

impl Trace {
    /// Spans of a name, in a role.
    pub fn named(&self, role: &str, name: &str) -> impl Iterator<Item = &Seen> + use<'_> {
        let is_it = |span: &&Seen| span.name == name && span.role() == role;
        self.0.iter().filter(is_it).collect::<Vec<_>>().into_iter()
    }

    pub fn has(&self, role: &str, name: &str) -> bool {
        self.named(role, name).next().is_some()
    }

    /// The first span of a name in a role.
    ///
    /// # Panics
    /// If there is none.
    pub fn one(&self, role: &str, name: &str) -> &Seen {
        self.named(role, name).next().unwrap_or_else(|| panic!("no {name} of {role} in\n{}", self.tree()))
    }

    pub fn parent(&self, span: &Seen) -> Option<&Seen> {
        self.0.iter().find(|other| other.id == span.parent)
    }

    /// Names of the spans around one, the nearest first.
    pub fn around<'a>(&'a self, span: &'a Seen) -> impl Iterator<Item = &'a str> {
        std::iter::successors(self.parent(span), |span| self.parent(span)).map(|span| span.name.as_str())
    }

    /// Kinds and names, indented.
    pub fn tree(&self) -> String {
        let mut text = String::new();
        let is_root = |span: &&Seen| self.parent(span).is_none();
        for root in self.0.iter().filter(is_root) {
            self.branch(root, 0, &mut text);
        }
        text
    }

    fn branch(&self, span: &Seen, depth: usize, text: &mut String) {
        let error = span.attributes.get("error.type").map(|class| format!(" !{class}")).unwrap_or_default();
        let indent = "  ".repeat(depth);
        text.push_str(&format!("{indent}{:?} {} ({}){error}\n", span.kind, span.name, span.role()));
        let mut children: Vec<_> = self.0.iter().filter(|child| child.parent == span.id).collect();
        children.sort_by_key(|child| child.start);
        for child in children {
            self.branch(child, depth + 1, text);
        }
    }
}
