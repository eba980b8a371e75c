//! Errors of a measurement.

use thiserror::Error;
use triptych_engine::EngineError;
use triptych_models::ModelError;
use triptych_models::error::ItemError;

/// A measurement that failed.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The model cannot be loaded or computed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An item that was made for the measurement is not one that the model reads.
    #[error("the model does not read {what}: {source}")]
    Item {
        /// The item.
        what: String,
        /// The reason.
        source: ItemError,
    },
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine refused what it was given.
    #[error("the engine failed a sequence that was made for the measurement: {0}")]
    Sequence(String),
    /// Not one point fits the memory.
    #[error("keys and values of {needed} bytes are needed for the smallest step, {given} are given")]
    Memory {
        /// For one sequence of the shortest context.
        needed: usize,
        /// Given bytes.
        given: usize,
    },
    /// A thread that computed beside this one died.
    #[error("a measuring thread panicked")]
    Panicked,
}
