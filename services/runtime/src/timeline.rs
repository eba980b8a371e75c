//! A timeline of processes in Chrome's trace event format, which <https://ui.perfetto.dev> opens: the spans of each
//! compute thread, and the stages of every request.
//!
//! ```text
//! pd       engine-m    │ step ─ forward ─ choose │ step ─ forward ─ choose │
//! encoder  encode-m    │ forward                   │ forward               │
//!          publish               ├──┤                        ├──┤
//! proxy    request     ├─────────────────────────────────────────────┤
//! ```
//!
//! Times are those of the machine's clock, so the processes of a cluster share one file ([`file`]). A killed process
//! loses at most its last second.

mod file;
mod writer;

pub use file::Rotation;
pub use writer::TimelineGuard;

use file::TimelineFile;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, SpanRef};
use triptych_core::timeline::COMPUTE;
use writer::Events;

/// Field with the name that a span has in traces.
const NAME: &str = "otel.name";
/// Start of the names of fields that are for traces alone.
const FOR_TRACES: &str = "otel.";

/// Records spans: those of [`COMPUTE`] on their threads, all others from creation to close.
#[derive(Debug)]
pub struct Timeline {
    events: Events,
    pid: u32,
    began: Instant,
    /// `began` in microseconds since 1970.
    began_us: f64,
}

/// Recorded data of a span.
struct SpanRecord {
    /// Its name in traces, if that is another one.
    name: Option<String>,
    args: Map<String, Value>,
    /// Time at which its thread entered it, in microseconds since 1970.
    entered_us: Option<f64>,
}

impl Timeline {
    /// Appends to a file; creates it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be written, or holds something else.
    pub fn append(path: &Path, process: &str, rotation: Rotation) -> io::Result<(Self, TimelineGuard)> {
        let file = TimelineFile::open(path, rotation)?;
        let (began, pid) = (Instant::now(), std::process::id());
        let began_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e6;
        let name = json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}});
        let (events, guard) = Events::write_to(file, path.to_owned(), &name)?;
        Ok((Self { events, pid, began, began_us }, guard))
    }

    fn now_us(&self) -> f64 {
        self.began_us + self.began.elapsed().as_secs_f64() * 1e6
    }

    /// Number of this thread. Its first use records the thread's name.
    fn thread(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static NUMBER: Cell<u64> = const { Cell::new(0) };
        }
        if NUMBER.get() == 0 {
            NUMBER.set(NEXT.fetch_add(1, Ordering::Relaxed));
            let name = json!({"name": std::thread::current().name().unwrap_or("unnamed")});
            let (pid, tid) = (self.pid, NUMBER.get());
            let event = json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": name});
            self.events.name_thread(&event);
        }
        NUMBER.get()
    }

    /// Records the beginning or the end of a span that is not bound to a thread.
    fn mark<S: for<'a> LookupSpan<'a>>(&self, phase: &str, span: &SpanRef<'_, S>, record: &SpanRecord) {
        self.events.push(&json!({
            "ph": phase,
            "cat": "request",
            "name": record.name.as_deref().unwrap_or(span.name()),
            "id2": {"local": format!("{:#x}", span.id().into_u64())},
            "pid": self.pid,
            "tid": 0,
            "ts": self.now_us(),
            "args": record.args,
        }));
    }
}

