//! The scheduler's role: decides what to load, inside an engine step. Synchronous; never waits, never fails.

use super::state::LoadState;
use super::types::{CacheStatus, EcConnectorMeta, ItemHint};
use crate::local::HoldOutcome;
use parking_lot::Mutex;
use std::sync::Arc;
use triptych_core::{EncodedItem, RequestId};

/// The scheduler's side of a connector. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct SchedulerRole {
    state: Arc<Mutex<LoadState>>,
}

impl SchedulerRole {
    pub(super) fn new(state: Arc<Mutex<LoadState>>) -> Self {
        Self { state }
    }

    /// Status of each item, in order.
    pub fn has_caches(&self, items: &[EncodedItem]) -> Vec<CacheStatus> {
        let state = self.state.lock();
        let status = |item: &EncodedItem| match item.key {
            key if state.local.contains(&key) => CacheStatus::Ready,
            key if state.is_pending(&key) => CacheStatus::Pending,
            _ => CacheStatus::Missing,
        };
        items.iter().map(status).collect()
    }

    /// Holds the items for the request if they fit the local budget beside those that other requests hold, before any load
    /// of them starts. Without this call the request's items are not counted.
    pub fn try_hold(&self, request: RequestId, items: &[EncodedItem]) -> HoldOutcome {
        self.state.lock().local.try_hold(request, items)
    }

    /// The request was allocated and needs the item: holds its rows until [`Self::request_finished`], and adds a load
    /// to the next meta unless the rows are here or being loaded. So an item that is `Ready` gives no
    /// [`super::Loaded`]: ask [`Self::has_caches`] after this call. Idempotent; after a failed load it requests the
    /// load again.
    pub fn update_state_after_alloc(&self, request: RequestId, item: &EncodedItem) {
        self.update_state_with_hint(request, item, &ItemHint::default());
    }

    /// The same, with a hint of where the output is, or that it is in encoding. Requests for one item share its load
    /// and their hints.
    pub fn update_state_with_hint(&self, request: RequestId, item: &EncodedItem, hint: &ItemHint) {
        self.state.lock().want(request, item, hint);
    }

    /// The loads requested since the last call.
    pub fn build_connector_meta(&self) -> EcConnectorMeta {
        EcConnectorMeta { loads: self.state.lock().hand_over() }
    }

    /// The request ended: releases what it holds, and drops loads that have not begun and that no other request wants.
    /// Idempotent.
    pub fn request_finished(&self, request: RequestId) {
        self.state.lock().forget(request);
    }
}
