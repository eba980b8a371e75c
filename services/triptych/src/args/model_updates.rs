//! Flag that lets operators load and unload models while a worker serves.

use crate::error::CliError;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

/// Changes of models.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Models")]
pub struct ModelUpdateArgs {
    /// Directory below which an operator may name models to load while the worker serves, by the admin API of the proxy. Default:
    /// models are those of the start
    #[arg(long, value_name = "DIR", env = "TRIPTYCH_MODEL_UPDATES")]
    pub model_updates: Option<PathBuf>,
}

impl ModelUpdateArgs {
    /// The directory.
    ///
    /// # Errors
    /// [`CliError::Setting`] for one that is not there.
    pub fn dir(&self) -> Result<Option<PathBuf>, CliError> {
        let Some(dir) = &self.model_updates else { return Ok(None) };
        let found = dir.canonicalize().ok().filter(|dir| dir.is_dir());
        let missing =
            || CliError::Setting(format!("--model-updates {}: there is no such directory", dir.display()));
        found.map(Some).ok_or_else(missing)
    }

    /// The flag, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        self.model_updates.iter().flat_map(|dir| ["--model-updates".into(), dir.into()]).collect()
    }
}
