//! `cargo xtask vllm`: the Python package `services/ec/python` against our stores, a real Redis and a real vLLM, and rows of
//! our encoders against those of vLLM's.
//!
//! vLLM and torch come from PyPI, some gigabytes, into a virtual environment below `target`, so it is no part of the gate.

use crate::shell::{cargo, command, has, root, run};
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;

/// Folder of the package.
const PACKAGE: &str = "services/ec/python";
/// vLLM for the CPU with all that it needs, pinned.
const PINNED: &str = "benches/peers/requirements-vllm.txt";
/// Needs of the tests beyond those.
const OF_TESTS: [&str; 2] = ["pytest", "redis"];

/// Settings of `cargo xtask vllm`.
#[derive(Args, Debug)]
pub struct VllmArgs {
    /// An interpreter that has vLLM, grpcio, blake3, redis and pytest already; by default a virtual environment is made
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// More for pytest, as `tests/test_stores.py` or `-k redis`
    #[arg(last = true)]
    more: Vec<String>,
}

/// # Errors
/// If a program is missing, the environment or a binary cannot be made, or a test fails.
pub fn vllm(args: &VllmArgs) -> Result<()> {
    for program in ["python3", "redis-server", "openssl"] {
        if !has(program) {
            bail!("the tests need {program}: install it, then run this again");
        }
    }
    run(&mut cargo(&["build", "-p", "triptych"]))?;
    run(&mut cargo(&["build", "-p", "triptych-ec", "--example", "ec_object"]))?;
    let python = match &args.python {
        Some(python) => python.clone(),
        None => environment()?,
    };
    let mut tests = command(&python.display().to_string(), &["-m", "pytest", "-p", "no:cacheprovider"]);
    let package = root().join(PACKAGE);
    tests.env("PYTHONPATH", package.join("src")).env("PYTHONDONTWRITEBYTECODE", "1");
    run(tests.current_dir(package).args(&args.more))
}

/// The interpreter of a virtual environment with vLLM, made at the first call.
fn environment() -> Result<PathBuf> {
    let folder = root().join("target/vllm-venv");
    let python = folder.join("bin/python");
    let is_whole = folder.join("whole");
    if !is_whole.is_file() {
        run(command("python3", &["-m", "venv"]).arg(&folder))?;
        let pip =
            |args: &[&str]| run(command(&python.display().to_string(), &["-m", "pip", "install"]).args(args));
        pip(&["--no-deps", "-r", PINNED])?;
        pip(&OF_TESTS)?;
        std::fs::write(&is_whole, "")?;
    }
    Ok(python)
}
