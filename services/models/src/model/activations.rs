//! Memory of activations, foretold: a forward over tensors that are sizes alone ([`FootprintBackend`]).

use super::FootprintBackend;
use crate::encoder::{Encoder, TransformerEncoder};
use crate::error::ModelError;
use crate::preprocess::EncoderInput;
use crate::spec::EncoderSpec;
use crate::weights::Weights;
use triptych_kernels::{Backend, Precision};

/// Most bytes of activations that a forward of a batch has at once on the CPU back end, its outputs included. It runs twice: a
/// thread keeps memory of the first for the second.
///
/// # Errors
/// As [`Model::load_encoder`], and [`ModelError::Kernel`] for inputs of another encoder.
pub fn activation_bytes(
    tower: &EncoderSpec,
    weights: &Weights,
    precision: Precision,
    batch: &[&EncoderInput],
) -> Result<usize, ModelError> {
    let backend = FootprintBackend::new(precision)?.for_encoders();
    // Not behind `dyn`: the code of a forward is compiled for this back end once, and that of graphs not at all.
    let mut encoder = TransformerEncoder::load(tower, weights, &backend)?;
    for _ in 0..2 {
        encoder.encode(batch)?;
        backend.drop_results();
    }
    Ok(backend.activation_bytes())
}
