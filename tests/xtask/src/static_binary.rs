//! `cargo xtask static`: the binary as the image has it, at the price of one crate.
//!
//! What is static about it is decided when it is linked: every crate below it is the same with and without, as the standard
//! library is, which comes in one form for both. So only the crate of the binary is compiled again ([`Form::Static`]). The
//! image itself is built with the flag for everything (`deploy/Dockerfile`).

use crate::rustc::{self, Form};
use crate::shell::{cargo, root, run};
use anyhow::{Context, Result};
use std::fs;

/// A target asked for beside a program, so that cargo finds every crate built by the test run: with a test among what is
/// built, it gives crates the features that tests ask for. One of kernels, which no [`Form`] changes.
pub const AS_FOR_TESTS: [&str; 3] = ["--workspace", "--test", "conformance"];

/// # Errors
/// If it does not build.
pub fn run_build() -> Result<()> {
    let build = || {
        let mut build = cargo(&["build", "--bin", "triptych"]);
        build.args(AS_FOR_TESTS);
        build
    };
    let mut static_build = build();
    rustc::apart(&mut static_build, Form::Static)?;
    run(&mut static_build)?;
    let (built, place) = (root().join("target/debug/triptych"), root().join("target/static/triptych"));
    fs::create_dir_all(place.parent().context("a folder")?)?;
    // It appears whole or not at all.
    let fresh = place.with_extension("fresh");
    fs::copy(built, &fresh)?;
    fs::rename(&fresh, &place)?;
    println!("{}", place.display());
    // The other one back at its place.
    run(&mut build())
}
