//! `cargo xtask peers`: the bench beside other engines, `benches/peers/run.py`.
//!
//! It fetches gigabytes (torch, CTranslate2, models), so it is no part of the gate.

use crate::shell::{cargo, command, root, run};
use anyhow::Result;
use clap::Args;

/// Settings of `cargo xtask peers`.
#[derive(Args, Debug)]
pub struct PeersArgs {
    /// Tiny shapes and an unoptimised binary: that it runs, not how fast
    #[arg(long)]
    smoke: bool,
    /// More for `benches/peers/run.py`; behind `--`, `--help` lists it
    #[arg(last = true)]
    more: Vec<String>,
}

/// # Errors
/// If the bench cannot be built, or does not run.
pub fn peers(args: &PeersArgs) -> Result<()> {
    let mut bench = command("python3", &["benches/peers/run.py"]);
    if args.smoke {
        run(&mut cargo(&["build", "-p", "triptych-benches", "--bin", "throughput"]))?;
        bench.args(["--smoke", "--binary"]).arg(root().join("target/debug/throughput"));
    }
    run(bench.args(&args.more))
}
