//! A Hugging Face directory, opened: configuration, tokenizer and processor read and checked, weights not yet.

use crate::decoder::Decoder;
use crate::encoder::Encoder;
use crate::error::ModelError;
use crate::preprocess::Preprocess;
use crate::prompt::PromptBuilder;
use crate::spec::ModelSpec;
use crate::tokenization::Tokenizer;
use std::path::PathBuf;
use std::sync::Arc;
use triptych_core::{DType, Fingerprint, Modality, ModelName};
use triptych_kernels::Backend;

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
    /// The directory.
    pub dir: PathBuf,
    /// The name to serve it under; `None`: the directory's own name.
    pub name: Option<ModelName>,
    /// Where weights come from.
    pub format: LoadFormat,
}
