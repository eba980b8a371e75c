//! Why a command ended without doing its work, by what its caller can do about it.

use std::error::Error;
use std::fmt::Write as _;
use thiserror::Error;

/// A command ended early. The text is for the person or the supervisor that ran it.
#[derive(Debug, Error)]
pub enum CliError {
    /// A flag, a file or a directory is wrong: the same command fails the same way.
    #[error("{0}")]
    Setting(String),
    /// Something else is in the way: the same command may succeed later.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    /// The process's exit code. The supervisor does not restart a worker that ended with 2.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Setting(_) => SETTING_EXIT_CODE,
            Self::Failed(_) => 1,
        }
    }

    /// A wrong setting: what failed, and its causes.
    pub fn setting(what: impl std::fmt::Display, cause: &dyn Error) -> Self {
        Self::Setting(format!("{what}: {}", chain(cause)))
    }

    /// A failure: what failed, and its causes.
    pub fn failed(what: impl std::fmt::Display, cause: &dyn Error) -> Self {
        Self::Failed(format!("{what}: {}", chain(cause)))
    }
}

/// The exit code of a wrong setting, the same as clap's.
pub const SETTING_EXIT_CODE: u8 = 2;

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
