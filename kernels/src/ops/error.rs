//! The error of every op.

use thiserror::Error;

/// A shape or index that an op cannot take. Always a bug of the caller: nothing a client sends reaches it.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum KernelError {
    /// Two shapes that must agree do not.
    #[error("{op}: {what} is {actual:?}, expected {expected:?}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Dimensions that the op takes.
        expected: Vec<usize>,
        /// Dimensions that it was given.
        actual: Vec<usize>,
    },
    /// An index out of range.
    #[error("{op}: {what} {index} is out of {len}")]
    Index {
        /// The op.
        op: &'static str,
        /// The thing that is indexed.
        what: &'static str,
        /// The index.
        index: usize,
        /// Number of valid indices.
        len: usize,
    },
    /// A handle of an array of another step.
    #[error("{op}: an array of another step")]
    Step {
        /// The op.
        op: &'static str,
    },
    /// An instruction set that was set by the caller and that the machine lacks.
    #[error("instruction set {0} is not on this machine")]
    Isa(&'static str),
    /// The device has no room. What was asked for was not done; the device can be used further.
    #[error("{op}: out of device memory ({message})")]
    OutOfMemory {
        /// The op.
        op: &'static str,
        /// The driver's message.
        message: String,
    },
    /// The device gives errors from now on, and its memory is lost: the process has to be replaced.
    #[error("{op}: the device is lost ({message})")]
    DeviceLost {
        /// The op.
        op: &'static str,
        /// The driver's message.
        message: String,
    },
    /// Work that cannot be captured as a graph, such as a copy to the host. It can be computed without one.
    #[error("{op}: cannot be captured as a graph")]
    NotCapturable {
        /// The op.
        op: &'static str,
    },
    /// An error of a library that the back end uses.
    #[error("{op}: {message}")]
    Library {
        /// The op.
        op: &'static str,
        /// The library's message.
        message: String,
    },
}

/// Result of an op.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;
