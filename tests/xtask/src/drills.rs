//! `cargo xtask sim` and `cargo xtask chaos`: the suites that CI runs briefly, for as long as one likes.

use crate::servers;
use crate::shell::{cargo, root, run};
use anyhow::Result;
use clap::Args;

/// Settings of `cargo xtask sim`.
#[derive(Args, Debug)]
pub struct SimArgs {
    /// Seeds to run; about thirty a second and core
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 1)]
    from: u64,
}

/// Settings of `cargo xtask chaos`.
#[derive(Args, Debug)]
pub struct ChaosArgs {
    /// Requests to send
    #[arg(long, default_value_t = 10_000)]
    requests: u64,
    /// Number from which faults are drawn
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Streams that are to be resumed, at least [default: a hundredth of the requests]
    #[arg(long)]
    resumed: Option<u64>,
    /// File of the report
    #[arg(long, default_value = "benches/results/chaos.md")]
    report: String,
}

/// # Errors
/// If a seed fails; its history is shown.
pub fn sim(args: &SimArgs) -> Result<()> {
    let mut test = cargo(&["test", "--workspace", "--test", "sim", "every_accepted", "--", "--nocapture"]);
    test.env("SIM_SEEDS", args.seeds.to_string()).env("SIM_FROM", args.from.to_string());
    run(&mut test)
}

/// # Errors
/// If anything was lost or wrong.
pub fn chaos(args: &ChaosArgs) -> Result<()> {
    servers::ensure()?;
    run(&mut cargo(&["build", "--release", "-p", "triptych"]))?;
    let mut test = cargo(&["test", "--workspace", "--test", "chaos", "--", "--nocapture"]);
    test.env("TRIPTYCH_BIN", root().join("target/release/triptych"))
        .env("CHAOS_REQUESTS", args.requests.to_string())
        .env("CHAOS_SEED", args.seed.to_string())
        .env("CHAOS_RESUMED", args.resumed.unwrap_or(args.requests / 100).to_string())
        .env("CHAOS_REPORT", root().join(&args.report));
    run(&mut test)
}
