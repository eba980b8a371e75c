//! The directory that a model is opened from, and the form in which its weights are read.
//!
//! Plain settings: nothing here touches a file.

use std::path::PathBuf;
use triptych_core::ModelName;

/// Source of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LoadFormat {
    /// The directory's weight files: `model.safetensors`, the shards of `model.safetensors.index.json`, or where there are
    /// none `pytorch_model.bin`, the shards of `pytorch_model.bin.index.json`.
    #[default]
    Safetensors,
    /// Random weights of the configured shapes, the same for the same seed: for benchmarks.
    Dummy {
        /// Seed of the generator.
        seed: u64,
    },
}

/// A model directory, and the way to open it.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// The directory. Its weight files are mapped, so nothing may change them while a process serves them.
    pub dir: PathBuf,
    /// The name to serve it under; `None`: the directory's own name.
    pub name: Option<ModelName>,
    /// Source of the weights.
    pub format: LoadFormat,
    /// Folder with packed weights of earlier starts; `None`: quantized weights are packed at every start.
    pub packed: Option<PackedFolder>,
}

/// A folder for packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedFolder {
    /// The folder; created when it is needed.
    pub dir: PathBuf,
    /// Models whose weight files have fewer bytes are packed at every start.
    pub min_bytes: u64,
    /// Bytes that the folder may hold. The least recently used files are removed first.
    pub max_bytes: u64,
}
