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
    #[command(after_help = LS_EXAMPLES)]
    Ls(ls::LsArgs),
    /// Show what one object is
    #[command(after_help = SHOW_EXAMPLES)]
    Show(show::ShowArgs),
    /// Read objects whole and verify them; exits with 1 if one is bad
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(verify::VerifyArgs),
    /// Remove what is not wanted: leftovers, and objects by encoder, age or size
    #[command(after_help = GC_EXAMPLES)]
    Gc(gc::GcArgs),
    /// Copy objects from one store to another
    #[command(after_help = WARM_EXAMPLES)]
    Warm(Box<warm::WarmArgs>),
}

const LS_EXAMPLES: &str = "\
Examples:
  triptych ec ls --ec disk:/var/lib/triptych/ec     what is there
  triptych ec ls --ec grpc://127.0.0.1:7400         a store process, as `triptych up` prints it
  triptych ec ls --ec shm --long --limit 20         whole keys, of the first 20
  triptych ec ls --ec s3://bucket/ec --json         for a program

A look changes nothing: a store that is not there is an error, and none is made.";

const SHOW_EXAMPLES: &str = "\
Examples:
  triptych ec show 3fa9c1 --ec shm                  by the first digits of its key
  triptych ec show 3fa9c1 --ec disk:DIR --json      for a program";

const VERIFY_EXAMPLES: &str = "\
Examples:
  triptych ec verify --ec disk:DIR                  read everything, say what is bad
  triptych ec verify 3fa9c1 07be --ec shm           these two
  triptych ec verify --ec disk:DIR --quarantine --jobs 16

Without --quarantine nothing is changed.";

const GC_EXAMPLES: &str = "\
Examples:
  triptych ec gc --ec disk:DIR                      leftovers of dead writers, and the quarantine
  triptych ec gc --ec disk:DIR --older-than 7d --to-mib 4096 --dry-run
  triptych ec gc --ec disk:DIR --fingerprint 9c01d7e2     keep the objects of this encoder alone

Stores in memory and Redis keep no times: --older-than is an error there.";

const WARM_EXAMPLES: &str = "\
Examples:
  triptych ec warm --from s3://bucket/ec --to shm   fill this host's slab
  triptych ec warm --from disk:OLD --to redis://10.0.0.1 --jobs 32
  triptych ec warm --from disk:DIR --to shm --stdin < keys     these, one a line";

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
