//! The config file: every flag of every role by its long name, in TOML, and `triptych config`.
//!
//! A flag wins over its variable, a variable over the file, a section of the file over its common keys. The file's values
//! become flags of the command line that clap reads, for settings that neither a flag nor a variable gives: a value is
//! checked, and excludes or requires others, as the flag would. Keys are clap's own ([`keys`]), so none can be missing
//! here. Nothing here knows what a setting means.

mod args;
mod command;
mod file;
mod keys;
mod merge;
mod page;

pub use args::ConfigArgs;
pub use command::{ConfigCommandArgs, run};

use crate::error::CliError;
use clap::Command;
use merge::Line;
use std::ffi::OsString;

/// Completes a command line with the settings of the config file that it or the environment names; `cli` has the flags of
/// the roles.
///
/// # Errors
/// [`CliError::Setting`] for a file that cannot be used, with everything that is wrong in it.
pub fn complete(cli: &Command, args: Vec<OsString>) -> Result<Vec<OsString>, CliError> {
    Ok(Line::read(cli, args)?.args)
}
