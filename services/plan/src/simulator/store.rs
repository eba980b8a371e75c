//! The EC store: what it holds, and transfers that share its bandwidth.

use super::agenda::Nanos;
use super::sharing::Sharing;
use super::spec::StoreSpec;
use super::worker::JobId;
use std::collections::HashMap;
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
    /// Whether transfers get in each other's way.
    pub(super) is_shared: bool,
    /// PD workers that wait for an output.
    waiting: HashMap<ContentKey, Vec<usize>>,
    /// Outputs on encoders' shelves, not in the store yet: how many jobs have them there.
    shelved: HashMap<ContentKey, usize>,
}

impl Store {
    pub(super) fn new(spec: &StoreSpec) -> Self {
        let capacity = usize::try_from(spec.capacity_bytes).unwrap_or(usize::MAX);
        Self {
            held: ByteCache::new(capacity),
            lines: Sharing::new(spec.parallel),
            is_shared: spec.parallel.is_finite(),
            waiting: HashMap::new(),
            shelved: HashMap::new(),
        }
    }

    /// Whether an output can be loaded, from here or from a shelf.
    pub(super) fn has(&mut self, key: &ContentKey) -> bool {
        self.shelved.contains_key(key) || self.held.get(key).is_some()
    }

    /// An output is here.
    pub(super) fn put(&mut self, key: ContentKey, bytes: u64) {
        self.held.insert(key, (), usize::try_from(bytes).unwrap_or(usize::MAX));
    }

    /// An encoder has an output in memory for whoever asks.
    pub(super) fn shelve(&mut self, key: ContentKey) {
        *self.shelved.entry(key).or_default() += 1;
    }

    /// It is in the store by now.
    pub(super) fn unshelve(&mut self, key: &ContentKey) {
        if let Some(n) = self.shelved.get_mut(key) {
            *n -= 1;
            if *n == 0 {
                self.shelved.remove(key);
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

    /// Those that wait for it.
    pub(super) fn waiting(&self, key: &ContentKey) -> &[usize] {
        self.waiting.get(key).map_or(&[], Vec::as_slice)
    }

    /// Those that wait for it; they wait no more.
    pub(super) fn told(&mut self, key: &ContentKey) -> Vec<usize> {
        self.waiting.remove(key).unwrap_or_default()
    }

    /// Begins a transfer that takes so long alone.
    pub(super) fn transfer(&mut self, now: Nanos, transfer: Transfer, work: Nanos) {
        self.lines.start(now, transfer, (work, 1.0));
    }
}
