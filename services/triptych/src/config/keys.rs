//! Keys of a config file: the flags of the roles, as clap has them.

use clap::{Arg, Command};

/// Commands that have a section, in the order in which they are shown.
pub const SECTIONS: [&str; 5] = ["up", "proxy", "encoder", "pd", "store"];

/// Flags that are no settings of a file.
const NOT_KEYS: [&str; 4] = ["config", "check", "help", "version"];
/// Most changed letters of a word that is taken for a key.
const MAX_DISTANCE: usize = 4;

/// The command of a section, with its flags, of the whole command line `cli`.
pub fn role(cli: &Command, section: &str) -> Option<Command> {
    if !SECTIONS.contains(&section) {
        return None;
    }
    let mut cli = cli.clone();
    cli.build();
    cli.find_subcommand(section).cloned()
}

/// The keys of a role, in the order of its help.
pub fn of(role: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let long =
        |arg: &'_ Arg| arg.get_long().is_some_and(|name| !NOT_KEYS.contains(&name)) && !arg.is_hide_set();
    let named = role.get_arguments().filter(move |arg| long(arg));
    named.filter_map(|arg| arg.get_long().map(|name| (name, arg)))
}

/// The variable that sets the same.
pub fn variable(arg: &Arg) -> Option<String> {
    arg.get_env().map(|name| name.to_string_lossy().into_owned())
}

/// True for settings that may hold a password: nothing prints them.
pub fn is_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

/// True if the flag may be given several times, and so its value be a list.
pub fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), clap::ArgAction::Append)
}

/// A hint at the known word that is closest to an unknown one.
pub fn hint<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> String {
    let word = word.replace('_', "-");
    let nearest = known.map(|name| (strsim::damerau_levenshtein(&word, name), name)).min();
    match nearest {
        Some((distance, name)) if distance <= MAX_DISTANCE => format!("; the nearest is `{name}`"),
        _ => String::new(),
    }
}
