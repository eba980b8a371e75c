//! The one binary: `triptych up | proxy | encoder | pd | store | ask | models | ec | health`.
//!
//! Here settings are read, processes are started and texts for people are written; everything that serves
//! lives in the libraries. Read in this order:
//!
//! - [`cli`] and [`args`]: the commands and the flags that several of them share;
//! - [`config`]: the same flags from a file, and what they are in the end;
//! - [`role`]: one process of the cluster, from its flags to its library's `run`;
//! - [`topology`]: clusters that are started to be compared;
//! - [`up`]: the supervisor that starts the roles as children of itself;
//! - [`ask`]: the client;
//! - [`bench`]: the load generator;
//! - [`health`]: the probe of an image that has nothing else;
//! - [`top`]: pools, queues and rates of a running cluster;
//! - [`keys`]: API keys;
//! - [`models`]: what a model directory is, and what serving it takes;
//! - [`ec`]: what an operator does with a store of encoder outputs;
//! - [`profile`]: cost curves of a model on this machine;
//! - [`plan`]: how many workers of which kind, once or beside a running cluster;
//! - [`model`]: which model directories to serve, also from the hub and from the binary itself.
#![forbid(unsafe_code)]

mod args;
mod ask;
mod bench;
mod cli;
mod commit;
mod config;
mod ec;
mod ec_choice;
mod ec_meters;
mod error;
mod health;
mod keys;
mod listen;
mod model;
mod models;
mod orphan;
mod plain_http;
mod plan;
mod profile;
mod role;
mod shared_dir;
mod top;
mod topology;
mod units;
mod up;

use clap::CommandFactory;
use cli::{Cli, Command};
use error::CliError;
use std::io::Write;
use std::process::ExitCode;
use tokio::runtime::Builder;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    triptych_runtime::tls::install_provider();
    let cli = match config::complete(&Cli::command(), std::env::args_os().collect()) {
        Ok(args) => Cli::of_completed(args).unwrap_or_else(|e| e.exit()),
        Err(e) => return report(&e),
    };
    if matches!(cli.command, Command::GrammarTrial) {
        return triptych_pd::grammar::run_trial();
    }
    if let Some(pid) = cli.supervised_by {
        orphan::die_with(pid);
    }
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => report(&e),
    }
}

fn report(e: &CliError) -> ExitCode {
    // A closed stderr must not turn an error into a panic.
    let _ = writeln!(std::io::stderr(), "error: {e}");
    ExitCode::from(e.exit_code())
}

fn run(command: Command) -> Result<(), CliError> {
    match command {
        // On one thread: the children's lives are bound to the thread that starts them.
        Command::Up(args) => block_on(Builder::new_current_thread(), up::run(args)),
        Command::Ask(args) => block_on(Builder::new_current_thread(), ask::run(args)),
        Command::Models(args) => block_on(Builder::new_current_thread(), models::run(args)),
        Command::Ec(args) => block_on(Builder::new_multi_thread(), ec::run(args)),
        // On this thread: the lives of the clusters that it starts are bound to it.
        Command::Bench(args) => block_on(Builder::new_multi_thread(), bench::run(args)),
        Command::Profile(args) => block_on(Builder::new_multi_thread(), profile::run(*args)),
        Command::Plan(args) => block_on(Builder::new_multi_thread(), plan::run(*args)),
        Command::Top(args) => block_on(Builder::new_current_thread(), top::run(args)),
        Command::Keys(args) => keys::run(args),
        Command::Config(args) => config::run(&Cli::command(), args),
        Command::Health(args) => block_on(Builder::new_current_thread(), health::run(args)),
        Command::Proxy(args) if args.check => args.role.check(),
        Command::Proxy(args) => block_on(Builder::new_multi_thread(), role::proxy::run(args.role)),
        Command::Encoder(args) if args.check => args.role.check(),
        Command::Encoder(args) => block_on(Builder::new_multi_thread(), role::encoder::run(args.role)),
        Command::Pd(args) if args.check => args.role.check(),
        Command::Pd(args) => block_on(Builder::new_multi_thread(), role::pd::run(args.role)),
        Command::Store(args) if args.check => args.role.check(),
        Command::Store(args) => block_on(Builder::new_multi_thread(), role::store::run(args.role)),
        // `main` runs it: its exit code is its own.
        Command::GrammarTrial => Ok(()),
    }
}

fn block_on(
    mut builder: Builder,
    command: impl Future<Output = Result<(), CliError>>,
) -> Result<(), CliError> {
    let runtime =
        builder.enable_all().build().map_err(|e| CliError::failed("cannot start the async runtime", &e))?;
    let ended = runtime.block_on(command);
    // A download that nobody waits for must not hold the process.
    runtime.shutdown_background();
    ended
}
