//! `triptych config`: every key, a check of a file, and the settings that a role would start with.

use super::args::ConfigArgs;
use super::file::ConfigFile;
use super::merge::Line;
use super::{keys, page};
use crate::error::CliError;
use clap::{Args, Command, Subcommand};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `config`.
#[derive(Args, Debug)]
pub struct ConfigCommandArgs {
    /// Command; without one: a file with every key, its help, its variable and its default
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// Commands of `config`.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Read a file, and tell everything that is wrong with it; exits with 2 if something is
    Check {
        /// File to read
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Show the settings that a role would start with here, and where each is from: a flag, the environment, the file or
    /// the default. Secrets are not shown
    Show {
        /// Config file
        #[command(flatten)]
        config: ConfigArgs,
        /// Role, and its flags; left out: every role
        #[arg(value_name = "ROLE", trailing_var_arg = true, allow_hyphen_values = true)]
        role: Vec<OsString>,
    },
}

/// Runs the command; `cli` has the flags of the roles.
///
/// # Errors
/// [`CliError::Setting`] for a file or settings that are wrong.
pub fn run(cli: &Command, args: ConfigCommandArgs) -> Result<(), CliError> {
    let text = match args.action {
        None => page::all(cli),
        Some(Action::Check { file }) => check(cli, &file)?,
        Some(Action::Show { config, role }) if role.is_empty() => {
            let pages = keys::SECTIONS.iter().map(|section| show(cli, vec![section.into()], &config));
            pages.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        Some(Action::Show { config, role }) => show(cli, role, &config)?,
    };
    std::io::stdout().write_all(text.as_bytes()).map_err(|e| CliError::failed("cannot print", &e))
}

/// Reads a file, and each of its sections as its role would.
fn check(cli: &Command, path: &std::path::Path) -> Result<String, CliError> {
    let file = ConfigFile::read(cli, path)?;
    let config = ConfigArgs { config: Some(path.to_owned()) };
    for section in file.sections() {
        show(cli, vec![section.into()], &config)?;
    }
    let sections: Vec<_> = file.sections().collect();
    let of = if sections.is_empty() { "common keys only".to_owned() } else { sections.join(", ") };
    Ok(format!("{}: every key and value is fine ({of})\n", path.display()))
}

/// The settings of one role.
fn show(cli: &Command, role: Vec<OsString>, config: &ConfigArgs) -> Result<String, CliError> {
    let section = role.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(command) = keys::role(cli, &section) else {
        let known = keys::SECTIONS.join(", ");
        return Err(CliError::Setting(format!("{section:?} is no role with settings; those are {known}")));
    };
    let mut args = vec![OsString::from("triptych")];
    args.extend(role);
    if let Some(file) = &config.config {
        args.extend(["--config".into(), file.into()]);
    }
    let line = Line::read(cli, args)?;
    let matches = cli.clone().try_get_matches_from(&line.args).map_err(|e| {
        let text = e.to_string();
        let first = text.split("\n\nUsage").next().unwrap_or_default();
        CliError::Setting(format!("[{section}] {}", first.trim_start_matches("error: ").trim()))
    })?;
    let matches = matches.subcommand_matches(&section);
    Ok(matches.map(|matches| page::settings(&command, matches, &line)).unwrap_or_default())
}
