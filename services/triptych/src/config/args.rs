//! The flag of the config file.

use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

/// The flag of the config file.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Settings")]
pub struct ConfigArgs {
    /// TOML file of settings: flags by their long names, for all roles or in a section of one, as in `[proxy]`. Flags and
    /// variables win over it; `triptych config` prints one with every key
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_CONFIG")]
    pub config: Option<PathBuf>,
}

impl ConfigArgs {
    /// The flag, for a child: it takes from its own section what its supervisor does not say.
    pub fn to_flags(&self) -> Vec<OsString> {
        self.config.iter().flat_map(|file| ["--config".into(), file.into()]).collect()
    }
}
