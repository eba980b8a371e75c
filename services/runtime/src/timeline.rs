//! A timeline of processes in Chrome's trace event format, which <https://ui.perfetto.dev> opens: what each thread that
//! computes does, and the stages of every request.
//!
//! ```text
//! pd       engine-m    │ step ─ forward ─ choose │ step ─ forward ─ choose │
//! encoder  encode-m    │ forward                   │ forward               │
//!          publish               ├──┤                        ├──┤
//! proxy    request     ├─────────────────────────────────────────────┤
//! ```
//!
//! Times are those of the machine's clock and whole lines are appended, so the processes of a cluster share one file. The
//! list in it is never closed, which the format allows: a process that is killed costs its last second and no more.

use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, SpanRef};
use triptych_core::timeline::COMPUTE;

/// Lines that are collected before they are written: a step should not wait for a file.
const BUFFER_BYTES: usize = 64 << 10;
/// Longest that a line is kept back while others come.
const HOLD: Duration = Duration::from_secs(1);

/// Draws spans: those of [`COMPUTE`] on their threads, all others from their beginning to their end.
#[derive(Debug)]
pub struct Timeline {
    out: Arc<Mutex<Out>>,
    pid: u32,
    began: Instant,
    /// When that was, in microseconds since 1970.
    began_us: f64,
}

/// Writes what is left when it is dropped.
#[derive(Debug)]
pub struct TimelineGuard(Arc<Mutex<Out>>);

#[derive(Debug)]
struct Out {
    file: File,
    path: PathBuf,
    lines: Vec<u8>,
    written: Instant,
    failed: Option<io::Error>,
}

/// What a span is drawn with.
struct Drawn {
    args: Map<String, Value>,
    /// Since when it is on its thread.
    entered_us: Option<f64>,
}

impl Timeline {
    /// Appends to a file, or begins it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn append(path: &Path, process: &str) -> io::Result<(Self, TimelineGuard)> {
        let mut options = OpenOptions::new();
        let file = match options.append(true).create_new(true).open(path) {
            Ok(mut file) => {
                file.write_all(b"[\n")?;
                file
            }
            Err(e) if e.kind() == ErrorKind::AlreadyExists => OpenOptions::new().append(true).open(path)?,
            Err(e) => return Err(e),
        };
        let began = Instant::now();
        let out = Out { file, path: path.to_owned(), lines: Vec::new(), written: began, failed: None };
        let timeline = Self {
            out: Arc::new(Mutex::new(out)),
            pid: std::process::id(),
            began,
            began_us: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e6,
        };
        let name = json!({"name": process});
        timeline.push(&json!({"ph": "M", "name": "process_name", "pid": timeline.pid, "args": name}));
        let guard = TimelineGuard(Arc::clone(&timeline.out));
        Ok((timeline, guard))
    }

    fn now_us(&self) -> f64 {
        self.began_us + self.began.elapsed().as_secs_f64() * 1e6
    }

    fn push(&self, line: &Value) {
        lock(&self.out).push(line);
    }

    /// Number of this thread, which is told by its name when it is first drawn.
    fn thread(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static NUMBER: Cell<u64> = const { Cell::new(0) };
        }
        if NUMBER.get() == 0 {
            NUMBER.set(NEXT.fetch_add(1, Ordering::Relaxed));
            let name = json!({"name": std::thread::current().name().unwrap_or("unnamed")});
            let (pid, tid) = (self.pid, NUMBER.get());
            self.push(&json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": name}));
        }
        NUMBER.get()
    }

    /// The beginning or the end of what is not bound to a thread.
    fn mark<S: for<'a> LookupSpan<'a>>(&self, phase: &str, span: &SpanRef<'_, S>, args: &Map<String, Value>) {
        self.push(&json!({
            "ph": phase,
            "cat": "request",
            "name": span.name(),
            "id2": {"local": format!("{:#x}", span.id().into_u64())},
            "pid": self.pid,
            "tid": 0,
            "ts": self.now_us(),
            "args": args,
        }));
    }
}

fn lock(out: &Mutex<Out>) -> MutexGuard<'_, Out> {
    out.lock().unwrap_or_else(PoisonError::into_inner)
}

