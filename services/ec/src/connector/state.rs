//! What the two roles share: the local cache, and how far each load is. Behind one lock that is held for a few
//! map operations and never across an await.

use crate::local::LocalCache;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use triptych_core::{ContentKey, EncodedItem, RequestId};

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In `wanted`.
    Wanted,
    /// In a meta that is on its way to the worker's role.
    Handed,
    /// Under way.
    Loading,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) local: LocalCache,
    /// Items to load with the next meta.
    wanted: VecDeque<EncodedItem>,
    /// Every key with a load. Those that are `Wanted` are exactly those in `wanted`.
    stages: HashMap<ContentKey, Stage>,
}

/// Takes the lock. A panic under it leaves whole maps behind, so poison is ignored.
pub(super) fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub(super) fn new(budget_bytes: usize) -> Self {
        Self { local: LocalCache::new(budget_bytes), wanted: VecDeque::new(), stages: HashMap::new() }
    }

    pub(super) fn is_pending(&self, key: &ContentKey) -> bool {
        self.stages.contains_key(key)
    }

    pub(super) fn want(&mut self, request: RequestId, item: &EncodedItem) {
        self.local.hold(request, item.key);
        if !self.local.contains(&item.key) && !self.is_pending(&item.key) {
            self.stages.insert(item.key, Stage::Wanted);
            self.wanted.push_back(item.clone());
        }
    }

    pub(super) fn hand_over(&mut self) -> Vec<EncodedItem> {
        for item in &self.wanted {
            self.stages.insert(item.key, Stage::Handed);
        }
        self.wanted.drain(..).collect()
    }

    /// Forgets the request, and the loads that nobody else wants and that have not begun.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.local.release(request);
        let Self { local, wanted, stages } = self;
        wanted.retain(|item| {
            let keep = local.is_held(&item.key);
            if !keep {
                stages.remove(&item.key);
            }
            keep
        });
    }

    /// Begins a load. False if one is under way.
    pub(super) fn begin(&mut self, key: ContentKey) -> bool {
        let before = self.stages.insert(key, Stage::Loading);
        if before == Some(Stage::Wanted) {
            self.wanted.retain(|item| item.key != key);
        }
        before != Some(Stage::Loading)
    }

    /// Ends whatever load the key has.
    pub(super) fn end(&mut self, key: &ContentKey) {
        if self.stages.remove(key) == Some(Stage::Wanted) {
            self.wanted.retain(|item| item.key != *key);
        }
    }

    /// Ends the load that the key has, unless it is under way: that one ends by itself.
    pub(super) fn settle(&mut self, key: &ContentKey) {
        if self.stages.get(key) != Some(&Stage::Loading) {
            self.end(key);
        }
    }

    /// Number of loads under way.
    pub(super) fn n_loading(&self) -> usize {
        self.stages.values().filter(|stage| **stage == Stage::Loading).count()
    }
}
