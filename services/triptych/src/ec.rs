//! `triptych ec`: what an operator does with a store of encoder outputs, from outside the cluster and beside it.
//!
//! Everything goes through the trait of the stores, so it works on each of them as far as that one can: a store that
//! cannot list says so.

mod gc;
mod ls;
mod objects;
mod show;
mod verify;
mod warm;

use crate::error::CliError;
use clap::{Args, Subcommand};

/// `triptych ec`.
#[derive(Args, Debug)]
pub struct EcCommandArgs {
    /// Command.
    #[command(subcommand)]
    command: EcCommand,
}

#[derive(Debug, Subcommand)]
enum EcCommand {
    /// List the objects of a store
    Ls(ls::LsArgs),
    /// Show what one object is
    Show(show::ShowArgs),
    /// Read objects whole and verify them; exits with 1 if one is bad
    Verify(verify::VerifyArgs),
    /// Remove what is not wanted: leftovers, and objects by encoder, age or size
    Gc(gc::GcArgs),
    /// Copy objects from one store to another
    Warm(Box<warm::WarmArgs>),
}

/// Runs one of them.
///
/// # Errors
/// [`CliError`] for a store that cannot be opened or asked, and as each of them says.
pub async fn run(args: EcCommandArgs) -> Result<(), CliError> {
    match args.command {
        EcCommand::Ls(args) => ls::run(args).await,
        EcCommand::Show(args) => show::run(args).await,
        EcCommand::Verify(args) => verify::run(args).await,
        EcCommand::Gc(args) => gc::run(args).await,
        EcCommand::Warm(args) => warm::run(*args).await,
    }
}
