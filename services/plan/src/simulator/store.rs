//! The EC store: what it holds, and transfers that share its bandwidth.

use super::event_queue::Nanos;
use super::sharing::Sharing;
use super::spec::StoreSpec;
use super::worker::JobId;
use std::collections::{HashMap, HashSet};
use triptych_core::ContentKey;
use triptych_ec::cache::ByteCache;

/// A transfer to or from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// The rows of a job.
    Publish(JobId),
    /// Rows that can be had from an encoder's memory meanwhile.
    Behind { key: ContentKey, bytes: u64 },
    /// To a PD worker.
    Load { worker: usize, key: ContentKey },
}

/// The store.
pub(super) struct Store {
    held: ByteCache<()>,
    pub(super) lines: Sharing<Transfer>,
    /// True if transfers get in each other's way.
    pub(super) is_shared: bool,
    /// PD workers that wait for an output.
    waiting: HashMap<ContentKey, Vec<usize>>,
    /// Outputs in encoders' peer caches, not in the store yet, and the number of jobs that have them there.
    in_peer_caches: HashMap<ContentKey, usize>,
    /// Outputs that were there before the first request.
    from_start: HashSet<ContentKey>,
}

impl Store {
    pub(super) fn new(spec: &StoreSpec) -> Self {
        let capacity = usize::try_from(spec.capacity_bytes).unwrap_or(usize::MAX);
        Self {
            held: ByteCache::new(capacity),
            lines: Sharing::new(spec.parallel),
            is_shared: spec.parallel.is_finite(),
            waiting: HashMap::new(),
            in_peer_caches: HashMap::new(),
            from_start: HashSet::new(),
        }
    }

    /// True if an output can be loaded, from here or from a peer cache.
    pub(super) fn has(&mut self, key: &ContentKey) -> bool {
        self.in_peer_caches.contains_key(key) || self.held.get(key).is_some()
    }

    /// An output is here that was here before the first request, in which case only its first mention tells.
    pub(super) fn hold_from_start(&mut self, key: ContentKey, bytes: u64) {
        if self.from_start.insert(key) {
            self.put(key, bytes);
        }
    }

    /// An output is here.
    pub(super) fn put(&mut self, key: ContentKey, bytes: u64) {
        self.held.insert(key, (), usize::try_from(bytes).unwrap_or(usize::MAX));
    }

    /// An encoder has an output in memory for any caller.
    pub(super) fn hold_in_peer_cache(&mut self, key: ContentKey) {
        *self.in_peer_caches.entry(key).or_default() += 1;
    }

    /// It is in the store by now.
    pub(super) fn drop_from_peer_cache(&mut self, key: &ContentKey) {
        if let Some(n) = self.in_peer_caches.get_mut(key) {
            *n -= 1;
            if *n == 0 {
                self.in_peer_caches.remove(key);
            }
        }
    }

    /// A PD worker waits for an output.
    pub(super) fn wait(&mut self, key: ContentKey, worker: usize) {
        let waiting = self.waiting.entry(key).or_default();
        if !waiting.contains(&worker) {
            waiting.push(worker);
        }
    }

    /// Those that wait for it; they wait no more.
    pub(super) fn take_waiting(&mut self, key: &ContentKey) -> Vec<usize> {
        self.waiting.remove(key).unwrap_or_default()
    }

    /// Begins a transfer that takes so long alone.
    pub(super) fn transfer(&mut self, now: Nanos, transfer: Transfer, work: Nanos) {
        self.lines.start(now, transfer, (work, 1.0));
    }
}
