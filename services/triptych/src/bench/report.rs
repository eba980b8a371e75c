//! `triptych bench report`: stored results as a page.

use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use triptych_bench::report::{Report, files};

/// Flags of `bench report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Results as JSON, or folders of them; those of one workload are compared
    #[arg(required = true, value_name = "RESULT.json")]
    pub results: Vec<PathBuf>,
    /// File of the page: HTML, or Markdown if it ends with `.md`
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
    /// Heading of the page
    #[arg(long, value_name = "TEXT", default_value = "Goodput")]
    pub title: String,
}

/// Writes the page, and prints its path.
///
/// # Errors
/// [`CliError`] that names the file at fault.
pub fn run(args: &ReportArgs) -> Result<(), CliError> {
    let sweeps = files::read_all(&args.results)?;
    files::write(&args.out, &Report::of_sweeps(&args.title, &sweeps))?;
    println!("{}", args.out.display());
    Ok(())
}
