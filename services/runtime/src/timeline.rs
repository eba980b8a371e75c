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
//! Times are those of the machine's clock and whole lines are appended, so the processes of a cluster share one file.
//! The list in it is never closed, which the format allows: a killed process loses at most its last second.

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, SpanRef};
use triptych_core::timeline::COMPUTE;

/// Bytes of lines that are buffered before a write, so that a step does not wait for a file.
const BUFFER_BYTES: usize = 64 << 10;
/// Longest time that a line stays in the buffer while others arrive.
const HOLD: Duration = Duration::from_secs(1);

/// Records spans: those of [`COMPUTE`] on their threads, all others from creation to close.
#[derive(Debug)]
pub struct Timeline {
    out: Arc<Mutex<TimelineFile>>,
    pid: u32,
    began: Instant,
    /// `began` in microseconds since 1970.
    began_us: f64,
}

/// Writes the buffered lines when dropped.
#[derive(Debug)]
pub struct TimelineGuard(Arc<Mutex<TimelineFile>>);

#[derive(Debug)]
struct TimelineFile {
    file: File,
    path: PathBuf,
    lines: Vec<u8>,
    written: Instant,
    failed: Option<io::Error>,
}

/// Recorded data of a span.
struct SpanRecord {
    args: Map<String, Value>,
    /// Time at which its thread entered it, in microseconds since 1970.
    entered_us: Option<f64>,
}

impl Timeline {
    /// Appends to a file; creates it if it does not exist.
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
        let out =
            TimelineFile { file, path: path.to_owned(), lines: Vec::new(), written: began, failed: None };
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
        self.out.lock().push(line);
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
            self.push(&json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": name}));
        }
        NUMBER.get()
    }

    /// Records the beginning or the end of a span that is not bound to a thread.
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
        span.extensions_mut().insert(SpanRecord { args, entered_us: None });
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
        self.push(&json!({
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
            self.mark("e", &span, &record.args);
        }
    }
}

impl TimelineFile {
    fn push(&mut self, line: &Value) {
        if self.failed.is_some() {
            return;
        }
        // Cannot fail: it writes JSON values to memory.
        let _ = serde_json::to_writer(&mut self.lines, line);
        self.lines.extend_from_slice(b",\n");
        if self.lines.len() >= BUFFER_BYTES || self.written.elapsed() >= HOLD {
            self.write();
        }
    }

    fn write(&mut self) {
        // One write, so that no other process's write splits a line.
        if let Err(e) = self.file.write_all(&self.lines) {
            self.failed.get_or_insert(e);
        }
        self.lines.clear();
        self.written = Instant::now();
    }
}

impl Drop for TimelineGuard {
    fn drop(&mut self) {
        let mut out = self.0.lock();
        out.write();
        let (failed, path) = (out.failed.take(), out.path.clone());
        drop(out);
        if let Some(error) = failed {
            tracing::warn!(file = %path.display(), %error, "the timeline is incomplete");
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

    fn record(path: &Path, process: &str, work: impl FnOnce()) {
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
        assert!(Timeline::append(Path::new("/nowhere/t.json"), "pd").is_err());
        let full = Path::new("/dev/full");
        if full.exists() {
            record(full, "pd", || tracing::trace_span!(target: COMPUTE, "step").in_scope(|| ()));
        }
    }
}
