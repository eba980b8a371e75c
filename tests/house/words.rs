//! Words that have no place in the repository: paths of somebody's machine, and marks for work left undone.

use crate::files::all;
use std::fs;

/// Written in halves, so that this file is not found.
const PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];
const MARKS: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:"), concat!("to", "do!(")];

/// Files that people write. Vocabularies and weights may hold any word.
const WRITTEN: [&str; 12] =
    ["rs", "toml", "proto", "md", "py", "sh", "yml", "yaml", "jinja", "txt", "run", "json"];

/// The files that people write, with their texts.
pub fn written() -> impl Iterator<Item = (String, String)> {
    all()
        .into_iter()
        .filter(|(path, name)| {
            let extension = path.extension().map(|e| e.to_string_lossy().into_owned()).unwrap_or_default();
            WRITTEN.contains(&extension.as_str())
                && !name.ends_with("tokenizer.json")
                && !name.ends_with("vocab.json")
        })
        .filter_map(|(path, name)| Some((name, fs::read_to_string(path).ok()?)))
}

fn find(words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, text) in written() {
        for (i, line) in text.lines().enumerate() {
            if words.iter().any(|w| line.contains(w)) {
                found.push(format!("{name}:{}", i + 1));
            }
        }
    }
    found
}

#[test]
fn no_path_of_a_machine_is_written_down() {
    let found = find(&PATHS);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn nothing_is_marked_as_undone() {
    let found = find(&MARKS);
    assert!(found.is_empty(), "{found:#?}");
}
