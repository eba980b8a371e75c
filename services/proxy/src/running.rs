//! Requests that are worked on, and those that ended a moment ago, for an operator who looks for one by its id.
//!
//! Ids, counts and times, no content; a tenant is a hash. Bounded: as many requests as are admitted, and the last
//! [`MAX_ENDED`].

use crate::request_log::{Progress, RequestRecord};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use triptych_core::{ModelName, RequestId};

/// Requests that are remembered after their end.
pub const MAX_ENDED: usize = 1024;

/// All of them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct RequestTable(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<RequestId, Entry>,
    ended: VecDeque<RequestStatus>,
}

/// Facts about a request that do not change.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its id.
    pub id: RequestId,
    /// Name of the API that it came through.
    pub api: &'static str,
    /// The model that answers.
    pub model: ModelName,
    /// Hash of its tenant.
    pub tenant: String,
    /// Number of its items.
    pub n_items: usize,
    /// Time of its arrival.
    pub arrived: Instant,
    /// Its progress.
    pub record: Arc<RequestRecord>,
    /// Ends it.
    pub abort: CancellationToken,
}

/// A request as an operator sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestStatus {
    /// Its id.
    pub request_id: String,
    /// `waiting`, `encoding`, `prefill`, `decode` or `ended`.
    pub state: &'static str,
    /// `http` or `grpc`.
    pub api: &'static str,
    /// The model that answers.
    pub model: String,
    /// Hash of its tenant.
    pub tenant: String,
    /// Number of its items.
    pub items: usize,
    /// The PD worker that was asked last.
    pub pd_worker: Option<String>,
    /// Number of times that it was sent again.
    pub retries: u32,
    /// Tokens that were written.
    pub tokens: usize,
    /// Milliseconds from its arrival until now, or its end.
    pub age_ms: u64,
    /// Milliseconds from its arrival to its first token.
    pub ttft_ms: Option<u64>,
    /// `ok`, or the class of its failure; `None` while it runs.
    pub outcome: Option<&'static str>,
}

impl Entry {
    fn status(&self, outcome: Option<&'static str>) -> RequestStatus {
        let Progress { pd, n_retries, first_token, n_tokens } = self.record.progress();
        let state = match (&pd, first_token) {
            _ if outcome.is_some() => "ended",
            (_, Some(_)) => "decode",
            (Some(_), None) => "prefill",
            (None, None) if self.n_items > 0 => "encoding",
            (None, None) => "waiting",
        };
        RequestStatus {
            request_id: self.id.to_string(),
            state,
            api: self.api,
            model: self.model.to_string(),
            tenant: self.tenant.clone(),
            items: self.n_items,
            pd_worker: pd.map(|worker| worker.to_string()),
            retries: n_retries,
            tokens: n_tokens,
            age_ms: ms(self.arrived.elapsed()),
            ttft_ms: first_token.map(ms),
            outcome,
        }
    }
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A request's place in the table; it leaves with the guard.
#[derive(Debug)]
pub struct Registered {
    table: RequestTable,
    /// The request.
    pub entry: Entry,
    outcome: Mutex<&'static str>,
}

impl Registered {
    /// Notes how it ends.
    pub fn ends(&self, outcome: &'static str) {
        *self.outcome.lock() = outcome;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let status = self.entry.status(Some(*self.outcome.lock()));
        let mut table = self.table.0.lock();
        table.running.remove(&self.entry.id);
        if table.ended.len() >= MAX_ENDED {
            table.ended.pop_front();
        }
        table.ended.push_back(status);
    }
}

impl RequestTable {
    /// A request that begins.
    pub fn register(&self, entry: Entry) -> Registered {
        self.0.lock().running.insert(entry.id, entry.clone());
        Registered { table: self.clone(), entry, outcome: Mutex::new("cancelled") }
    }

    /// Requests that run, the oldest first.
    pub fn running(&self) -> Vec<RequestStatus> {
        let mut all: Vec<_> = self.0.lock().running.values().map(|entry| entry.status(None)).collect();
        all.sort_by_key(|status| std::cmp::Reverse(status.age_ms));
        all
    }

    /// A request that runs, or ended a moment ago.
    pub fn find(&self, id: RequestId) -> Option<RequestStatus> {
        let table = self.0.lock();
        let name = id.to_string();
        let running = table.running.get(&id).map(|entry| entry.status(None));
        running.or_else(|| table.ended.iter().rev().find(|status| status.request_id == name).cloned())
    }

    /// Ends a request with an error. False: it does not run.
    pub fn abort(&self, id: RequestId) -> bool {
        let token = self.0.lock().running.get(&id).map(|entry| entry.abort.clone());
        token.inspect(CancellationToken::cancel).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::WorkerId;
    use triptych_proto::v1;

    fn entry(n: u128, n_items: usize) -> Entry {
        Entry {
            id: RequestId::from_bits(n),
            api: "http",
            model: ModelName::new("m"),
            tenant: "t".into(),
            n_items,
            arrived: Instant::now(),
            record: Arc::default(),
            abort: CancellationToken::new(),
        }
    }

    #[tokio::test]
    async fn a_request_is_found_in_each_of_its_states_and_after_its_end() {
        let table = RequestTable::default();
        let (entry, text) = (entry(1, 1), entry(2, 0));
        let id = entry.id;
        let registered = table.register(entry.clone());
        let _other = table.register(text.clone());
        let state = || table.find(id).unwrap().state;
        assert_eq!((state(), table.find(text.id).unwrap().state), ("encoding", "waiting"));
        entry.record.sent_to(&WorkerId::new("pd@h:1"));
        assert_eq!(state(), "prefill");
        entry
            .record
            .wrote(&v1::Delta { token_ids: vec![1, 2], ..Default::default() }, Duration::from_millis(7));
        assert_eq!((state(), table.running().len()), ("decode", 2));
        registered.ends("ok");
        drop(registered);
        let status = table.find(id).unwrap();
        assert_eq!(
            (status.state, status.outcome, status.tokens, status.ttft_ms),
            ("ended", Some("ok"), 2, Some(7))
        );
        assert_eq!(status.pd_worker.as_deref(), Some("pd@h:1"));
        assert!(!table.abort(id) && table.abort(text.id) && text.abort.is_cancelled());
    }

    #[tokio::test]
    async fn the_oldest_ended_requests_are_forgotten() {
        let table = RequestTable::default();
        for n in 0..=MAX_ENDED as u128 {
            drop(table.register(entry(n, 0)));
        }
        assert!(table.find(RequestId::from_bits(0)).is_none());
        assert_eq!(table.find(RequestId::from_bits(1)).unwrap().outcome, Some("cancelled"));
    }
}
