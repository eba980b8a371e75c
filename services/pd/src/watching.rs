//! What a PD worker tells of itself while it runs: how busy it is, which encoder outputs it holds, whether it is
//! leaving.
//!
//! Told when it changes, at most ten times a second, to whoever watches; keys as what came and what went. A content
//! key tells nothing to whoever does not know tenant secret and item already, and this is told inside the cluster only.

use crate::service::Worker;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::time::sleep;
use tonic::Status;
use triptych_core::ContentKey;
use triptych_engine::Stats;
use triptych_proto::v1;

/// Most keys that are told.
pub const MAX_KEYS: usize = 4096;
/// The least pause between two messages.
pub const PAUSE: Duration = Duration::from_millis(100);
/// Shares of blocks are told in steps of one part in so many, so that not every token is news.
const SHARES: f32 = 64.0;

/// What a watcher knows.
#[derive(Debug, Default)]
struct Known {
    load: Option<v1::WorkerLoad>,
    draining: bool,
    keys: HashSet<ContentKey>,
}

/// Tells a watcher of every change until it goes away or the process closes its doors.
pub async fn tell(worker: Arc<Worker>, watcher: Sender<Result<v1::WorkerState, Status>>) {
    let mut known = Known::default();
    let mut closing = std::pin::pin!(worker.drain.closing());
    loop {
        if let Some(state) = known.news(&worker)
            && watcher.send(Ok(state)).await.is_err()
        {
            return;
        }
        tokio::select! {
            () = watcher.closed() => return,
            () = &mut closing => return,
            () = worker.drain.stopping(), if !known.draining => {}
            () = sleep(PAUSE) => {}
        }
    }
}

impl Known {
    /// What is new since the last call, if anything is.
    fn news(&mut self, worker: &Worker) -> Option<v1::WorkerState> {
        let (load, draining) = (worker.load(), worker.drain.is_stopping());
        let resident = worker.loads.resident(MAX_KEYS);
        let now: HashSet<ContentKey> = resident.iter().copied().collect();
        let wire = |key: &ContentKey| key.as_bytes().to_vec().into();
        let added: Vec<_> = resident.iter().filter(|key| !self.keys.contains(*key)).map(wire).collect();
        let removed: Vec<_> = self.keys.difference(&now).map(wire).collect();
        let same = self.load.as_ref() == Some(&load) && self.draining == draining;
        if same && added.is_empty() && removed.is_empty() {
            return None;
        }
        *self = Self { load: Some(load.clone()), draining, keys: now };
        Some(v1::WorkerState { load: Some(load), draining, resident_added: added, resident_removed: removed })
    }
}

impl Worker {
    /// How busy it is, all models together.
    fn load(&self) -> v1::WorkerLoad {
        let n_requests = self.max_requests.saturating_sub(self.places.available_permits());
        let stats: Vec<_> = self.models.values().map(|model| model.driver.stats()).collect();
        let beside = self.beside_load.as_ref().map(|load| load()).unwrap_or_default();
        load((n_requests, self.max_requests), &stats, beside)
    }
}

/// What a worker says of its load that has so many requests of so many at most, over the engines that these are the
/// counts of, and beside encoders with this load.
pub fn load(
    (n_requests, max_requests): (usize, usize),
    stats: &[Stats],
    beside: v1::WorkerLoad,
) -> v1::WorkerLoad {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    // The engines count sequences: a request has one or more, so no more requests wait than sequences do.
    let waiting = stats.iter().map(|s| s.waiting).sum::<usize>().min(n_requests);
    let share = |used: usize, total: usize| match total {
        0 => 0.0,
        total => ((used as f32 / total as f32) * SHARES).round() / SHARES,
    };
    let fullest = |shares: &mut dyn Iterator<Item = f32>| shares.fold(0.0, f32::max);
    v1::WorkerLoad {
        running: count(n_requests - waiting),
        waiting: count(waiting),
        capacity: count(max_requests),
        kv_usage: fullest(&mut stats.iter().map(|s| share(s.self_used, s.self_total))),
        cross_kv_usage: fullest(&mut stats.iter().map(|s| share(s.cross_used, s.cross_total))),
        waiting_tokens: stats.iter().map(|s| s.waiting_tokens as u64).sum(),
        // Of encoders in this process: the proxy gives them work too.
        queued_us: beside.queued_us,
        costs: beside.costs,
    }
}
