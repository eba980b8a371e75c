//! The loaded adapters of an engine.

use std::collections::BTreeMap;
use triptych_core::AdapterId;

/// State of a loaded adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterState {
    /// Sequences may name it.
    Serving,
    /// It goes when nothing needs it any more.
    Leaving,
}

/// The loaded adapters.
#[derive(Debug, Default)]
pub struct EngineAdapters(pub BTreeMap<AdapterId, AdapterState>);
