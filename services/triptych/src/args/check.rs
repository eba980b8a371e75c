//! The flag with which a role reads its settings and starts nothing.

use clap::Args;

/// `--check` of a role.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Settings")]
pub struct CheckArgs {
    /// Read the settings, start nothing, and end: with 0 if the role could start with them, else with 2 and what is wrong
    #[arg(long)]
    pub check: bool,
}
