//! Errors of commands, by the caller's possible action.

use std::error::Error;
use std::time::Duration;
use thiserror::Error;
use triptych_bench::error::MeasureError;

pub use triptych_bench::error::chain;

/// A command ended early. The text is for the person or the supervisor that ran it.
#[derive(Debug, Error)]
pub enum CliError {
    /// A flag, a file or a directory is wrong: the same command fails the same way.
    #[error("{0}")]
    Setting(String),
    /// Something else is in the way: the same command may succeed later.
    #[error("{0}")]
    Failed(String),
    /// The time that was given is over.
    #[error("no whole answer within {limit:?}: {waited_for}")]
    TimedOut {
        /// The given time.
        limit: Duration,
        /// The stage that was under way.
        waited_for: String,
    },
}

impl CliError {
    /// The process's exit code. The supervisor does not restart a worker that ended with 2.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Setting(_) => SETTING_EXIT_CODE,
            Self::Failed(_) => 1,
            Self::TimedOut { .. } => TIMEOUT_EXIT_CODE,
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

/// The exit code when the given time is over, the same as of coreutils' `timeout`.
const TIMEOUT_EXIT_CODE: u8 = 124;

impl From<MeasureError> for CliError {
    fn from(e: MeasureError) -> Self {
        match e {
            MeasureError::Setting(text) => Self::Setting(text),
            MeasureError::Failed(text) => Self::Failed(text),
        }
    }
}

/// Commands start the clusters that a measurement asks for.
impl From<CliError> for MeasureError {
    fn from(e: CliError) -> Self {
        match e {
            CliError::Setting(text) => Self::Setting(text),
            CliError::Failed(text) => Self::Failed(text),
            e @ CliError::TimedOut { .. } => Self::Failed(e.to_string()),
        }
    }
}
