//! What the two roles share: the local cache, and how far each load is. Behind one lock that is held for a few
//! map operations and never across an await.

use super::types::{ItemHint, LoadOrder};
use crate::local::LocalCache;
use std::collections::{HashMap, VecDeque};
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
pub(super) struct LoadState {
    pub(super) local: LocalCache,
    /// Items to load with the next meta.
    wanted: VecDeque<EncodedItem>,
    /// Every key with a load. Those that are `Wanted` are exactly those in `wanted`.
    stages: HashMap<ContentKey, Stage>,
    /// What is known of where their outputs are, of all who asked; of keys in `stages` only.
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
            self.stages.insert(item.key, Stage::Wanted);
            self.wanted.push_back(item.clone());
        }
        self.learn(item.key, hint);
    }

    /// Adds to what is known of where the output of a key with a load is.
    pub(super) fn learn(&mut self, key: ContentKey, hint: &ItemHint) {
        if self.stages.contains_key(&key) {
            self.hints.entry(key).or_default().add(hint);
        }
    }

    /// What is known of where the output is.
    pub(super) fn hint(&self, key: &ContentKey) -> ItemHint {
        self.hints.get(key).cloned().unwrap_or_default()
    }

    pub(super) fn hand_over(&mut self) -> Vec<LoadOrder> {
        for item in &self.wanted {
            self.stages.insert(item.key, Stage::Handed);
        }
        let Self { wanted, hints, .. } = self;
        let order = |item: EncodedItem| {
            let hint = hints.get(&item.key).cloned().unwrap_or_default();
            LoadOrder { item, hint }
        };
        wanted.drain(..).map(order).collect()
    }

    /// Forgets the request, and the loads that nobody else wants and that have not begun.
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
        self.hints.remove(key);
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
