//! A config file as it is read: its sections, their keys checked against the roles' flags, all mistakes at once.

use super::keys;
use crate::error::{CliError, chain};
use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, Command};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Most bytes of a config file.
const MAX_BYTES: u64 = 1 << 20;

/// A file whose keys are all known, and whose values are of the kinds that their flags take.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    common: Table,
    sections: BTreeMap<String, Table>,
}

impl ConfigFile {
    /// Reads it; `cli` has the flags of the roles.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a file that cannot be read, is not TOML, or has keys that no role has.
    pub fn read(cli: &Command, path: &Path) -> Result<Self, CliError> {
        let wrong = |what: String| CliError::Setting(format!("{}: {what}", path.display()));
        let size = fs::metadata(path).map_err(|e| wrong(chain(&e)))?.len();
        if size > MAX_BYTES {
            return Err(wrong(format!("{size} bytes, a config file has at most {MAX_BYTES}")));
        }
        let text = fs::read_to_string(path).map_err(|e| wrong(chain(&e)))?;
        let table: Table = text.parse().map_err(|e: toml::de::Error| wrong(not_toml(&text, &e)))?;
        let mut file = Self { path: path.to_owned(), common: Table::new(), sections: BTreeMap::new() };
        let mut problems = Vec::new();
        for (key, value) in table {
            match value {
                Value::Table(section) if keys::SECTIONS.contains(&key.as_str()) => {
                    file.sections.insert(key, section);
                }
                Value::Table(_) => problems.push(format!(
                    "[{key}]: no such section{}; sections are {}",
                    keys::hint(&key, keys::SECTIONS.into_iter()),
                    keys::SECTIONS.join(", ")
                )),
                _ => drop(file.common.insert(key, value)),
            }
        }
        problems.extend(file.problems(cli));
        file.or_problems(problems)
    }

    /// Itself, if nothing is wrong with it.
    fn or_problems(self, problems: Vec<String>) -> Result<Self, CliError> {
        if problems.is_empty() {
            return Ok(self);
        }
        Err(CliError::Setting(format!("{}:\n  {}", self.path.display(), problems.join("\n  "))))
    }

    /// Sections that it has.
    pub fn sections(&self) -> impl Iterator<Item = &str> {
        self.sections.keys().map(String::as_str)
    }

    /// The values that a role takes from it: those of its section, and common ones that it has a flag for.
    pub fn values(&self, section: &str) -> BTreeMap<&str, &Value> {
        let own = self.sections.get(section).into_iter().flatten();
        self.common.iter().chain(own).map(|(key, value)| (key.as_str(), value)).collect()
    }

    /// All mistakes in its keys and values.
    fn problems(&self, cli: &Command) -> Vec<String> {
        let roles: Vec<_> =
            keys::SECTIONS.iter().filter_map(|&name| Some((name, keys::role(cli, name)?))).collect();
        let mut problems = Vec::new();
        for (key, value) in &self.common {
            let mut having = roles.iter().filter(|(_, role)| keys::of(role).any(|(name, _)| name == key));
            match having.next() {
                Some((_, role)) => problems.extend(problem(role, key, value).map(|p| format!("{key}: {p}"))),
                None => {
                    let all = roles.iter().flat_map(|(_, role)| keys::of(role).map(|(name, _)| name));
                    problems.push(format!("{key}: no role has such a key{}", keys::hint(key, all)));
                }
            }
        }
        for (section, role) in &roles {
            for (key, value) in self.sections.get(*section).into_iter().flatten() {
                problems.extend(problem(role, key, value).map(|p| format!("[{section}] {key}: {p}")));
            }
        }
        problems
    }
}

/// The line of the first mistake. Not the line's text, which may hold a password.
fn not_toml(text: &str, e: &toml::de::Error) -> String {
    let at = e.span().map_or(0, |span| span.start);
    let line = text.bytes().take(at).filter(|&byte| byte == b'\n').count() + 1;
    format!("line {line} is not TOML: {}", e.message())
}

/// The mistake in one key of a role, if there is one.
fn problem(role: &Command, key: &str, value: &Value) -> Option<String> {
    let Some((_, arg)) = keys::of(role).find(|(name, _)| *name == key) else {
        let names = keys::of(role).map(|(name, _)| name);
        return Some(format!("no such key{}", keys::hint(key, names)));
    };
    match flags(arg, key, value) {
        Err(problem) => Some(problem),
        Ok(flags) => refused(role, arg, flags),
    }
}

