//! Accounting: the usage of each tenant, in metrics under its hash and in a file under its name.
//!
//! The file is the one place where this process writes tenants' names. A line is a JSON object about a request that was
//! worked on and has ended, whatever its outcome. A thread writes them, so that a slow disk holds up no request; lines
//! that find its queue full are lost, and counted.

use crate::request::Request;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use triptych_core::metrics::Metric;
use triptych_core::{Failure, ModelName};
use triptych_proto::v1;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Labels};

/// Lines that wait for the disk.
const QUEUE: usize = 8192;
/// Tenants with metrics of their own; those that come later share one series.
const MAX_TENANTS: usize = 1000;
/// The label of all others.
const OTHERS: &str = "others";

const TENANT_REQUESTS: Metric = Metric {
    name: "tenant_requests",
    unit: "",
    help: "Requests of a tenant that were worked on, by hash of the tenant and outcome",
};
const TENANT_TOKENS: Metric = Metric {
    name: "tenant_tokens",
    unit: "",
    help: "Tokens of a tenant, by hash of the tenant and kind: prompt, cached or completion",
};
const LOST: Metric = Metric {
    name: "accounting_lines_lost",
    unit: "",
    help: "Lines of the accounting log that found its queue full",
};

/// Usage of tenants. Cheap to clone.
#[derive(Clone)]
pub struct Accounting(Arc<Parts>);

struct Parts {
    requests: Counters,
    tokens: Counters,
    lost: Counters,
    tenants: Mutex<HashSet<String>>,
    log: Option<LogWriter>,
}

/// A request that was worked on and has ended.
pub struct EndedUse<'a> {
    /// The request.
    pub request: &'a Request,
    /// The model that answered.
    pub model: &'a ModelName,
    /// Hash of its tenant.
    pub tenant_hash: &'a str,
    /// Tokens that were written.
    pub n_tokens: usize,
    /// Its end.
    pub outcome: Result<&'a v1::Summary, &'a Failure>,
    /// Time since its arrival.
    pub elapsed: Duration,
}

/// A line of the log.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// Milliseconds since 1970 at its end.
    time_ms: u64,
    request_id: String,
    tenant: &'a str,
    model: &'a str,
    api: &'static str,
    outcome: &'static str,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u64,
    items: usize,
    encoded_items: usize,
    e2e_ms: u64,
}

impl Accounting {
    /// Registers the metrics, and opens the log if there is to be one.
    ///
    /// # Errors
    /// [`io::Error`] for a file that cannot be appended to.
    pub fn start(log: Option<&Path>, registry: &MetricsRegistry) -> io::Result<Self> {
        Ok(Self(Arc::new(Parts {
            requests: registry.counters(TENANT_REQUESTS),
            tokens: registry.counters(TENANT_TOKENS),
            lost: registry.counters(LOST),
            tenants: Mutex::default(),
            log: log.map(LogWriter::append).transpose()?,
        })))
    }

    /// Counts a request, and writes its line.
    pub fn record(&self, ended: &EndedUse<'_>) {
        let parts = &self.0;
        let outcome = ended.outcome.map_or_else(|failure| failure.class.as_str(), |_| "ok");
        let usage = ended.outcome.ok().and_then(|summary| summary.usage).unwrap_or_default();
        let written = ended.n_tokens as u64;
        let completion = ended.outcome.ok().map_or(written, |_| usage.completion_tokens.into());
        let tenant = parts.label(ended.tenant_hash);
        let of = |name, value: &str| vec![("tenant", tenant.clone()), (name, value.to_owned())];
        parts.requests.get_or_create(&of("outcome", outcome)).inc();
        let kinds = [("prompt", usage.prompt_tokens.into()), ("cached", usage.cached_tokens.into())];
        for (kind, n) in kinds.into_iter().chain([("completion", completion)]) {
            parts.tokens.get_or_create(&of("kind", kind)).inc_by(n);
        }
        let Some(log) = &parts.log else { return };
        let encoded = i32::from(v1::ItemSource::Encoded);
        let sources = ended.outcome.ok().map_or(&[][..], |summary| &summary.item_sources);
        let line = Line {
            time_ms: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, ms),
            request_id: ended.request.id.to_string(),
            tenant: &ended.request.caller.tenant,
            model: ended.model.as_str(),
            api: ended.request.api.as_str(),
            outcome,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: completion,
            items: ended.request.items.len(),
            encoded_items: sources.iter().filter(|source| **source == encoded).count(),
            e2e_ms: ms(ended.elapsed),
        };
        if !log.write(&line) {
            parts.lost.get_or_create(&Labels::new()).inc();
        }
    }
}

impl Parts {
    /// The tenant's hash, or the label of all others where there are too many.
    fn label(&self, hash: &str) -> String {
        let mut tenants = self.tenants.lock();
        if tenants.contains(hash) || tenants.len() < MAX_TENANTS {
            tenants.insert(hash.to_owned());
            return hash.to_owned();
        }
        OTHERS.to_owned()
    }
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The thread that writes. Dropping it waits until everything is written.
struct LogWriter {
    lines: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
}

impl LogWriter {
    fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (lines, receiver) = sync_channel(QUEUE);
        let run = move || write_all(file, &receiver);
        let thread = thread::Builder::new().name("accounting".into()).spawn(run)?;
        Ok(Self { lines: Some(lines), thread: Some(thread) })
    }

    fn write(&self, line: &Line<'_>) -> bool {
        let Ok(mut bytes) = serde_json::to_vec(line) else { return false };
        bytes.push(b'\n');
        self.lines.as_ref().is_some_and(|lines| lines.try_send(bytes).is_ok())
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        self.lines = None;
        // Its panic would be ours, and was reported by its own hook.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes until there is nobody to send more; flushes whenever nothing waits.
fn write_all(file: File, lines: &Receiver<Vec<u8>>) {
    let mut file = BufWriter::new(file);
    while let Ok(line) = lines.recv() {
        let waiting = std::iter::once(line).chain(lines.try_iter());
        let written =
            waiting.into_iter().try_for_each(|line| file.write_all(&line)).and_then(|()| file.flush());
        if let Err(e) = written {
            tracing::error!(error = %e, "the accounting log cannot be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(n: u32) -> Line<'static> {
        Line {
            time_ms: 1,
            request_id: "r".into(),
            tenant: "acme",
            model: "m",
            api: "http",
            outcome: "ok",
            prompt_tokens: n,
            cached_tokens: 0,
            completion_tokens: 2,
            items: 1,
            encoded_items: 1,
            e2e_ms: 3,
        }
    }

    #[test]
    fn lines_are_appended_whole_and_are_there_when_the_writer_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("usage.jsonl");
        for round in 0..2 {
            let log = LogWriter::append(&path).unwrap();
            assert!((0..100).all(|n| log.write(&line(round * 100 + n))));
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let read = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let all: Vec<_> = text.lines().map(read).collect();
        assert_eq!(all.len(), 200);
        assert_eq!((&all[199]["prompt_tokens"], &all[0]["tenant"]), (&199.into(), &"acme".into()));
        assert!(LogWriter::append(dir.path()).is_err());
    }

    #[test]
    fn tenants_beyond_the_limit_share_a_series() {
        let accounting = Accounting::start(None, &MetricsRegistry::default()).unwrap();
        for n in 0..MAX_TENANTS {
            assert_eq!(accounting.0.label(&n.to_string()), n.to_string());
        }
        assert_eq!(accounting.0.label("one more"), OTHERS);
        assert_eq!(accounting.0.label("7"), "7");
    }
}
