//! Errors that stop an engine from starting. Later errors are a `Failure` of a sequence.

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
        /// Configured value.
        actual: usize,
        /// Allowed values.
        needed: String,
    },
    /// A draft model that does not fit the model.
    #[error("the draft model's {what} is {actual}, the model's is {expected}")]
    Draft {
        /// Property that must agree.
        what: &'static str,
        /// Value of the draft model.
        actual: usize,
        /// Value of the model.
        expected: usize,
    },
    /// A method that a model cannot be served with.
    #[error("{setting} does not go with {model}, needed is {needed}")]
    Unsupported {
        /// Name of the setting in [`EngineConfig`](crate::EngineConfig).
        setting: &'static str,
        /// Property of the model that rules it out.
        model: &'static str,
        /// Allowed value.
        needed: &'static str,
    },
    /// The KV caches cannot be allocated.
    #[error("KV caches cannot be allocated")]
    Kv(#[source] ModelError),
}
