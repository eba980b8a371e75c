//! The import table: imports go down and stay on their side.
//!
//! Read from the manifests, so it holds for code that is not compiled here too. Tests of a crate may import more.

use crate::files::root;
use std::collections::BTreeSet;
use std::fs;

/// A crate: its folder, the crates of ours that it may import, and what of others' it must not.
struct Rule {
    dir: &'static str,
    may: &'static [&'static str],
    never: &'static [&'static str],
}

/// Anything that talks to a network or runs tasks.
const ASYNC: &[&str] =
    &["tokio", "tokio-stream", "tokio-util", "tonic", "tonic-health", "axum", "reqwest", "redis", "futures"];
/// Anything that computes.
const COMPUTE: &[&str] =
    &["candle-core", "cudarc", "tokenizers", "image", "symphonia", "safetensors", "half", "rayon"];

const RULES: [Rule; 21] = [
    Rule { dir: "services/core", may: &[], never: ASYNC },
    Rule { dir: "kernels", may: &["core"], never: ASYNC },
    Rule { dir: "services/models", may: &["core", "kernels"], never: ASYNC },
    Rule { dir: "services/engine", may: &["core", "models"], never: ASYNC },
    // The wire of its store process lives in `proto`.
    Rule { dir: "services/ec", may: &["core", "proto"], never: &["candle-core", "cudarc", "tokenizers"] },
    Rule { dir: "proto", may: &["core"], never: &["tokio", "axum", "reqwest"] },
    Rule { dir: "proto/codegen", may: &[], never: ASYNC },
    Rule { dir: "services/runtime", may: &["core", "proto"], never: COMPUTE },
    Rule { dir: "services/proxy", may: &["core", "proto", "runtime", "ec"], never: COMPUTE },
    Rule {
        dir: "services/encoder",
        may: &["core", "proto", "runtime", "ec", "models"],
        never: &["axum", "reqwest"],
    },
    Rule {
        dir: "services/pd",
        may: &["core", "proto", "runtime", "ec", "models", "engine"],
        never: &["axum", "reqwest"],
    },
    Rule { dir: "services/vllm", may: &["core", "proto", "runtime", "ec"], never: COMPUTE },
    Rule { dir: "services/bench", may: &["core", "proto", "runtime"], never: COMPUTE },
    // It runs the scheduler and the router that serve, and measures what they run on.
    Rule {
        dir: "services/plan",
        may: &[
            "bench", "core", "ec", "encoder", "engine", "kernels", "models", "pd", "proto", "proxy",
            "runtime",
        ],
        never: &["candle-core", "cudarc", "axum", "tonic"],
    },
    Rule {
        dir: "services/triptych",
        may: &[
            "bench", "core", "ec", "encoder", "kernels", "models", "pd", "plan", "proto", "proxy", "runtime",
            "vllm",
        ],
        never: &["candle-core", "cudarc"],
    },
    // The whole, seen from outside; that a test goes through a process's front is for its reader to see. One program plants
    // faults in the workers' own crates.
    Rule { dir: "tests", may: &["core", "ec", "encoder", "models", "pd", "proto", "runtime"], never: &[] },
    Rule { dir: "tests/fuzz", may: &["core", "ec", "models", "proto", "proxy", "runtime"], never: &[] },
    Rule { dir: "kernels/tests/standin", may: &[], never: ASYNC },
    Rule { dir: "tests/house", may: &[], never: ASYNC },
    Rule { dir: "tests/xtask", may: &[], never: ASYNC },
    // Its programs time engine and store, each alone; none of them serves.
    Rule {
        dir: "benches",
        may: &["core", "ec", "engine", "kernels", "models", "proto", "runtime"],
        never: &["axum", "reqwest"],
    },
];

/// Programs and tests, where a `String` of an error is good enough.
const MAY_USE_ANYHOW: [&str; 5] = ["services/triptych", "tests", "tests/fuzz", "tests/xtask", "benches"];

/// Names under `[dependencies]` and `[build-dependencies]`, those of a platform or feature included.
fn imports(dir: &str) -> BTreeSet<String> {
    let manifest =
        fs::read_to_string(root().join(dir).join("Cargo.toml")).expect("every crate has a manifest");
    let mut counts = false;
    let mut names = BTreeSet::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            counts = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
        } else if counts && !line.is_empty() && !line.starts_with('#') {
            let end = line.find(['.', '=', ' ']).unwrap_or(line.len());
            names.insert(line[..end].trim_matches('"').to_owned());
        }
    }
    names
}

#[test]
fn every_crate_imports_only_what_the_table_allows() {
    let mut wrong = Vec::new();
    for rule in &RULES {
        for name in imports(rule.dir) {
            let allowed = match name.strip_prefix("triptych-") {
                Some(ours) => rule.may.contains(&ours),
                None => !rule.never.contains(&name.as_str()),
            };
            if !allowed {
                wrong.push(format!("{} imports {name}", rule.dir));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_member_of_the_workspace_is_in_the_table() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace has a manifest");
    let members =
        manifest.split("members = [").nth(1).and_then(|m| m.split(']').next()).expect("a list of members");
    let members: BTreeSet<_> = members.split('"').skip(1).step_by(2).collect();
    assert_eq!(members, RULES.iter().map(|r| r.dir).collect());
}

#[test]
fn libraries_have_typed_errors() {
    let untyped: Vec<_> = RULES
        .iter()
        .map(|r| r.dir)
        .filter(|dir| imports(dir).contains("anyhow") && !MAY_USE_ANYHOW.contains(dir))
        .collect();
    assert!(untyped.is_empty(), "anyhow in {untyped:?}");
}
