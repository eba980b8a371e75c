//! The directory that a model is opened from, and the form in which its weights are read.
//!
//! Plain settings: nothing here touches a file.

use std::path::PathBuf;
use triptych_core::ModelName;

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LoadFormat {
    /// `model.safetensors`, or the shards of `model.safetensors.index.json`.
    #[default]
    Safetensors,
    /// Random weights of the configured shapes, the same for the same seed: for benchmarks.
    Dummy {
        /// Seed of the generator.
        seed: u64,
    },
}

/// Which directory to open and how.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// The directory. Its weight files are mapped, so nothing may change them while a process serves them.
    pub dir: PathBuf,
    /// The name to serve it under; `None`: the directory's own name.
    pub name: Option<ModelName>,
    /// Where weights come from.
    pub format: LoadFormat,
    /// Where quantized weights of earlier starts are; `None`: they are packed at every start.
    pub packed: Option<PackedFolder>,
}

/// A folder for packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedFolder {
    /// The folder; made when it is needed.
    pub dir: PathBuf,
    /// Weight files of fewer bytes together are packed at every start.
    pub min_bytes: u64,
    /// What the folder may hold. The files that were longest not used go first.
    pub max_bytes: u64,
}
