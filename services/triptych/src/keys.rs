//! `triptych keys`: API keys for the file that `triptych proxy --api-keys` reads.

use crate::error::CliError;
use clap::{Args, Subcommand};
use std::io::Write;
use triptych_proxy::auth::keys;

/// Flags of `keys`.
#[derive(Args, Debug)]
pub struct KeysArgs {
    /// Command
    #[command(subcommand)]
    pub action: Action,
}

/// Commands of `keys`.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Make a key: the key itself goes to stderr, once; its line for the file goes to stdout
    New {
        /// The tenant it is for
        #[arg(long, value_name = "NAME", value_parser = tenant)]
        tenant: String,
        /// The models it is for; left out, all
        #[arg(long, value_name = "NAME", value_delimiter = ',')]
        models: Vec<String>,
    },
}

/// A name that fits into a line of words.
fn tenant(text: &str) -> Result<String, String> {
    let fits =
        !text.is_empty() && text.len() <= 256 && !text.contains(|c: char| c.is_whitespace() || c == '#');
    fits.then(|| text.to_owned()).ok_or_else(|| "1 to 256 bytes without white space and #".into())
}

/// Runs the command.
///
/// # Errors
/// [`CliError::Failed`] if stdout is closed.
pub fn run(args: KeysArgs) -> Result<(), CliError> {
    let Action::New { tenant, models } = args.action;
    let (key, hash) = keys::generate();
    let models = if models.is_empty() { String::new() } else { format!(" models={}", models.join(",")) };
    let write = || {
        writeln!(std::io::stderr(), "the key, for the client; it is kept nowhere:\n{key}")?;
        writeln!(std::io::stdout(), "key {hash} {tenant}{models}")
    };
    write().map_err(|e| CliError::failed("cannot print the key", &e))
}
