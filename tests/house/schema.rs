//! The schema explains itself: every service, call, message, field and enum value has a comment above it.

use crate::files::all;
use std::ffi::OsStr;
use std::fs;

/// True if the line declares something that a client sees.
fn declares(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or_default();
    let structure = ["syntax", "package", "import", "option", "reserved", "}", "//"];
    !line.is_empty() && !structure.iter().any(|s| first.starts_with(s))
}

#[test]
fn every_declaration_has_a_comment() {
    let mut n_files = 0;
    let mut silent = Vec::new();
    for (path, name) in all() {
        if path.extension() != Some(OsStr::new("proto")) {
            continue;
        }
        n_files += 1;
        let text = fs::read_to_string(path).expect("schema files are UTF-8");
        let mut above = "";
        for (i, line) in text.lines().map(str::trim).enumerate() {
            if declares(line) && !above.starts_with("//") {
                silent.push(format!("{name}:{}: {line}", i + 1));
            }
            above = line;
        }
    }
    assert!(n_files > 0, "there is a schema");
    assert!(silent.is_empty(), "{silent:#?}");
}
