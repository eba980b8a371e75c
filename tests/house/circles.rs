//! No file imports itself over a chain of files: inside a crate, imports go one way.
//!
//! A file is a module. A re-export (`pub use`) is no import of the file that has it; who imports the re-exported name imports
//! the file that defines it. What only tests import does not count. The sources are read, not compiled: comments are dropped,
//! `use` trees are expanded, paths that begin at `crate`, `self`, `super` or a child module are followed.

use crate::files::rust;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The path of a module from the root of its crate; the root's own is empty.
type Module = Vec<String>;

/// The files of one crate and what they import of each other.
#[derive(Default)]
struct Crate {
    files: BTreeMap<Module, String>,
    /// Names that a module re-exports, with the path of what they stand for.
    re_exports: BTreeMap<(Module, String), Module>,
}

impl Crate {
    /// A crate of files: the path below its source folder, and the text.
    fn new(sources: &[(String, String)]) -> Self {
        let files = sources.iter().map(|(path, text)| (module(path), without_comments(text))).collect();
        let mut all = Self { files, re_exports: BTreeMap::new() };
        for (module, text) in &all.files {
            for path in uses(text, Uses::ReExports).flat_map(expand) {
                if let (Some(full), Some(name)) = (all.absolute(module, &path), path.last()) {
                    all.re_exports.insert((module.clone(), name.clone()), full);
                }
            }
        }
        all
    }

    /// A path as it stands in a module, from the root of the crate. `None`: it leads out of the crate, or is a local name.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Module> {
        let first = path.first()?.as_str();
        let n_up = path.iter().take_while(|part| *part == "super").count();
        let (base, rest) = match first {
            "crate" => (&[][..], &path[1..]),
            "self" => (module.as_slice(), &path[1..]),
            "super" => (&module[..module.len().checked_sub(n_up)?], &path[n_up..]),
            child => {
                let child = [module.as_slice(), &[child.to_owned()]].concat();
                (module.as_slice(), self.files.contains_key(&child).then_some(path)?)
            }
        };
        Some([base, rest].concat())
    }

    /// The file that a path from the root leads to, through at most a few re-exports.
    fn file_of(&self, path: &[String], n_followed: usize) -> Module {
        let n = (0..=path.len()).rev().find(|n| *n == 0 || self.files.contains_key(&path[..*n])).unwrap_or(0);
        let (module, rest) = path.split_at(n);
        let stands_for = rest.first().and_then(|name| self.re_exports.get(&(module.to_vec(), name.clone())));
        match stands_for {
            Some(full) if n_followed < 5 => self.file_of(&[full, &rest[1..]].concat(), n_followed + 1),
            _ => module.to_vec(),
        }
    }

    /// The other files that a file imports.
    fn imports(&self, module: &Module, text: &str) -> BTreeSet<Module> {
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
        let named = uses(text, Uses::Imports).flat_map(expand).chain(paths_in_code(text));
        named
            .filter_map(|path| self.absolute(module, &path))
            .map(|path| self.file_of(&path, 0))
            .filter(|other| other != module)
            .collect()
    }

    /// Groups of files of which each leads to every other.
    fn circles(&self) -> Vec<Vec<String>> {
        let is_test = |module: &Module| module.last().is_some_and(|name| name == "tests");
        let imports: BTreeMap<_, _> = self
            .files
            .iter()
            .filter(|(module, _)| !is_test(module))
            .map(|(module, text)| (module.clone(), self.imports(module, text)))
            .collect();
        let reached: BTreeMap<_, _> =
            imports.keys().map(|module| (module, reach(&imports, module))).collect();
        let mut circles = BTreeSet::new();
        for (module, far) in &reached {
            let circle: Vec<_> = far
                .iter()
                .filter(|other| reached.get(other).is_some_and(|back| back.contains(*module)))
                .collect();
            if circle.len() > 1 {
                circles.insert(circle.into_iter().map(|module| shown(module)).collect());
            }
        }
        circles.into_iter().collect()
    }
}

/// Everything that a module leads to.
fn reach(imports: &BTreeMap<Module, BTreeSet<Module>>, from: &Module) -> BTreeSet<Module> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        for other in imports.get(module).into_iter().flatten() {
            if found.insert(other.clone()) {
                next.push(other);
            }
        }
    }
    found
}

/// The module of a file, by its path below the source folder.
fn module(path: &str) -> Module {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    match path {
        "lib" | "main" => Module::new(),
        _ => path.split('/').map(str::to_owned).collect(),
    }
}

fn shown(module: &[String]) -> String {
    if module.is_empty() { "the crate's root".to_owned() } else { module.join("/") + ".rs" }
}

fn without_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        code.push_str(line.split("//").next().unwrap_or(line).trim_end());
        code.push('\n');
    }
    code
}

/// Kinds of `use` declarations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uses {
    Imports,
    ReExports,
}

/// The `use` declarations: where each begins and ends, its kind, and its tree.
fn declarations(text: &str) -> Vec<(Range<usize>, Uses, &str)> {
    let mut found = Vec::new();
    for (i, _) in text.match_indices("use ") {
        let line = text[..i].rsplit('\n').next().unwrap_or_default().trim();
        let kind = match line {
            "" => Uses::Imports,
            visibility if visibility.starts_with("pub") => Uses::ReExports,
            _ => continue,
        };
        let tree = text[i + 4..].split(';').next().unwrap_or_default();
        found.push((i..i + 4 + tree.len(), kind, tree));
    }
    found
}

