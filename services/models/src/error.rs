//! Errors by the reader who can act on them: the operator (a model directory) or the client (an item, a prompt).

use std::path::PathBuf;
use thiserror::Error;
use triptych_core::Failure;
use triptych_kernels::KernelError;

/// A model directory cannot be served. Read by the operator.
#[derive(Debug, Error)]
pub enum ModelError {
    /// A file is missing or cannot be read.
    #[error("cannot read {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {message}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The defect.
        message: String,
    },
    /// A directory that holds something else than a model to serve.
    #[error("{path} {found}: {cure}")]
    Checkpoint {
        /// The directory, or the file in it.
        path: PathBuf,
        /// Cause, as the predicate of a sentence about the path.
        found: String,
        /// Cure, for the operator.
        cure: String,
    },
    /// A configuration key is missing or has a value that is not supported.
    #[error("{file}: {key} is {actual}, expected {expected}")]
    Config {
        /// Name of the file in the directory.
        file: &'static str,
        /// The key, dotted.
        key: String,
        /// The value found, or `missing`.
        actual: String,
        /// Values that are supported.
        expected: String,
    },
    /// A setting that a device does not have.
    #[error("{device}: {message}")]
    Device {
        /// The device, as the setting names it.
        device: String,
        /// The setting, and what the device has.
        message: String,
    },
    /// A tensor is missing.
    #[error("tensor {name} is missing (looked for {tried:?})")]
    MissingTensor {
        /// The first name tried.
        name: String,
        /// Stored names tried.
        tried: Vec<String>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor {name} is {actual:?}, the configuration says {expected:?}")]
    TensorShape {
        /// Stored name.
        name: String,
        /// From the configuration.
        expected: Vec<usize>,
        /// As stored.
        actual: Vec<usize>,
    },
    /// Arithmetic refused its arguments: our bug.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl ModelError {
    /// `true` if the device that computes is lost: whatever is asked of it fails from now on.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Kernel(KernelError::DeviceLost { .. }))
    }
}

impl ModelError {
    /// A configuration key that is missing.
    pub fn missing_key(file: &'static str, key: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Config { file, key: key.into(), actual: "missing".into(), expected: expected.into() }
    }
}

/// An item cannot be used. The text is for the client: it names what was found and what is allowed.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ItemError {
    /// Not a format that is read.
    #[error("{0}")]
    Unsupported(String),
    /// Starts right, then does not decode.
    #[error("{0}")]
    Corrupt(String),
    /// Over a limit.
    #[error("{what} is {actual}, the limit is {limit}")]
    TooLarge {
        /// The measured quantity.
        what: &'static str,
        /// The value found.
        actual: String,
        /// The value allowed.
        limit: String,
    },
    /// A text longer than the encoder's context, as [`PromptError::TooLong`] on the decoder's side.
    #[error("{what} has {actual} tokens, the encoder's context holds {limit}")]
    TooLong {
        /// The measured input.
        what: &'static str,
        /// Its tokens, special ones and an image's rows included.
        actual: usize,
        /// Tokens of the context.
        limit: usize,
    },
    /// Decodes, but holds nothing to encode.
    #[error("{0}")]
    Empty(String),
}

impl From<ItemError> for Failure {
    fn from(e: ItemError) -> Self {
        let class = match e {
            // As a prompt that is too long for the decoder.
            ItemError::TooLong { .. } => {
                return Self::new(triptych_core::FailureClass::TooLarge, e.to_string()).with_param("prompt");
            }
            ItemError::TooLarge { .. } => triptych_core::FailureClass::TooLarge,
            _ => triptych_core::FailureClass::InvalidArgument,
        };
        Self::new(class, e.to_string())
    }
}

/// A prompt cannot be laid out. The text is for the client.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PromptError {
    /// Empty, or the wrong kind for this model.
    #[error("{0}")]
    Invalid(String),
    /// Longer than the context.
    #[error("the prompt has {actual} tokens, the model's context holds {limit}")]
    TooLong {
        /// Tokens of the prompt, items included.
        actual: usize,
        /// Tokens of the context.
        limit: usize,
    },
    /// The chat template refused the messages.
    #[error("the model's chat template refused the messages: {0}")]
    Template(String),
}

impl From<PromptError> for Failure {
    fn from(e: PromptError) -> Self {
        match e {
            // As the engine refuses a prompt that fits the model's context and not its own.
            PromptError::TooLong { .. } => {
                Self::new(triptych_core::FailureClass::TooLarge, e.to_string()).with_param("prompt")
            }
            _ => Self::invalid(e.to_string()),
        }
    }
}
