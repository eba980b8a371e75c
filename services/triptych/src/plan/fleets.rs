//! `triptych plan fleets`: flags and files of the simulated cost of a request in fleets of growing size.

use super::output::{PlanScreen, print, to_json};
use super::question::QuestionArgs;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use triptych_bench::report::files::write;
use triptych_plan::planner::{Budget, fleets};

/// Flags of `triptych plan fleets`.
#[derive(Args, Clone, Debug)]
pub struct FleetsArgs {
    /// Inputs of the plan
    #[command(flatten)]
    pub question: QuestionArgs,
    /// Workers of each fleet
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "8,64,512",
          value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub workers: Vec<u32>,
    /// Folder for `fleets.json`, `fleets.md` and `fleets.html`
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
}

/// Plans the fleets, writes the files, prints the page.
///
/// # Errors
/// [`CliError`] for inputs that cannot be used and files that cannot be written.
pub fn run(args: &FleetsArgs) -> Result<(), CliError> {
    let inputs = args.question.read()?;
    if !args.output.is_dir() {
        return Err(CliError::Setting(format!("--output: there is no directory {}", args.output.display())));
    }
    let sizes: Vec<usize> = args.workers.iter().filter_map(|n| usize::try_from(*n).ok()).collect();
    let screen = PlanScreen::new();
    let largest = Budget::Workers(sizes.iter().copied().max().unwrap_or(2));
    let question = inputs.question(largest, &inputs.demand);
    let planned = fleets::fleets(&question, &sizes, &|step| screen.show(step));
    screen.end();
    let planned = planned.map_err(|e| CliError::setting("no fleets", &e))?;
    let report = fleets::report(&question, &planned);
    let json = args.output.join("fleets.json");
    std::fs::write(&json, to_json(&planned)?)
        .map_err(|e| CliError::failed(format!("cannot write {}", json.display()), &e))?;
    write(&args.output.join("fleets.md"), &report)?;
    write(&args.output.join("fleets.html"), &report)?;
    print(&report.to_markdown())
}