fn computes<S: for<'a> LookupSpan<'a>>(span: &SpanRef<'_, S>) -> bool {
    span.metadata().target() == COMPUTE
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Timeline {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut args = Map::new();
        attributes.record(&mut Fields(&mut args));
        if !computes(&span) {
            self.mark("b", &span, &args);
        }
        span.extensions_mut().insert(Drawn { args, entered_us: None });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(drawn) = span.extensions_mut().get_mut::<Drawn>() {
            values.record(&mut Fields(&mut drawn.args));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id).filter(computes) else { return };
        if let Some(drawn) = span.extensions_mut().get_mut::<Drawn>() {
            drawn.entered_us = Some(self.now_us());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let now = self.now_us();
        let Some(span) = context.span(id).filter(computes) else { return };
        let mut extensions = span.extensions_mut();
        let Some(drawn) = extensions.get_mut::<Drawn>() else { return };
        let Some(entered) = drawn.entered_us.take() else { return };
        let tid = self.thread();
        self.push(&json!({
            "ph": "X",
            "cat": "compute",
            "name": span.name(),
            "pid": self.pid,
            "tid": tid,
            "ts": entered,
            "dur": now - entered,
            "args": drawn.args,
        }));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let extensions = span.extensions();
        if let Some(drawn) = extensions.get::<Drawn>().filter(|_| !computes(&span)) {
            self.mark("e", &span, &drawn.args);
        }
    }
}

impl Out {
    fn push(&mut self, line: &Value) {
        if self.failed.is_some() {
            return;
        }
        // Into memory, and of values that JSON has: it cannot fail.
        let _ = serde_json::to_writer(&mut self.lines, line);
        self.lines.extend_from_slice(b",\n");
        if self.lines.len() >= BUFFER_BYTES || self.written.elapsed() >= HOLD {
            self.write();
        }
    }

    fn write(&mut self) {
        // In one piece, so that nobody's line is torn by another process.
        if let Err(e) = self.file.write_all(&self.lines) {
            self.failed.get_or_insert(e);
        }
        self.lines.clear();
        self.written = Instant::now();
    }
}

impl Drop for TimelineGuard {
    fn drop(&mut self) {
        let mut out = lock(&self.0);
        out.write();
        let (failed, path) = (out.failed.take(), out.path.clone());
        drop(out);
        if let Some(error) = failed {
            tracing::warn!(file = %path.display(), %error, "the timeline is not whole");
        }
    }
}

/// Fields of a span, as JSON.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    fn drawn(path: &Path, process: &str, work: impl FnOnce()) {
        let (timeline, guard) = Timeline::append(path, process).expect("a file");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(timeline), work);
        drop(guard);
    }

    /// Events of a file whose list is open.
    fn events(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).expect("a file");
        let whole = format!("{}]", text.trim_end().trim_end_matches(','));
        serde_json::from_str(&whole).unwrap_or_else(|e| panic!("{e}: {whole}"))
    }

    fn of<'a>(events: &'a [Value], phase: &str, name: &str) -> Vec<&'a Value> {
        events.iter().filter(|e| e["ph"] == phase && e["name"] == name).collect()
    }

    #[test]
    fn compute_lies_on_its_thread_and_requests_have_a_beginning_and_an_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        drawn(&path, "pd", || {
            let request = tracing::info_span!("request", request_id = %"r-1", n = tracing::field::Empty);
            let step = tracing::trace_span!(target: COMPUTE, "step", tokens = 7_u64);
            step.in_scope(|| tracing::trace_span!(target: COMPUTE, "forward").in_scope(|| ()));
            // Entering is what a task does again and again; it is no part of a request's time.
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
    fn processes_share_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        for process in ["encoder", "pd"] {
            drawn(&path, process, || tracing::trace_span!(target: COMPUTE, "step").in_scope(|| ()));
        }
        let events = events(&path);
        assert_eq!(of(&events, "M", "process_name").len(), 2);
        assert_eq!(of(&events, "X", "step").len(), 2);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused_and_one_that_fills_up_stops_nobody() {
        assert!(Timeline::append(Path::new("/nowhere/t.json"), "pd").is_err());
        let full = Path::new("/dev/full");
        if full.exists() {
            drawn(full, "pd", || tracing::trace_span!(target: COMPUTE, "step").in_scope(|| ()));
        }
    }
}
