//! `cargo xtask test`: what a change is held to, in the order in which mistakes are cheapest to find.

use crate::fuzz;
use crate::servers;
use crate::shell::{self, cargo, root};
use crate::static_binary;
use crate::tools;
use crate::whisper;
use anyhow::Result;
use std::time::{Duration, Instant};

/// Tests of the whole cluster start this binary; `cargo test --workspace` builds it.
const BINARY: &str = "target/debug/triptych";

/// The ladder of kernels at its smaller shapes, once each: that it runs, not how fast.
const BENCHES: [&str; 7] =
    ["test", "--workspace", "--bench", "kernels", "--", "--test", "linear/.*x512x2048|attention/128"];

/// Runs every step; the first that fails ends it.
///
/// # Errors
/// If a step fails.
fn run_steps(steps: &[(&str, &dyn Fn() -> Result<()>)]) -> Result<Vec<(String, Duration)>> {
    let mut times = Vec::new();
    for (i, (name, step)) in steps.iter().enumerate() {
        println!("\n━━ {}/{} {name}", i + 1, steps.len());
        let start = Instant::now();
        step()?;
        times.push(((*name).to_owned(), start.elapsed()));
    }
    Ok(times)
}

/// The command.
///
/// # Errors
/// If a step fails.
pub fn run() -> Result<()> {
    let start = Instant::now();
    let times = run_steps(&[
        ("servers that tests need", &servers::ensure),
        ("tools that tests need", &tools::ensure),
        ("format", &|| cargo_shown(&["fmt", "--all", "--check"])),
        ("lints", &|| cargo_shown(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
        ("the real Whisper", &whisper::run),
        ("static binary", &static_binary::run_build),
        ("build of the tests", &|| cargo_shown(&["test", "--workspace", "--no-run"])),
        ("tests", &|| cargo_shown(&["test", "--workspace", "--no-fail-fast"])),
        ("benches, briefly", &|| cargo_shown(&BENCHES)),
        ("fuzzing, briefly", &fuzz::brief),
    ])?;
    let times: Vec<_> = times.iter().map(|(name, time)| format!("{name} {}", minutes(*time))).collect();
    println!("\nAll of it passed in {}: {}", minutes(start.elapsed()), times.join(", "));
    Ok(())
}

fn cargo_shown(args: &[&str]) -> Result<()> {
    let mut command = cargo(args);
    command.env("TRIPTYCH_BIN", root().join(BINARY)).env("TRIPTYCH_WEED", servers::s3_program());
    println!("$ cargo {}", args.join(" "));
    shell::run(&mut command)
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..60 => format!("{s} s"),
        s => format!("{} min {} s", s / 60, s % 60),
    }
}