fn uses(text: &str, wanted: Uses) -> impl Iterator<Item = &str> {
    declarations(text).into_iter().filter(move |(_, kind, _)| *kind == wanted).map(|(_, _, tree)| tree)
}

/// The paths of a `use` tree.
fn expand(tree: &str) -> Vec<Module> {
    let tree = tree.trim();
    if let Some((prefix, rest)) = tree.split_once('{') {
        let prefix: Module = parts(prefix.trim().trim_end_matches("::"));
        let inside = rest.strip_suffix('}').unwrap_or(rest);
        let branches = split_at_commas(inside);
        return branches.iter().flat_map(|b| expand(b)).map(|path| [prefix.clone(), path].concat()).collect();
    }
    let path = tree.split(" as ").next().unwrap_or(tree);
    if path.is_empty() { Vec::new() } else { vec![parts(path)] }
}

fn parts(path: &str) -> Module {
    path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// The branches of a tree, split at the commas outside braces.
fn split_at_commas(inside: &str) -> Vec<String> {
    let (mut branches, mut depth) = (vec![String::new()], 0_usize);
    for c in inside.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                branches.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(branch) = branches.last_mut() {
            branch.push(c);
        }
    }
    branches.into_iter().map(|branch| branch.trim().to_owned()).filter(|branch| !branch.is_empty()).collect()
}

/// Paths of two parts or more that stand in code, outside `use`.
fn paths_in_code(text: &str) -> Vec<Module> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let (mut code, mut end) = (String::new(), 0);
    for (range, _, _) in declarations(text) {
        code.push_str(text.get(end..range.start).unwrap_or_default());
        end = range.end;
    }
    code.push_str(&text[end..]);
    code.split(|c| !is_path(c))
        .filter(|word| word.contains("::") && !word.starts_with(':'))
        .map(parts)
        .filter(|path| path.len() > 1)
        .collect()
}

/// The crates of the repository: every folder with a `lib.rs` or `main.rs`, or with the `src` of several programs.
fn crates() -> BTreeMap<String, Vec<(String, String)>> {
    let sources = rust();
    let root_of = |name: &str| {
        let (folder, file) = name.rsplit_once('/')?;
        (["lib.rs", "main.rs"].contains(&file) || folder.ends_with("benches/src")).then(|| folder.to_owned())
    };
    let roots: BTreeSet<_> = sources.iter().filter_map(|(name, _)| root_of(name)).collect();
    let mut crates: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, text) in &sources {
        let folders = name.match_indices('/').map(|(i, _)| &name[..i]);
        if let Some(root) = folders.rev().find(|folder| roots.contains(*folder)) {
            crates
                .entry(root.to_owned())
                .or_default()
                .push((name[root.len() + 1..].to_owned(), text.clone()));
        }
    }
    crates
}

#[test]
fn no_file_is_in_an_import_circle() {
    let mut circles = Vec::new();
    for (name, sources) in crates() {
        circles
            .extend(Crate::new(&sources).circles().into_iter().map(|circle| format!("{name}: {circle:?}")));
    }
    assert!(circles.is_empty(), "{} import circles: {circles:#?}", circles.len());
}

#[test]
fn detector_finds_circles_and_nothing_else() {
    let check = |sources: &[(&str, &str)], expected: &[&[&str]]| {
        let sources: Vec<_> = sources.iter().map(|(p, t)| ((*p).to_owned(), (*t).to_owned())).collect();
        assert_eq!(Crate::new(&sources).circles(), expected, "{sources:?}");
    };
    // A parent may import its child, and re-export it.
    check(&[("lib.rs", "pub mod a;\npub use a::A;\n"), ("a.rs", "mod b;\nuse b::B;\n"), ("a/b.rs", "")], &[]);
    // Not the other way as well.
    check(&[("a.rs", "mod b;\nuse b::B;\n"), ("a/b.rs", "use super::A;\n")], &[&["a.rs", "a/b.rs"]]);
    // A name that the parent re-exports is its sibling's.
    check(
        &[
            ("a.rs", "pub use b::B;\n"),
            ("a/b.rs", "use crate::x::X;\n"),
            ("x.rs", "use crate::{\n  a::B,\n};\n"),
        ],
        &[&["a/b.rs", "x.rs"]],
    );
    // Over three files, and by a path in code.
    check(
        &[
            ("a.rs", "use crate::b::B;\n"),
            ("b.rs", "fn f() { crate::c::g(); }\n"),
            ("c.rs", "use super::a::{self, A as Z};\n"),
        ],
        &[&["a.rs", "b.rs", "c.rs"]],
    );
    // Neither comments nor tests count.
    check(
        &[
            ("a.rs", "use crate::b::B;\n"),
            ("b.rs", "// crate::a::A\n#[cfg(test)]\nmod tests {\n  use crate::a::A;\n}\n"),
        ],
        &[],
    );
}