/// Clap's word on a value. Settings that it requires beside it may come from elsewhere.
fn refused(role: &Command, arg: &Arg, flags: Vec<OsString>) -> Option<String> {
    let line = std::iter::once(OsString::from(role.get_name())).chain(flags);
    let e = role.clone().try_get_matches_from(line).err()?;
    if !matches!(
        e.kind(),
        ErrorKind::InvalidValue | ErrorKind::ValueValidation | ErrorKind::WrongNumberOfValues
    ) {
        return None;
    }
    // A variable of the environment may be at fault as well; that is told when the role starts.
    let at_fault = e.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let own =
        arg.get_long().is_some_and(|long| at_fault.split([' ', '=']).next() == Some(&format!("--{long}")));
    if !own {
        return None;
    }
    if keys::is_secret(arg) {
        return Some("not a value of this setting".into());
    }
    let text = e.to_string();
    let first = text.split("\n\nFor more information").next().unwrap_or_default();
    Some(first.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The flags that say the same as a value.
///
/// # Errors
/// The kind of value that the key takes.
pub fn flags(arg: &Arg, key: &str, value: &Value) -> Result<Vec<OsString>, String> {
    if !arg.get_action().takes_values() {
        return match value {
            Value::Boolean(true) => Ok(vec![format!("--{key}").into()]),
            Value::Boolean(false) => Ok(Vec::new()),
            other => Err(format!("takes true or false, not {}", kind(other))),
        };
    }
    let values = match value {
        Value::Array(values) if keys::is_list(arg) => values.as_slice(),
        single => std::slice::from_ref(single),
    };
    let flag = |value: &Value| {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            other => return Err(format!("takes a string or a number, not {}", kind(other))),
        };
        Ok(format!("--{key}={text}").into())
    };
    values.iter().map(flag).collect()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) | Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    fn read(text: &str) -> Result<ConfigFile, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        fs::write(&path, text).unwrap();
        ConfigFile::read(&Cli::command(), &path).map_err(|e| e.to_string())
    }

    #[test]
    fn sections_win_over_common_keys_and_roles_take_what_they_have() {
        let file = read("log = \"debug\"\nmodel = [\"./a\", \"b=./c\"]\n[pd]\nlog = \"warn\"\nkv-mib = 64\n")
            .unwrap();
        let text = |section: &str, key: &str| file.values(section).get(key).map(|value| value.to_string());
        assert_eq!(text("pd", "log").as_deref(), Some("\"warn\""));
        assert_eq!(text("proxy", "log").as_deref(), Some("\"debug\""));
        assert_eq!(text("pd", "kv-mib").as_deref(), Some("64"));
        assert_eq!(text("encoder", "kv-mib"), None);
    }

    #[test]
    fn every_mistake_is_told_at_once_with_the_nearest_key() {
        let text = "max-item = 3\nnothing-like-it = 1\n[prxy]\n[proxy]\nmax_in_flight = 3\nhttp = [\"a\"]\n\
                    request-log = \"some\"\n[pd]\nwith-encoder = 1\nprecision = \"fp8\"\nconfig = \"x\"\n";
        let e = read(text).unwrap_err();
        for part in [
            "max-item: no role has such a key; the nearest is `max-items`",
            "nothing-like-it: no role has such a key\n",
            "[prxy]: no such section; the nearest is `proxy`; sections are up, proxy, encoder, pd, store",
            "[proxy] max_in_flight: no such key; the nearest is `max-in-flight`",
            "[proxy] http: takes a string or a number, not a list",
            "[proxy] request-log: invalid value 'some'",
            "[pd] with-encoder: takes true or false, not a number",
            "[pd] precision: invalid value 'fp8' for '--precision <TYPE>' [possible values: f32, bf16, int8, int4]",
            "[pd] config: no such key",
        ] {
            assert!(e.contains(part), "{part:?} is not in {e}");
        }
    }

    #[test]
    fn what_is_not_toml_is_told_by_line_and_secrets_are_not_repeated() {
        let e = read("[proxy]\ntenant-salt = s3cret\n").unwrap_err();
        assert!(e.contains("line 2 is not TOML") && !e.contains("s3cret"), "{e}");
        let e = read("ec = \"nfs://:s3cret@h\"\n").unwrap_err();
        assert!(e.contains("ec: not a value of this setting") && !e.contains("s3cret"), "{e}");
    }
}
