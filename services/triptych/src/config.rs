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
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use merge::Line;
use std::collections::BTreeSet;
use std::ffi::OsString;

/// Completes a command line with the settings of the config file that it or the environment names; `cli` has the flags of
/// the roles.
///
/// # Errors
/// [`CliError::Setting`] for a file that cannot be used, with everything that is wrong in it.
pub fn complete(cli: &Command, args: Vec<OsString>) -> Result<Vec<OsString>, CliError> {
    Ok(Line::read(cli, args)?.args)
}

/// Flags of a role, by their long names, that have their defaults: neither the command line nor the environment nor the file
/// gives them. `matches`: of a completed command line.
pub fn unset(cli: &Command, matches: &ArgMatches) -> BTreeSet<String> {
    let role = matches.subcommand().and_then(|(name, matches)| Some((keys::role(cli, name)?, matches)));
    let Some((role, matches)) = role else { return BTreeSet::new() };
    let is_unset = |id: &str| matches!(matches.value_source(id), None | Some(ValueSource::DefaultValue));
    let unset = keys::of(&role).filter(|(_, arg)| is_unset(arg.get_id().as_str()));
    unset.map(|(name, _)| name.to_owned()).collect()
}
