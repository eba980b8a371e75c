//! Flags of the proxy's admin API and accounting.

use crate::error::{CliError, chain};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use triptych_proxy::AdminToken;

/// Flags for operators.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "For operators")]
pub struct OperatorArgs {
    /// File with the token of the admin API, one word of at least 16 bytes: callers send `Authorization: Bearer TOKEN`.
    /// Without it the admin API is for callers on this machine, if --admin is on a loopback address, else off
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// Append a line of JSON for each request that ends to this file: tenant, model, tokens, items, outcome. It names
    /// tenants
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_ACCOUNTING_LOG")]
    pub accounting_log: Option<PathBuf>,
}

impl OperatorArgs {
    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let files =
            [("--admin-token-file", &self.admin_token_file), ("--accounting-log", &self.accounting_log)];
        let set = files.into_iter().filter_map(|(flag, file)| Some([flag.into(), file.as_ref()?.into()]));
        set.flatten().collect()
    }

    /// The token, if there is one.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a file without a usable token.
    pub fn token(&self) -> Result<Option<AdminToken>, CliError> {
        let file = self.admin_token_file.as_deref();
        file.map(AdminToken::read).transpose().map_err(|e| CliError::Setting(chain(&e)))
    }
}
