//! `cargo xtask fuzz`: every place that reads bytes from outside, under libFuzzer.
//!
//! Needs a C++ compiler; `cargo-fuzz` is installed under `.cache` when it is missing. Without sanitizers, so that the stable
//! toolchain does: ours is safe Rust, and what is looked for is panics, hangs and memory.

use crate::shell::{cargo, command, root, run};
use anyhow::{Result, bail};
use clap::Args;
use std::fs;
use std::path::PathBuf;

/// The version that is installed.
const CARGO_FUZZ: &str = "0.13.1";

/// The targets, each with the folders of files that it starts from.
const TARGETS: [(&str, &[&str]); 5] = [
    ("object", &[]),
    ("wire", &[]),
    ("http", &["tests/fuzz/seeds/http"]),
    ("image", &["tests/models/heldout/scenes", "services/models/tests/media"]),
    ("audio", &["tests/models/heldout/digits", "services/models/tests/media"]),
];

/// Settings of `cargo xtask fuzz`.
#[derive(Args, Debug)]
pub struct FuzzArgs {
    /// One target: object, wire, http, image, audio. Default: all
    #[arg(long)]
    target: Option<String>,
    /// Inputs to try
    #[arg(long, default_value_t = 1_000_000)]
    runs: u64,
}

/// Inputs of a short run.
const BRIEF: u64 = 20_000;

/// The short run of `cargo xtask test`: one target or all, from their own seeds.
///
/// # Errors
/// As [`fuzz`].
pub fn brief(target: Option<&str>) -> Result<()> {
    fuzz(&FuzzArgs { target: target.map(str::to_owned), runs: BRIEF })
}

/// # Errors
/// If a target ends in a panic, a hang, or too much memory; the input is named.
pub fn fuzz(args: &FuzzArgs) -> Result<()> {
    if let Some(wanted) = &args.target
        && !TARGETS.iter().any(|(target, _)| target == wanted)
    {
        let names = TARGETS.map(|(target, _)| target).join(", ");
        bail!("{wanted:?} is no target; allowed are {names}");
    }
    let program = cargo_fuzz()?;
    for (target, folders) in TARGETS {
        if args.target.as_ref().is_some_and(|wanted| wanted != target) {
            continue;
        }
        let corpus = root().join(".cache/fuzz").join(target);
        fs::create_dir_all(&corpus)?;
        let mut fuzz = command(&program.to_string_lossy(), &["fuzz", "run", "--fuzz-dir", "tests/fuzz"]);
        fuzz.args(["--sanitizer", "none", "--target-dir", "target/fuzz", target]).arg(&corpus);
        fuzz.args(folders.iter().map(|folder| root().join(folder)));
        fuzz.arg("--").arg(format!("-runs={}", args.runs));
        let dictionary = root().join(format!("tests/fuzz/{target}.dict"));
        if dictionary.is_file() {
            fuzz.arg(format!("-dict={}", dictionary.display()));
        }
        fuzz.args(["-max_len=65536", "-timeout=30", "-rss_limit_mb=2048", "-print_final_stats=1"]);
        if args.runs <= BRIEF {
            // Nobody watches it find its way.
            fuzz.args(["-verbosity=0"]);
        }
        run(&mut fuzz)?;
    }
    Ok(())
}

/// The program; installed once.
fn cargo_fuzz() -> Result<PathBuf> {
    let place = root().join(".cache/cargo-fuzz");
    let program = place.join("bin/cargo-fuzz");
    if !program.is_file() {
        let mut install = cargo(&["install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ, "--root"]);
        run(install.arg(&place))?;
    }
    Ok(program)
}
