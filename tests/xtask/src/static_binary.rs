//! `cargo xtask static`: the binary as the image has it, at the price of one crate.
//!
//! What is static about it is decided when it is linked: every crate below it is the same with and without, as the standard
//! library is, which comes in one form for both. So only the crate of the binary is compiled again, by a rustc that adds
//! the flag to this one call, under settings that keep the result apart from the other one. The image itself is built with
//! the flag for everything (`deploy/Dockerfile`).

use crate::shell::{cargo, root, run};
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set: this program is called as a rustc.
const AS_RUSTC: &str = "TRIPTYCH_XTASK_AS_RUSTC";
const FLAG: &str = "target-feature=+crt-static";
/// A test, the smallest: with one among what is built, cargo gives crates the features that tests ask for, and the test
/// run finds every crate built already.
const WITH_FEATURES: &str = "rules";
/// Differs from the profile of the tests in nothing that matters, so that both binaries are kept.
const APART: &str = "profile.dev.package.triptych.codegen-units=64";

/// # Errors
/// If it does not build.
pub fn run_build() -> Result<()> {
    let build = || cargo(&["build", "--workspace", "--bin", "triptych", "--test", WITH_FEATURES]);
    let me = std::env::current_exe().context("this program's own path")?;
    run(build().args(["--config", APART]).env("RUSTC_WRAPPER", me).env(AS_RUSTC, "1"))?;
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

/// Becomes the rustc that cargo meant to call, if cargo called.
///
/// # Errors
/// If there is no such rustc.
pub fn as_rustc() -> Result<()> {
    if std::env::var_os(AS_RUSTC).is_none() {
        return Ok(());
    }
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let follows = |a: &str, b: &str| words.windows(2).any(|pair| pair[0] == a && pair[1] == b);
    if follows("--crate-name", "triptych") && follows("--crate-type", "bin") {
        words.extend(["-C".into(), FLAG.into()]);
    }
    let (program, args) = words.split_first().context("cargo names its rustc")?;
    Err(Command::new(program).args(args).exec().into())
}
