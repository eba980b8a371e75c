//! State shared by the two roles: the local cache, and the stage of each load. Behind one lock that is held for a few
//! map operations and never across an await.

use super::types::{ItemHint, LoadOrder};
use crate::local::LocalCache;
use std::collections::{HashMap, VecDeque};
use triptych_core::{ContentKey, EncodedItem, RequestId};

/// LoadStage of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadStage {
    /// In `wanted`.
    Wanted,
    /// In a meta that is on its way to the worker's role.
    Handed,
    /// In flight.
    Loading,
}

#[derive(Debug)]
pub(super) struct LoadState {
    pub(super) local: LocalCache,
    /// Items to load with the next meta.
    wanted: VecDeque<EncodedItem>,
    /// LoadStage of every key with a load. The `Wanted` ones are exactly those in `wanted`.
    stages: HashMap<ContentKey, LoadStage>,
    /// Merged hints of all requesters; only for keys in `stages`.
    hints: HashMap<ContentKey, ItemHint>,
}

impl LoadState {
    pub(super) fn new(budget_bytes: usize) -> Self {
        Self {
            local: LocalCache::new(budget_bytes),
            wanted: VecDeque::new(),
            stages: HashMap::new(),
            hints: HashMap::new(),
        }
    }

    pub(super) fn is_pending(&self, key: &ContentKey) -> bool {
        self.stages.contains_key(key)
    }

    pub(super) fn want(&mut self, request: RequestId, item: &EncodedItem, hint: &ItemHint) {
        self.local.hold(request, item.key);
        if self.local.contains(&item.key) {
            return;
        }
        if !self.is_pending(&item.key) {
            self.stages.insert(item.key, LoadStage::Wanted);
            self.wanted.push_back(item.clone());
        }
        self.learn(item.key, hint);
    }

    /// Merges a hint into those of a key with a load.
    pub(super) fn learn(&mut self, key: ContentKey, hint: &ItemHint) {
        if self.stages.contains_key(&key) {
            self.hints.entry(key).or_default().add(hint);
        }
    }

    /// The merged hints of a key.
    pub(super) fn hint(&self, key: &ContentKey) -> ItemHint {
        self.hints.get(key).cloned().unwrap_or_default()
    }

    pub(super) fn hand_over(&mut self) -> Vec<LoadOrder> {
        for item in &self.wanted {
            self.stages.insert(item.key, LoadStage::Handed);
        }
        let Self { wanted, hints, .. } = self;
        let order = |item: EncodedItem| {
            let hint = hints.get(&item.key).cloned().unwrap_or_default();
            LoadOrder { item, hint }
        };
        wanted.drain(..).map(order).collect()
    }

    /// Releases the request, and drops loads that have not begun and that no other request wants.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.local.release(request);
        let Self { local, wanted, stages, hints } = self;
        wanted.retain(|item| {
            let keep = local.is_held(&item.key);
            if !keep {
                stages.remove(&item.key);
                hints.remove(&item.key);
            }
            keep
        });
    }

    /// Begins a load. False if one is in flight.
    pub(super) fn begin(&mut self, key: ContentKey) -> bool {
        let before = self.stages.insert(key, LoadStage::Loading);
        if before == Some(LoadStage::Wanted) {
            self.wanted.retain(|item| item.key != key);
        }
        before != Some(LoadStage::Loading)
    }

    /// Ends the key's load, if any.
    pub(super) fn end(&mut self, key: &ContentKey) {
        self.hints.remove(key);
        if self.stages.remove(key) == Some(LoadStage::Wanted) {
            self.wanted.retain(|item| item.key != *key);
        }
    }

    /// Ends the key's load, unless it is in flight: that one ends by itself.
    pub(super) fn settle(&mut self, key: &ContentKey) {
        if self.stages.get(key) != Some(&LoadStage::Loading) {
            self.end(key);
        }
    }

    /// Number of loads in flight.
    pub(super) fn n_loading(&self) -> usize {
        self.stages.values().filter(|stage| **stage == LoadStage::Loading).count()
    }
}
