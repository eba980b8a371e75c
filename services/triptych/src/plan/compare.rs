//! `triptych plan compare`: flags and files of the comparison of topologies by simulation.

use super::output::{print, to_json};
use super::question::QuestionArgs;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use triptych_bench::report::files::write;
use triptych_bench::slo::Slo;
use triptych_bench::suite::workloads;
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;
use triptych_plan::comparison::{self, Asked, ComparedDemand, Contest};
use triptych_plan::planner::Named;
use triptych_plan::planner::inputs::PlanInputs;

/// Beginning of the names of workloads with long texts.
const LONG: &str = "epd-long";

/// Flags of `triptych plan compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Inputs of the plan; --workload and --arrivals are of no use here
    #[command(flatten)]
    pub question: QuestionArgs,
    /// Topologies, each with the same cores; the first is compared with the best of the others
    #[arg(
        long = "topology",
        value_name = "NAME,…",
        default_value = "elastic2,1e1pd,dp2,colocated",
        value_delimiter = ','
    )]
    pub topologies: Vec<Topology>,
    /// Cores of the workers of each topology; curves are needed for each number of cores of a worker
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub cores: u16,
    /// Workloads, separated by spaces. Default: the thirteen of `triptych bench suite`
    #[arg(long, value_name = "WORKLOADS", value_delimiter = ' ')]
    pub workloads: Vec<String>,
    /// SLO of workloads with long texts (epd-long), in the day too. Default: --slo
    #[arg(long, value_name = "SLO")]
    pub long_slo: Option<Slo>,
    /// Mixes of a day that changes every two minutes, separated by spaces, all of them among the workloads; `none`: no day
    #[arg(
        long,
        value_name = "WORKLOADS",
        value_delimiter = ' ',
        default_value = "epd-short:images=4 epd-long:images=1 epd-short:images=3 epd-short:images=2,share=0.9"
    )]
    pub day: Vec<String>,
    /// Folder for `compare.json`, `compare.md` and `compare.html`
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
}

/// Simulates, writes the files, prints the page.
///
/// # Errors
/// [`CliError`] for inputs that cannot be used and files that cannot be written.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    let inputs = args.question.read()?;
    if !args.output.is_dir() {
        return Err(CliError::Setting(format!("--output: there is no directory {}", args.output.display())));
    }
    let demands = args.demands()?;
    let mixes = args.mixes(&demands)?;
    let contest = Contest { topologies: args.topologies.clone(), n_cores: args.cores.into() };
    let mut compared = Vec::new();
    for demand in &demands {
        eprintln!("simulating {}", demand.workload.text());
        let asked = Asked { demand, slo: args.slo_of(&inputs, demand) };
        compared.push(contest.compare(&inputs, asked).map_err(|e| CliError::setting("no comparison", &e))?);
    }
    if !mixes.is_empty() {
        eprintln!("simulating a day");
        let mixes =
            mixes.into_iter().filter_map(|i| Some((demands.get(i)?.workload.text(), compared.get(i)?)));
        let day = comparison::day(&mixes.collect::<Vec<_>>(), args.question.arrivals);
        let day = day.map_err(|e| CliError::setting("--day", &e))?;
        let day = contest.compare_day(&inputs, &day, inputs.slo);
        compared.push(day.map_err(|e| CliError::setting("no comparison", &e))?);
    }
    args.write(&inputs, &compared)
}

impl CompareArgs {
    fn demands(&self) -> Result<Vec<Named>, CliError> {
        let names = if self.workloads.is_empty() { workloads() } else { self.workloads.clone() };
        let read = |text: &String| {
            let workload =
                Workload::parse(text).map_err(|e| CliError::setting(format!("--workloads {text}"), &e))?;
            Ok(Named { workload, arrivals: self.question.arrivals })
        };
        names.iter().map(read).collect()
    }

    /// Places of the day's mixes among the demands.
    fn mixes(&self, demands: &[Named]) -> Result<Vec<usize>, CliError> {
        if self.day.iter().any(|name| name == "none") {
            return Ok(Vec::new());
        }
        let place = |name: &String| {
            demands.iter().position(|demand| demand.workload.text() == name).ok_or_else(|| {
                CliError::Setting(format!(
                    "--day {name}: it is none of --workloads; `none` leaves the day out"
                ))
            })
        };
        self.day.iter().map(place).collect()
    }

    fn slo_of(&self, inputs: &PlanInputs, demand: &Named) -> Slo {
        let is_long = demand.workload.text().starts_with(LONG);
        self.long_slo.filter(|_| is_long).unwrap_or(inputs.slo)
    }

    fn write(&self, inputs: &PlanInputs, compared: &[ComparedDemand]) -> Result<(), CliError> {
        let curves = inputs.curves.iter().map(|c| {
            let made = if c.measured.commit.is_empty() { "made by hand" } else { &c.measured.commit };
            format!("{}, {} threads ({made})", c.model, c.threads)
        });
        let facts = vec![
            ("curves".to_owned(), curves.collect::<Vec<_>>().join("; ")),
            ("requests of a run".to_owned(), inputs.effort.requests.to_string()),
            ("seeds".to_owned(), inputs.effort.seeds.to_string()),
        ];
        let report = comparison::report(compared, facts);
        let json = self.output.join("compare.json");
        std::fs::write(&json, to_json(&compared)?)
            .map_err(|e| CliError::failed(format!("cannot write {}", json.display()), &e))?;
        write(&self.output.join("compare.md"), &report)?;
        write(&self.output.join("compare.html"), &report)?;
        print(&report.to_markdown())
    }
}
