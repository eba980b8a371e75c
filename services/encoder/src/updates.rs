//! Settings by which an encoder worker loads models while it serves others.

use crate::batcher::BatcherConfig;
use crate::loader::LoadSettings;
use crate::memory::WorkerMemory;
use crate::meters::EncoderMeters;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::Mutex;
use triptych_core::Failure;
use triptych_runtime::worker_admin::not_allowed;

/// Loading of models beside those that are served.
pub struct ModelUpdates {
    /// Directory below which operators name models; `None`: models are those of the start.
    pub root: Option<PathBuf>,
    /// Settings of loading.
    pub loader: Arc<LoadSettings>,
    /// The division of a stated memory; `None`: none is stated.
    pub memory: Option<WorkerMemory>,
    /// Settings of the threads.
    pub batcher: BatcherConfig,
    /// Metrics.
    pub meters: Arc<EncoderMeters>,
    /// Held while models change.
    pub one_at_a_time: Mutex<()>,
}

impl ModelUpdates {
    /// The directory below which models may be named.
    ///
    /// # Errors
    /// Invalid where models are those of the start.
    pub fn allowed(&self) -> Result<&Path, Failure> {
        self.root.as_deref().ok_or_else(not_allowed)
    }
}
