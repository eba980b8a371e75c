//! Reasons for which an encoder worker cannot start, or ends.

use thiserror::Error;
use triptych_models::ModelError;
use triptych_runtime::serve::ServeError;

/// The worker cannot start, or its server ended.
#[derive(Debug, Error)]
pub enum EncoderError {
    /// A model that cannot be served.
    #[error("cannot load the encoder of {dir}: {source}")]
    Model {
        /// Model directory.
        dir: String,
        /// Cause.
        source: ModelError,
    },
    /// An adapter that cannot be served.
    #[error("cannot load the adapter {name}: {source}")]
    Adapter {
        /// Its name.
        name: String,
        /// Cause.
        source: ModelError,
    },
    /// An encoder that does not take an adapter.
    #[error("cannot load the adapter {name}: {message}")]
    AdapterOfEncoder {
        /// Its name.
        name: String,
        /// Cause.
        message: String,
    },
    /// Memory that does not hold the models.
    #[error("{0}")]
    Memory(String),
    /// End of the gRPC server.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A loading thread panicked.
    #[error("loading ended early: {0}")]
    Loading(#[from] tokio::task::JoinError),
}
