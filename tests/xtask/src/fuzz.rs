//! `cargo xtask fuzz`: every place that reads bytes from outside, under libFuzzer.
//!
//! Needs a C++ compiler. Without sanitizers, so that the stable toolchain does: ours is safe Rust, and what is looked for is
//! panics, hangs and memory. A long run has coverage counters in every crate. A brief one has them in those of ours that read
//! outside bytes ([`Form::Fuzzed`]) and shares all others with the tests.

use crate::lanes::in_two_lanes;
use crate::rustc::{self, COVERAGE, Form};
use crate::shell::{cargo, command, root, run, show};
use crate::static_binary::AS_FOR_TESTS;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The targets, each with the folders of files that it starts from.
const TARGETS: [(&str, &[&str]); 7] = [
    ("object", &[]),
    ("wire", &[]),
    ("http", &["tests/fuzz/seeds/http"]),
    ("image", &["tests/models/heldout/scenes", "services/models/tests/media"]),
    ("video", &["tests/golden/video"]),
    ("audio", &["tests/models/heldout/digits", "services/models/tests/media"]),
    ("weights", &["tests/golden/pickled"]),
];

/// Settings of `cargo xtask fuzz`.
#[derive(Args, Debug)]
pub struct FuzzArgs {
    /// One target: object, wire, http, image, video, audio, weights. Default: all
    #[arg(long)]
    target: Option<String>,
    /// Inputs to try
    #[arg(long, default_value_t = 1_000_000)]
    runs: u64,
}

/// Inputs of a short run, of each target.
const BRIEF: u64 = 20_000;
/// Seconds after which a short run of a target ends with fewer.
const BRIEF_SECONDS: u32 = 30;

/// The short run of `cargo xtask test`: one target or all, from their own seeds.
///
/// # Errors
/// As [`fuzz`].
pub fn brief(target: Option<&str>) -> Result<()> {
    let mut build = build(target)?;
    build.args(AS_FOR_TESTS);
    rustc::apart(&mut build, Form::Fuzzed)?;
    run(&mut build)?;
    run_targets(target, BRIEF, &root().join("target/debug"))
}

/// The long run.
///
/// # Errors
/// If a target ends in a panic, a hang, or too much memory; the input is named.
pub fn fuzz(args: &FuzzArgs) -> Result<()> {
    let target = args.target.as_deref();
    let mut build = build(target)?;
    // Its own folder: flags of all crates would drop what the tests have built.
    build
        .args(["--package", "triptych-fuzz", "--target-dir", "target/fuzz"])
        .env("RUSTFLAGS", COVERAGE.join(" "));
    run(&mut build)?;
    run_targets(target, args.runs, &root().join("target/fuzz/debug"))
}

/// Cargo, for the programs of one target or of all.
fn build(target: Option<&str>) -> Result<Command> {
    let names = TARGETS.map(|(target, _)| target);
    if let Some(wanted) = target.filter(|wanted| !names.contains(wanted)) {
        bail!("{wanted:?} is no target; allowed are {}", names.join(", "));
    }
    let mut build = cargo(&["build", "--features", "triptych-fuzz/libfuzzer"]);
    for name in names.iter().filter(|name| target.is_none_or(|wanted| wanted == **name)) {
        build.arg("--bin").arg(program(name));
    }
    Ok(build)
}

fn program(target: &str) -> String {
    format!("fuzz-{target}")
}

fn run_targets(wanted: Option<&str>, runs: u64, programs: &Path) -> Result<()> {
    let is_wanted = |target: &str| wanted.is_none_or(|wanted| wanted == target);
    let chosen = TARGETS.iter().filter(|(target, _)| is_wanted(target));
    let fuzzers = chosen.map(|(target, seeds)| fuzzer(target, seeds, (runs, programs)));
    let fuzzers = fuzzers.collect::<Result<Vec<_>>>()?;
    match runs <= BRIEF {
        // Each computes on one core.
        true => in_two_lanes(fuzzers, Vec::new(), run_and_show),
        false => fuzzers.into_iter().try_for_each(|mut fuzzer| run(&mut fuzzer)),
    }
}

/// The program of a target, from its corpus and these folders of seeds.
fn fuzzer(target: &str, seeds: &[&str], (runs, programs): (u64, &Path)) -> Result<Command> {
    let corpus = made(&root().join(".cache/fuzz").join(target))?;
    let failures = made(&root().join("target/fuzz/failures"))?;
    let mut fuzz = command(&programs.join(program(target)).to_string_lossy(), &[]);
    fuzz.arg(&corpus).args(seeds.iter().map(|folder| root().join(folder)));
    fuzz.arg(format!("-artifact_prefix={}/{target}-", failures.display())).arg(format!("-runs={runs}"));
    let dictionary = root().join(format!("tests/fuzz/{target}.dict"));
    if dictionary.is_file() {
        fuzz.arg(format!("-dict={}", dictionary.display()));
    }
    fuzz.args(["-max_len=65536", "-timeout=30", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    if runs <= BRIEF {
        // Nobody watches it find its way.
        fuzz.arg("-verbosity=0").arg(format!("-max_total_time={BRIEF_SECONDS}"));
    }
    Ok(fuzz)
}

/// Runs it and shows its output when it has ended: others run meanwhile.
fn run_and_show(mut fuzzer: Command) -> Result<()> {
    let shown = show(&fuzzer);
    let output = fuzzer.output().with_context(|| format!("cannot start `{shown}`"))?;
    println!("$ {shown}\n{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "`{shown}` ended with {}", output.status);
    Ok(())
}

/// A folder that is there.
fn made(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    Ok(folder.to_owned())
}
