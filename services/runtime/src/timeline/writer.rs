//! The thread that writes a timeline, so that no step waits for a file: it writes when enough has come together, and
//! what has waited long enough when nothing more comes.

use super::file::{SEPARATOR, TimelineFile};
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::Value;
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of events that are written at once.
const BATCH_BYTES: usize = 64 << 10;
/// Longest time that an event stays in memory.
const HOLD: Duration = Duration::from_secs(1);
/// Bytes of events that a slow disk may leave in memory; further ones are dropped.
const MAX_BYTES: usize = 16 << 20;
/// Threads that a file introduces; of more, those that were seen last.
const MAX_THREADS: usize = 1024;

/// Events that are not written yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// With [`SEPARATOR`] between them.
    events: Vec<u8>,
    /// Arrival of the first.
    since: Option<Instant>,
    n_dropped: u64,
}

impl Pending {
    /// Adds an event. True if the writer has to look again.
    pub(super) fn push(&mut self, event: &Value, now: Instant) -> bool {
        if self.events.len() >= MAX_BYTES {
            self.n_dropped += 1;
            return false;
        }
        let before = self.events.len();
        if before > 0 {
            self.events.extend_from_slice(SEPARATOR);
        }
        // Cannot fail: it writes JSON values to memory.
        let _ = serde_json::to_writer(&mut self.events, event);
        self.since.get_or_insert(now);
        before == 0 || (before < BATCH_BYTES && self.events.len() >= BATCH_BYTES)
    }

    /// Time until they are written; `None` without any.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        let since = self.since?;
        let is_batch = self.events.len() >= BATCH_BYTES;
        Some(if is_batch { Duration::ZERO } else { (since + HOLD).saturating_duration_since(now) })
    }

    fn take(&mut self) -> Vec<u8> {
        self.since = None;
        std::mem::take(&mut self.events)
    }
}

#[derive(Debug, Default)]
struct State {
    pending: Pending,
    /// Events that name the process and its threads, for every file anew.
    process: Vec<u8>,
    threads: VecDeque<Vec<u8>>,
    is_closing: bool,
    failed: Option<io::Error>,
}

impl State {
    fn introduction(&self) -> Vec<u8> {
        let lines = std::iter::once(&self.process).chain(&self.threads);
        lines.map(Vec::as_slice).collect::<Vec<_>>().join(SEPARATOR)
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Takes events for the file. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Events(Arc<Shared>);

/// Writes what is left when dropped.
#[derive(Debug)]
pub struct TimelineGuard {
    events: Events,
    path: PathBuf,
    writing: Option<JoinHandle<()>>,
}

impl Events {
    /// Starts the thread; `process` names this one in every file.
    ///
    /// # Errors
    /// If there can be no thread.
    pub(super) fn write_to(
        file: TimelineFile,
        path: PathBuf,
        process: &Value,
    ) -> io::Result<(Self, TimelineGuard)> {
        let events = Self(Arc::default());
        events.0.state.lock().process = process.to_string().into_bytes();
        let shared = Arc::clone(&events.0);
        let write = move || write(&shared, file);
        let writing = std::thread::Builder::new().name("trace-file".into()).spawn(write)?;
        let guard = TimelineGuard { events: events.clone(), path, writing: Some(writing) };
        Ok((events, guard))
    }

    /// Adds an event.
    pub(super) fn push(&self, event: &Value) {
        self.push_to(self.0.state.lock(), event);
    }

    /// Adds an event that names a thread.
    pub(super) fn name_thread(&self, event: &Value) {
        let mut state = self.0.state.lock();
        if state.threads.len() >= MAX_THREADS {
            state.threads.pop_front();
        }
        state.threads.push_back(event.to_string().into_bytes());
        self.push_to(state, event);
    }

    fn push_to(&self, mut state: MutexGuard<'_, State>, event: &Value) {
        if state.failed.is_none() && state.pending.push(event, Instant::now()) {
            drop(state);
            self.0.changed.notify_one();
        }
    }
}

fn write(shared: &Shared, mut file: TimelineFile) {
    let mut state = shared.state.lock();
    loop {
        match state.pending.due(Instant::now()) {
            None if state.is_closing => return,
            None => shared.changed.wait(&mut state),
            Some(wait) if !wait.is_zero() && !state.is_closing => {
                shared.changed.wait_for(&mut state, wait);
            }
            Some(_) => {
                let (introduction, events) = (state.introduction(), state.pending.take());
                let written = MutexGuard::unlocked(&mut state, || file.write(&introduction, &events));
                if let Err(e) = written {
                    state.failed.get_or_insert(e);
                    return;
                }
            }
        }
    }
}

impl Drop for TimelineGuard {
    fn drop(&mut self) {
        self.events.0.state.lock().is_closing = true;
        self.events.0.changed.notify_one();
        if let Some(writing) = self.writing.take() {
            // It does not panic; if it did, the timeline is incomplete and nothing else is.
            let _ = writing.join();
        }
        let mut state = self.events.0.state.lock();
        let (failed, dropped) = (state.failed.take(), state.pending.n_dropped);
        drop(state);
        if failed.is_some() || dropped > 0 {
            let error = failed.map(|e| e.to_string());
            tracing::warn!(file = %self.path.display(), error, dropped, "the timeline is incomplete");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_are_due_a_second_after_the_first_or_when_they_are_many() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut pending = Pending::default();
        assert_eq!(pending.due(at(0)), None, "nothing wakes the writer of an idle process");
        assert!(pending.push(&json!({"n": 1}), at(0)), "the first one does");
        assert!(!pending.push(&json!({"n": 2}), at(700)));
        assert_eq!(pending.due(at(700)), Some(Duration::from_millis(300)));
        assert_eq!(pending.due(at(1000)), Some(Duration::ZERO), "nothing more has to come");
        assert_eq!(pending.take(), b"{\"n\":1},\n{\"n\":2}");
        assert_eq!(pending.due(at(5000)), None);
        let large = json!("x".repeat(BATCH_BYTES / 2));
        assert!(pending.push(&large, at(5000)));
        assert!(pending.push(&large, at(5001)), "a batch is full");
        assert_eq!(pending.due(at(5001)), Some(Duration::ZERO));
        assert!(!pending.push(&large, at(5002)), "it knows");
    }

    #[test]
    fn a_writer_that_is_behind_bounds_the_memory() {
        let now = Instant::now();
        let mut pending = Pending::default();
        let large = json!("x".repeat(1 << 20));
        for _ in 0..40 {
            pending.push(&large, now);
        }
        assert!(pending.events.len() <= MAX_BYTES + (2 << 20));
        assert!(pending.n_dropped >= 20);
    }

    #[test]
    fn many_threads_are_introduced_up_to_a_bound() {
        let mut state = State { process: b"p".to_vec(), ..State::default() };
        state.threads.extend([b"a".to_vec(), b"b".to_vec()]);
        assert_eq!(state.introduction(), b"p,\na,\nb");
    }
}
