//! Errors of measurements, by the caller's possible action.

use std::error::Error;
use std::fmt::{Display, Write as _};

/// A measurement that did not begin or did not end. The text is for the person who asked for it.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// A setting, a file or a directory is wrong: the same call fails the same way.
    #[error("{0}")]
    Setting(String),
    /// Something else is in the way: the same call may succeed later.
    #[error("{0}")]
    Failed(String),
}

impl MeasureError {
    /// A wrong setting, with its causes.
    pub fn setting(what: impl Display, cause: &dyn Error) -> Self {
        Self::Setting(format!("{what}: {}", chain(cause)))
    }

    /// A failure, with its causes.
    pub fn failed(what: impl Display, cause: &dyn Error) -> Self {
        Self::Failed(format!("{what}: {}", chain(cause)))
    }
}

/// An error with its causes on one line; a cause that its parent's text holds already is not repeated.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            // Writing to a String cannot fail.
            let _ = write!(text, ": {cause_text}");
        }
        next = cause.source();
    }
    text
}
