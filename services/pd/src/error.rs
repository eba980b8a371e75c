//! Reasons for which a PD worker cannot start, or ends.

use thiserror::Error;
use triptych_engine::EngineError;
use triptych_models::ModelError;
use triptych_runtime::serve::ServeError;

/// The worker cannot start, or ended by itself.
#[derive(Debug, Error)]
pub enum PdError {
    /// A model that cannot be served.
    #[error("cannot load the decoder of {dir}: {source}")]
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
    /// An adapter whose name is taken, or whose base model is not served or not said.
    #[error("adapter {name}: {message}")]
    AdapterName {
        /// Its name.
        name: String,
        /// The fault.
        message: String,
    },
    /// Memory that cannot be divided.
    #[error("{0}")]
    Memory(String),
    /// An engine that cannot be made.
    #[error("engine of {model}: {source}")]
    Engine {
        /// Model name.
        model: String,
        /// Cause.
        source: EngineError,
    },
    /// End of the gRPC server.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The system refused a thread for an engine.
    #[error("cannot start an engine thread: {0}")]
    Thread(#[from] std::io::Error),
    /// A loading thread panicked.
    #[error("loading ended early: {0}")]
    Loading(#[from] tokio::task::JoinError),
    /// The colocated services cannot start.
    #[error("cannot start the colocated services: {0}")]
    Colocated(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An engine panicked: our bug. The process must be replaced.
    #[error("an engine panicked")]
    EngineDied,
}
