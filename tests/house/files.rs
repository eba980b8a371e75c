//! The files of the repository, and the rules that each Rust file keeps by itself.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Above it a file is long and is listed.
const LONG_FILE_LINES: usize = 400;
/// Above it a file is refused.
const MAX_FILE_LINES: usize = 800;

/// Written by `cargo xtask proto`.
const GENERATED: &str = "proto/src/generated/";

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("the package is a folder of `tests`").to_owned()
}

/// Every file of the source tree, with its path from the root. Hidden folders and build outputs are left out.
pub fn all() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    walk(&root(), &mut found);
    found.into_iter().map(|path| (path.clone(), shown(&path))).collect()
}

/// Every Rust file that people write, with its text.
pub fn rust() -> Vec<(String, String)> {
    all()
        .into_iter()
        .filter(|(path, name)| path.extension() == Some(OsStr::new("rs")) && !name.starts_with(GENERATED))
        .map(|(path, name)| (name, fs::read_to_string(path).expect("Rust files are UTF-8")))
        .collect()
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the source tree can be read") {
        let entry = entry.expect("the source tree can be read");
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // Links are not followed, so a loop cannot catch us.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && !name.starts_with('.') && !["target", "__pycache__", "venv"].contains(&&*name) {
            walk(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

#[test]
fn every_rust_file_says_in_its_first_line_what_it_is() {
    let silent: Vec<_> =
        rust().into_iter().filter(|(_, text)| !text.starts_with("//! ")).map(|(name, _)| name).collect();
    assert!(silent.is_empty(), "these do not open with a `//!` header: {silent:#?}");
}

#[test]
fn no_file_is_too_long() {
    let mut lengths: Vec<_> = rust().into_iter().map(|(name, text)| (text.lines().count(), name)).collect();
    lengths.retain(|(n, _)| *n > LONG_FILE_LINES);
    lengths.sort();
    for (n, name) in &lengths {
        println!("long: {name}, {n} lines");
    }
    lengths.retain(|(n, _)| *n > MAX_FILE_LINES);
    assert!(lengths.is_empty(), "over {MAX_FILE_LINES} lines: {lengths:#?}");
}

#[test]
fn no_module_hides_in_a_mod_rs() {
    let hidden: Vec<_> =
        rust().into_iter().map(|(name, _)| name).filter(|n| n.ends_with("/mod.rs")).collect();
    assert!(hidden.is_empty(), "`foo.rs` beside `foo/`, not {hidden:?}");
}
