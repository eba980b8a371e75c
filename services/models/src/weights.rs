//! Stored tensors by name: memory-mapped files of safetensors or torch, or random values of the same shapes.
//!
//! It knows file formats and names, no model and no back end.

mod dequantize;
mod dummy;
mod files;
mod quantized;
mod stored;
mod tensor;
pub mod torch;

pub use files::{WeightFormat, files};
pub use stored::{NamedTensor, StoredWeights};
pub use tensor::{Tensor, TensorRole};

use crate::error::ModelError;
use crate::source::LoadFormat;
use quantized::QuantizedWeight;
use std::path::Path;
use tensor::TensorBytes;
use triptych_core::DType;

/// The tensors of a model directory.
#[derive(Debug)]
pub enum Weights {
    /// Stored in files.
    Stored(StoredWeights),
    /// Random, from a seed: any name exists, in the shape that is asked for.
    Dummy {
        /// Seed of the generator.
        seed: u64,
    },
}

impl Weights {
    /// Opens the weights of a directory; reads headers only.
    ///
    /// # Errors
    /// [`ModelError::File`] or [`ModelError::Format`] for files that are missing or not whole.
    pub fn open(dir: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        match format {
            LoadFormat::Safetensors => StoredWeights::open(dir).map(Self::Stored),
            LoadFormat::Dummy { seed } => Ok(Self::Dummy { seed }),
        }
    }

    /// Opens stored weights to see what a loader takes of them; see [`StoredWeights::taken`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn survey(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self::Stored(StoredWeights::open(dir)?.surveyed()))
    }

    /// True if a tensor is stored under one of `names`; never for random weights.
    pub fn has(&self, names: &[String]) -> bool {
        match self {
            Self::Stored(stored) => stored.has(names) || QuantizedWeight::find(stored, names).is_some(),
            Self::Dummy { .. } => false,
        }
    }

    /// The tensor stored under the first of `names` that exists.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] with all names tried; [`ModelError::TensorShape`] if it is not `shape`.
    pub fn tensor(
        &self,
        names: &[String],
        shape: &[usize],
        role: TensorRole,
    ) -> Result<Tensor<'_>, ModelError> {
        match self {
            Self::Stored(stored) => match QuantizedWeight::find(stored, names) {
                Some(quantized) => quantized.tensor(shape),
                None => stored.tensor(names, shape),
            },
            Self::Dummy { seed } => Ok(Tensor::new(
                DType::Bf16,
                shape.to_vec(),
                TensorBytes::Owned(dummy::values(*seed, names, shape, role)),
            )),
        }
    }
}