fn computes<S: for<'a> LookupSpan<'a>>(span: &SpanRef<'_, S>) -> bool {
    span.metadata().target() == COMPUTE
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Timeline {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut record = SpanRecord { name: None, args: Map::new(), entered_us: None };
        attributes.record(&mut Fields(&mut record.args));
        if let Some(Value::String(name)) = record.args.remove(NAME) {
            record.name = Some(name);
        }
        if !computes(&span) {
            self.mark("b", &span, &record);
        }
        span.extensions_mut().insert(record);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(record) = span.extensions_mut().get_mut::<SpanRecord>() {
            values.record(&mut Fields(&mut record.args));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id).filter(computes) else { return };
        if let Some(record) = span.extensions_mut().get_mut::<SpanRecord>() {
            record.entered_us = Some(self.now_us());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let now = self.now_us();
        let Some(span) = context.span(id).filter(computes) else { return };
        let mut extensions = span.extensions_mut();
        let Some(record) = extensions.get_mut::<SpanRecord>() else { return };
        let Some(entered) = record.entered_us.take() else { return };
        let tid = self.thread();
        self.events.push(&json!({
            "ph": "X",
            "cat": "compute",
            "name": span.name(),
            "pid": self.pid,
            "tid": tid,
            "ts": entered,
            "dur": now - entered,
            "args": record.args,
        }));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let extensions = span.extensions();
        if let Some(record) = extensions.get::<SpanRecord>().filter(|_| !computes(&span)) {
            self.mark("e", &span, record);
        }
    }
}

/// Fields of a span, as JSON.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        if field.name() == NAME || !field.name().starts_with(FOR_TRACES) {
            self.0.insert(field.name().to_owned(), value.into());
        }
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    fn record(path: &Path, process: &str, work: impl FnOnce()) {
        let (timeline, guard) = Timeline::append(path, process, Rotation::default()).expect("a file");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(timeline), work);
        drop(guard);
    }

    fn events(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).expect("a file");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    fn of<'a>(events: &'a [Value], phase: &str, name: &str) -> Vec<&'a Value> {
        events.iter().filter(|e| e["ph"] == phase && e["name"] == name).collect()
    }

    #[test]
    fn compute_spans_are_on_their_thread_and_requests_begin_and_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        record(&path, "pd", || {
            let request = tracing::info_span!("request", request_id = %"r-1", n = tracing::field::Empty);
            let step = tracing::trace_span!(target: COMPUTE, "step", tokens = 7_u64);
            step.in_scope(|| tracing::trace_span!(target: COMPUTE, "forward").in_scope(|| ()));
            // A task enters its span at each poll; that is no part of a request's time.
            request.in_scope(|| ());
            request.record("n", 3_u64);
        });
        let events = events(&path);
        let [step, forward] = ["step", "forward"].map(|name| of(&events, "X", name)[0]);
        assert_eq!((&step["args"]["tokens"], &step["tid"]), (&json!(7), &forward["tid"]));
        let ends = |e: &Value| e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap();
        assert!(step["ts"].as_f64() <= forward["ts"].as_f64() && ends(forward) <= ends(step));
        let [begin, end] = ["b", "e"].map(|phase| of(&events, phase, "request"));
        assert_eq!((begin.len(), end.len()), (1, 1));
        assert_eq!(begin[0]["id2"], end[0]["id2"]);
        assert_eq!((&begin[0]["args"]["request_id"], &end[0]["args"]["n"]), (&json!("r-1"), &json!(3)));
        assert_eq!(of(&events, "M", "process_name")[0]["args"]["name"], "pd");
    }

    #[test]
    fn a_call_has_its_name_of_traces_and_none_of_their_fields() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        record(&path, "pd", || {
            let _ = tracing::info_span!("rpc", otel.kind = "client", otel.name = "S/M", rpc.method = "M");
        });
        let events = events(&path);
        assert_eq!(of(&events, "b", "S/M")[0]["args"], json!({"rpc.method": "M"}));
        assert_eq!(of(&events, "e", "S/M").len(), 1);
    }

    #[test]
    fn processes_share_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        for process in ["encoder", "pd"] {
            record(&path, process, || tracing::trace_span!(target: COMPUTE, "step").in_scope(|| ()));
        }
        let events = events(&path);
        assert_eq!(of(&events, "M", "process_name").len(), 2);
        assert_eq!(of(&events, "X", "step").len(), 2);
    }

    #[test]
    fn a_missing_folder_is_refused_and_a_full_disk_is_survived() {
        assert!(Timeline::append(Path::new("/nowhere/t.json"), "pd", Rotation::default()).is_err());
        let full = Path::new("/dev/full");
        if full.exists() {
            record(full, "pd", || tracing::trace_span!(target: COMPUTE, "step").in_scope(|| ()));
        }
    }
}
