//! `triptych plan papers`: flags and page of published figures beside their simulation.

use super::output::print;
use crate::error::CliError;
use clap::Args;
use std::io::Write as _;
use std::path::PathBuf;
use triptych_bench::report::files::write;
use triptych_plan::papers::file::ReadPaper;
use triptych_plan::papers::page::page;
use triptych_plan::papers::simulated::simulated;

/// Flags of `triptych plan papers`.
#[derive(Args, Clone, Debug)]
pub struct PapersArgs {
    /// Files of published figures; curves that they name lie beside them
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Requests of a simulated run, instead of those that the files name
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub requests: Option<u32>,
    /// Folder for `papers.md`; default: the page goes to stdout alone
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// Simulates, writes the file, prints the page.
///
/// # Errors
/// [`CliError`] for files that cannot be used or written.
pub fn run(args: &PapersArgs) -> Result<(), CliError> {
    let mut papers = Vec::new();
    for file in &args.files {
        let mut read = ReadPaper::read(file)?;
        if let Some(n) = args.requests.and_then(|n| usize::try_from(n).ok()) {
            read.paper.n_requests = n;
        }
        papers.push(simulated(read, &|what| {
            // Nobody may be reading it.
            let _ = writeln!(std::io::stderr(), "simulating {what}");
        })?);
    }
    let report = page(&papers);
    if let Some(dir) = &args.output {
        write(&dir.join("papers.md"), &report)?;
    }
    print(&report.to_markdown())
}
