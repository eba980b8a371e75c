//! What stops an engine from starting. What goes wrong later is a `Failure` of a sequence.

use thiserror::Error;
use triptych_models::ModelError;

/// An engine cannot start. Read by the operator.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A setting that cannot work with this model.
    #[error("{setting} is {actual}, needed is {needed}")]
    Setting {
        /// Its name in [`EngineConfig`](crate::EngineConfig).
        setting: &'static str,
        /// As given.
        actual: usize,
        /// What would do.
        needed: String,
    },
    /// A draft model that another model cannot be guessed with.
    #[error("the draft model's {what} is {actual}, the model's is {expected}")]
    Draft {
        /// What they have to agree in.
        what: &'static str,
        /// The draft model's.
        actual: usize,
        /// The model's.
        expected: usize,
    },
    /// The KV caches could not be had.
    #[error("KV caches cannot be allocated")]
    Kv(#[source] ModelError),
}
