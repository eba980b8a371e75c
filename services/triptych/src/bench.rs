//! `triptych bench`: load that is offered to a server, what became of it, and pages about it.

pub mod report;

use crate::error::CliError;
use clap::{Args, Subcommand};
use report::ReportArgs;

/// Flags of `bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// What to do
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What `bench` does.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Make a page of stored results: tables and drawings in one HTML file, or tables as Markdown
    Report(ReportArgs),
}

/// Runs it.
///
/// # Errors
/// [`CliError`] of what was asked for.
pub async fn run(args: BenchArgs) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Report(args) => report::run(&args),
    }
}
