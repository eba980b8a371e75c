//! A command line with the settings of a config file that neither it nor the environment gives.

use super::file::{self, ConfigFile};
use super::keys;
use crate::error::CliError;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

/// A command line, completed.
#[derive(Debug)]
pub struct Line {
    /// Arguments for clap.
    pub args: Vec<OsString>,
    /// Its config file.
    pub path: Option<PathBuf>,
    /// Keys that the file gave.
    pub from_file: BTreeSet<String>,
}

impl Line {
    /// Completes a command line. One that clap refuses stays as it is, to be refused.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a file that cannot be used.
    pub fn read(cli: &Command, mut args: Vec<OsString>) -> Result<Self, CliError> {
        let nothing = |args| Self { args, path: None, from_file: BTreeSet::new() };
        // What the file completes is not complete here.
        let Ok(given) = cli.clone().ignore_errors(true).try_get_matches_from(&args) else {
            return Ok(nothing(args));
        };
        let Some((section, matches)) = given.subcommand() else { return Ok(nothing(args)) };
        let (Some(role), Some(path)) = (keys::role(cli, section), path(matches)) else {
            return Ok(nothing(args));
        };
        let file = ConfigFile::read(cli, &path)?;
        let is_child = matches.contains_id("supervised_by");
        let mut from_file = BTreeSet::new();
        for (key, value) in file.values(section) {
            let Some((_, arg)) = keys::of(&role).find(|(name, _)| *name == key) else { continue };
            let is_given = matches!(
                matches.value_source(arg.get_id().as_str()),
                Some(ValueSource::CommandLine | ValueSource::EnvVariable)
            );
            // The cluster of `up` is plain on its loopback address, whatever is set for the roles of another.
            if is_given || (is_child && is_tls(key)) {
                continue;
            }
            let flags = file::flags(arg, key, value);
            args.extend(flags.map_err(|e| CliError::Setting(format!("{}: {key}: {e}", path.display())))?);
            from_file.insert(key.to_owned());
        }
        Ok(Self { args, path: Some(path), from_file })
    }
}

fn path(matches: &ArgMatches) -> Option<PathBuf> {
    matches
        .try_get_one::<PathBuf>("config")
        .ok()
        .flatten()
        .filter(|path| !path.as_os_str().is_empty())
        .cloned()
}

fn is_tls(key: &str) -> bool {
    key.starts_with("tls-") || key.starts_with("public-tls-")
}

#[cfg(test)]
mod tests {
    use super::{Line, is_tls};
    use crate::cli::{Cli, Command};
    use clap::{CommandFactory, Parser};
    use std::ffi::OsString;
    use std::path::Path;

    const FILE: &str = "log = \"debug\"\n[proxy]\nhttp = \"127.0.0.1:1\"\nmax-in-flight = 7\npd = [\"h:1\", \"h:2\"]\n\
                        log-json = true\njwt-keys = \"jwks\"\ntls-cert = \"c\"\ntls-key = \"k\"\ntls-ca = \"a\"\n";

    fn line(dir: &Path, flags: &[&str]) -> Line {
        let path = dir.join("c.toml");
        std::fs::write(&path, FILE).unwrap();
        let args = ["triptych", "proxy", "--config", path.to_str().unwrap()];
        Line::read(&Cli::command(), args.iter().chain(flags).map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn a_flag_wins_over_the_file_and_lists_are_not_joined() {
        let dir = tempfile::tempdir().unwrap();
        let line = line(dir.path(), &["--http", "127.0.0.1:2", "--jwt-issuer", "i", "--jwt-audience", "a"]);
        assert!(line.from_file.contains("max-in-flight") && !line.from_file.contains("http"));
        let Command::Proxy(args) = Cli::try_parse_from(line.args).unwrap().command else { panic!() };
        assert_eq!((args.role.http.as_str(), args.role.max_in_flight), ("127.0.0.1:2", 7));
        assert_eq!((args.role.pds.len(), args.role.log.log_json), (2, true));
        assert_eq!(args.role.log.log, "debug");
        let dir = tempfile::tempdir().unwrap();
        let fewer = self::line(dir.path(), &["--pd", "h:3", "--jwt-issuer", "i", "--jwt-audience", "a"]);
        let Command::Proxy(args) = Cli::try_parse_from(fewer.args).unwrap().command else { panic!() };
        assert_eq!(args.role.pds.len(), 1);
    }

    #[test]
    fn a_value_of_the_file_requires_what_its_flag_does() {
        let dir = tempfile::tempdir().unwrap();
        let e = Cli::try_parse_from(line(dir.path(), &[]).args).unwrap_err().to_string();
        assert!(e.contains("--jwt-issuer"), "{e}");
    }

    #[test]
    fn a_child_of_up_takes_no_tls_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let child = line(dir.path(), &["--supervised-by", "1"]);
        assert!(!child.from_file.iter().any(|key| is_tls(key)) && child.from_file.contains("max-in-flight"));
    }

    #[test]
    fn commands_without_a_file_and_wrong_flags_are_left_as_they_are() {
        for args in [&["triptych", "models", "x"][..], &["triptych", "proxy", "--no-such"], &["triptych"]] {
            let args: Vec<_> = args.iter().map(OsString::from).collect();
            assert_eq!(Line::read(&Cli::command(), args.clone()).unwrap().args, args);
        }
    }
}
