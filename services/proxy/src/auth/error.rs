//! Errors of authentication: a file that cannot be used, and a client that is not let in.

use std::path::PathBuf;
use thiserror::Error;
use triptych_core::{Failure, FailureClass};

/// A file of credentials that cannot be used.
#[derive(Debug, Error)]
pub enum AuthError {
    /// Reading failed.
    #[error("{} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The content is not valid.
    #[error("{}{}: {reason}", path.display(), line.map(|n| format!(", line {n}")).unwrap_or_default())]
    Content {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: Option<usize>,
        /// The mistake, and the values that are allowed. Never a key.
        reason: String,
    },
}

/// A failure of class Unauthenticated.
pub(super) fn unauthenticated(message: &str) -> Failure {
    Failure::new(FailureClass::Unauthenticated, message)
}
