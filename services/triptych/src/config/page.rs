//! Settings as text, in the form of a config file.

use super::keys;
use super::merge::Line;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use std::ffi::OsStr;
use std::fmt::Write;

const HEAD: &str = "\
# Settings of Triptych: every key of every role, with its default. Take a line's `#` away to set it.
#
# A flag wins over its variable, a variable over this file, a section over the keys that stand before the first
# section. Those are for every role that has such a key. `triptych config check FILE` tells what is wrong.
";

/// A config file with every key, each behind a `#`.
pub fn all(cli: &Command) -> String {
    let mut text = HEAD.to_owned();
    for section in keys::SECTIONS {
        let Some(role) = keys::role(cli, section) else { continue };
        let _ = writeln!(text, "\n[{section}]");
        for (key, arg) in keys::of(&role) {
            describe(&mut text, key, arg);
        }
    }
    text
}

/// One key: its help, its variable, and its default.
fn describe(text: &mut String, key: &str, arg: &Arg) {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let _ = writeln!(text, "\n# {}", help.replace('\n', "\n# "));
    if let Some(variable) = keys::variable(arg) {
        let _ = writeln!(text, "# Variable: {variable}");
    }
    let allowed: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    if arg.get_action().takes_values() && !allowed.is_empty() {
        let _ = writeln!(text, "# One of: {}", allowed.join(", "));
    }
    if !arg.get_action().takes_values() {
        let _ = writeln!(text, "#{key} = false");
        return;
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| literal(value)).collect();
    let _ = match defaults.first() {
        Some(default) => writeln!(text, "#{key} = {default}"),
        None if keys::is_list(arg) => writeln!(text, "#{key} = []"),
        // Not set by default: the name of the value stands for one.
        None => writeln!(text, "#{key} = # {}", placeholder(arg)),
    };
}

fn placeholder(arg: &Arg) -> String {
    arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string).unwrap_or_default()
}

/// The settings of a role, and where each is from.
pub fn settings(role: &Command, matches: &ArgMatches, line: &Line) -> String {
    let mut text = String::new();
    if let Some(path) = &line.path {
        let _ = writeln!(text, "# file: {}", path.display());
    }
    let _ = writeln!(text, "[{}]", role.get_name());
    for (key, arg) in keys::of(role) {
        let source = match matches.value_source(arg.get_id().as_str()) {
            _ if line.from_file.contains(key) => "file".to_owned(),
            Some(ValueSource::CommandLine) => "flag".to_owned(),
            Some(ValueSource::EnvVariable) => {
                format!("environment, {}", keys::variable(arg).unwrap_or_default())
            }
            _ => "default".to_owned(),
        };
        let _ = match value(arg, matches) {
            Some(_) if keys::is_secret(arg) && source != "default" => {
                writeln!(text, "# {key} is set and not shown # {source}")
            }
            Some(value) => writeln!(text, "{key} = {value} # {source}"),
            None => writeln!(text, "# {key} is not set"),
        };
    }
    text
}

/// A setting as TOML.
fn value(arg: &Arg, matches: &ArgMatches) -> Option<String> {
    let id = arg.get_id().as_str();
    if !arg.get_action().takes_values() {
        return Some(matches.get_flag(id).to_string());
    }
    let values: Vec<_> = matches.get_raw(id)?.map(literal).collect();
    if keys::is_list(arg) {
        return Some(format!("[{}]", values.join(", ")));
    }
    values.into_iter().next()
}

/// A value of TOML: a number where it is one, else a string.
fn literal(value: &OsStr) -> String {
    let text = value.to_string_lossy();
    match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => text.into_owned(),
        _ => toml::Value::String(text.into_owned()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::config::file::ConfigFile;
    use clap::CommandFactory;

    fn check(text: &str) -> Result<ConfigFile, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        ConfigFile::read(&Cli::command(), &path).map_err(|e| e.to_string())
    }

    #[test]
    fn the_page_of_all_keys_is_a_config_file_once_its_marks_are_gone() {
        let page = all(&Cli::command());
        check(&page).unwrap();
        let set: String = page
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest)
                    if rest.starts_with(|c: char| c.is_ascii_lowercase()) && !rest.contains(" = # ") =>
                {
                    rest
                }
                _ => line,
            })
            .collect::<Vec<_>>()
            .join("\n");
        let file = check(&set).unwrap();
        assert!(
            file.values("proxy").contains_key("max-in-flight") && file.values("pd").contains_key("precision")
        );
    }

    #[test]
    fn every_flag_of_a_role_is_on_the_page_with_its_variable() {
        let page = all(&Cli::command());
        for section in keys::SECTIONS {
            let role = keys::role(&Cli::command(), section).unwrap();
            let own = page.split(&format!("\n[{section}]\n")).nth(1).unwrap().split("\n[").next().unwrap();
            assert!(keys::of(&role).count() > 10);
            for (key, arg) in keys::of(&role) {
                assert!(own.contains(&format!("\n#{key} = ")), "[{section}] {key}");
                assert!(keys::variable(arg).is_none_or(|name| own.contains(&name)), "[{section}] {key}");
            }
        }
    }
}
