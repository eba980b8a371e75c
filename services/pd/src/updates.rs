//! Settings by which a PD worker loads models while it serves others.

use crate::loader::{DecoderLoader, EngineStarter};
use crate::memory_needs::MemorySettings;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::Mutex;
use triptych_core::Failure;
use triptych_runtime::worker_admin::not_allowed;

/// Loading of models beside those that are served.
pub struct ModelUpdates {
    root: Option<PathBuf>,
    /// Settings of loading.
    pub loader: DecoderLoader,
    /// Parts of engines' threads.
    pub starter: EngineStarter,
    /// Settings by which a stated memory is divided; `None`: none is stated.
    pub memory: Option<Arc<MemorySettings>>,
    /// Held while models change.
    pub one_at_a_time: Mutex<()>,
}

impl ModelUpdates {
    /// Loads from below `root`; `None`: never.
    pub fn new(
        root: Option<PathBuf>,
        loader: DecoderLoader,
        starter: EngineStarter,
        memory: Option<MemorySettings>,
    ) -> Self {
        Self { root, loader, starter, memory: memory.map(Arc::new), one_at_a_time: Mutex::default() }
    }

    /// The directory below which models may be named.
    ///
    /// # Errors
    /// Invalid where models are those of the start.
    pub fn allowed(&self) -> Result<&Path, Failure> {
        self.root.as_deref().ok_or_else(not_allowed)
    }
}
