//! Packages that must not be in the dependency tree, and packages that must be in it once.

use crate::files::root;
use std::collections::BTreeMap;
use std::fs;

/// A second TLS back end, and what takes hours to build or crowds out the allocator that is there.
const NEVER: [&str; 5] = ["aws-lc-rs", "aws-lc-sys", "openssl-sys", "candle-flash-attn", "tikv-jemallocator"];

/// Two versions of these do not work together, or cost minutes of building.
const ONCE: [&str; 18] = [
    "tokio",
    "tonic",
    "prost",
    "hyper",
    "http",
    "axum",
    "tower-http",
    "rustls",
    "ring",
    "tokenizers",
    "candle-core",
    "cudarc",
    "half",
    "image",
    "bytes",
    "opentelemetry",
    "tracing-subscriber",
    "reqwest",
];

/// Versions of each package in the lock file.
fn locked() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(root().join("Cargo.lock")).expect("the lock file is in the repository");
    let mut versions: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut name = String::new();
    for line in text.lines() {
        if let Some(value) = line.strip_prefix("name = ") {
            name = value.trim_matches('"').to_owned();
        } else if let Some(value) = line.strip_prefix("version = ").filter(|_| !name.is_empty()) {
            versions.entry(std::mem::take(&mut name)).or_default().push(value.trim_matches('"').to_owned());
        }
    }
    versions
}

#[test]
fn unwanted_packages_are_not_in_the_tree() {
    let locked = locked();
    let found: Vec<_> = NEVER.into_iter().filter(|name| locked.contains_key(*name)).collect();
    assert!(found.is_empty(), "{found:?}: `cargo tree -i NAME` says who brings it");
}

#[test]
fn packages_that_must_agree_are_there_once() {
    let locked = locked();
    let twice: Vec<_> = ONCE
        .into_iter()
        .filter_map(|name| Some((name, locked.get(name)?)))
        .filter(|(_, v)| v.len() > 1)
        .collect();
    assert!(twice.is_empty(), "more than one version: {twice:?}");
}
