//! The config file: every flag of every role by its long name, in TOML, and `triptych config`.
//!
//! A flag wins over its variable, a variable over the file, a section of the file over its common keys. The file's values
//! become flags of the command line that clap reads, for settings that neither a flag nor a variable gives: a value is
//! checked, and excludes or requires others, as the flag would. Keys are clap's own ([`keys`]), so none can be missing
//! here. Nothing here knows what a setting means.

mod command;
mod file;
mod keys;
mod merge;
mod page;

pub use command::{ConfigCommandArgs, run};

use crate::cli::Cli;
use crate::error::CliError;
use clap::{Args, Parser};
use merge::Line;
use std::ffi::OsString;
use std::path::PathBuf;

/// The flag of the config file.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Settings")]
pub struct ConfigArgs {
    /// TOML file of settings: flags by their long names, for all roles or in a section of one, as in `[proxy]`. Flags and
    /// variables win over it; `triptych config` prints one with every key
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_CONFIG")]
    pub config: Option<PathBuf>,
}

impl ConfigArgs {
    /// The flag, for a child: it takes from its own section what its supervisor does not say.
    pub fn to_flags(&self) -> Vec<OsString> {
        self.config.iter().flat_map(|file| ["--config".into(), file.into()]).collect()
    }
}

/// Reads the command line, and the config file that it or the environment names. Ends the process for `--help`, and
/// for flags that clap refuses.
///
/// # Errors
/// [`CliError::Setting`] for a file that cannot be used, with everything that is wrong in it.
pub fn parse(args: Vec<OsString>) -> Result<Cli, CliError> {
    Ok(Cli::parse_from(Line::read(args)?.args))
}
