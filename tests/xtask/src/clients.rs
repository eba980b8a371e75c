//! `cargo xtask clients`: the real clients of the API, unchanged, against a cluster, `tests/clients/run.py`.
//!
//! They come from PyPI and npm, so it is no part of the gate.

use crate::shell::{cargo, command, has, root, run};
use anyhow::{Result, bail};
use clap::Args;

/// Settings of `cargo xtask clients`.
#[derive(Args, Debug)]
pub struct ClientsArgs {
    /// Scripts of `tests/clients` to run, by a part of their names; all of them by default
    only: Vec<String>,
}

/// # Errors
/// If a program is missing, the binary cannot be built, or a client fails.
pub fn clients(args: &ClientsArgs) -> Result<()> {
    for program in ["python3", "node", "npm"] {
        if !has(program) {
            bail!("the clients need {program}: install it, then run this again");
        }
    }
    run(&mut cargo(&["build", "-p", "triptych"]))?;
    let mut clients = command("python3", &["tests/clients/run.py", "--binary"]);
    run(clients.arg(root().join("target/debug/triptych")).args(&args.only))
}
