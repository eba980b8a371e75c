//! The encode stage: features of items to encoder output rows.
//!
//! [`Encoder`] is what a worker drives; [`TransformerEncoder`] implements it over any back end, and a spec tells it
//! which model it is. [`TiledEncoder`] is for models that cut images into tiles, whose rows are not one sequence.

use crate::error::ModelError;
use crate::preprocess::EncoderInput;

mod layout;
mod pieces;
mod plane;
mod stem;
mod tiled;
mod transformer;

pub use tiled::TiledEncoder;
pub use transformer::TransformerEncoder;

/// An encoder with its weights on a back end.
///
/// Sync and single-threaded from outside: one forward at a time, from one thread. The rows of an item do not
/// depend on what else is in the batch.
pub trait Encoder: Send {
    /// Width of an output row.
    fn hidden(&self) -> usize;

    /// Encodes a batch. Result `i` holds the rows of `batch[i]`: `[n_tokens, hidden]`, row-major.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] only if an input does not come from this model's own preprocessor.
    fn encode(&mut self, batch: &[&EncoderInput]) -> Result<Vec<Vec<f32>>, ModelError>;
}
