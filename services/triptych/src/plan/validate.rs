//! `triptych plan validate`: flags of the comparison of measured clusters with their simulation, and its files.
//!
//! With `--quick` each run is a few seconds: a smoke test that validates nothing. With `--results` nothing is started: results
//! that `triptych bench` stored are compared.

use super::output::{print, to_json};
use super::question::QuestionArgs;
use super::run::blocking;
use crate::args::LogArgs;
use crate::commit::commit;
use crate::error::CliError;
use crate::model;
use crate::topology::{Starter, TopologyArgs};
use crate::up::screen::Screen;
use clap::Args;
use clap::builder::FalseyValueParser;
use std::path::{Path, PathBuf};
use std::time::Duration;
use triptych_bench::error::MeasureError;
use triptych_bench::report::files::{read_all, write};
use triptych_bench::sweep::SweepSettings;
use triptych_bench::topology::{Topology, Workers};
use triptych_bench::workload::Workload;
use triptych_plan::planner::inputs::PlanInputs;
use triptych_plan::profile::Busy;
use triptych_plan::validation::measured::{MeasuredValidation, ValidationSettings};
use triptych_plan::validation::{Validation, stored};

/// Workloads that neither planner nor simulator was tuned with.
const HELD_OUT: &str = "epd-long:images=2 mixed";

/// Flags of `triptych plan validate`.
#[derive(Args, Clone, Debug)]
pub struct ValidateArgs {
    /// Inputs of the plan
    #[command(flatten)]
    pub question: QuestionArgs,
    /// Workloads on which the plan is compared with an exhaustive sweep, separated by spaces; `none`: only latencies
    #[arg(long, value_name = "WORKLOADS", default_value = HELD_OUT)]
    pub held_out: String,
    /// Judged requests of a measured run
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    pub measured_requests: u64,
    /// Longest judged part of a measured run, in seconds
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_window_s: u64,
    /// Stored results of `triptych bench`, or folders of them: these are compared, each by its own SLO, and nothing is started.
    /// Of several --curves of as many threads each is simulated with those that `plan calibrate` scaled last before it
    #[arg(long, value_name = "RESULT.json")]
    pub results: Vec<PathBuf>,
    /// With --results: scale the simulated machine to the mean step time that the workers reported in each run, so that the
    /// load of neighbours on a shared machine is not an error of the simulation
    #[arg(long, requires = "results", value_parser = FalseyValueParser::new())]
    pub as_reported: bool,
    /// Folder for `validation.json`, `.md` and `.html`, and `residuals.json` for the intervals of later plans
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
    /// Clusters
    #[command(flatten)]
    pub topology: TopologyArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Measures, simulates and compares; writes the files, prints the page.
///
/// # Errors
/// [`CliError`] for settings that cannot work, and if a cluster dies: its measurements are void.
pub async fn run(args: ValidateArgs) -> Result<(), CliError> {
    if !args.output.is_dir() {
        return Err(CliError::Setting(format!("--output: there is no directory {}", args.output.display())));
    }
    let validation = match args.results.is_empty() {
        true => measure(&args, &args.question.read()?).await?,
        false => compare(&args).await?,
    };
    print(&validation.report().to_markdown())
}

/// Compares stored results, each by its own SLO.
async fn compare(args: &ValidateArgs) -> Result<Validation, CliError> {
    let results = read_all(&args.results)?;
    let slo = results.first().and_then(|result| result.setup.slo.parse().ok());
    let inputs = match slo {
        Some(slo) => args.question.read_with(slo)?,
        None => args.question.read()?,
    };
    let (stored_inputs, as_reported) = (inputs.clone(), args.as_reported);
    let compared = blocking(move || Ok(stored::validate(&stored_inputs, &results, as_reported)?)).await?;
    let validation = Validation { warnings: warnings(args, &inputs), ..compared };
    save((&args.output, &inputs), &validation)?;
    Ok(validation)
}

/// Starts clusters and measures them.
async fn measure(args: &ValidateArgs, inputs: &PlanInputs) -> Result<Validation, CliError> {
    let held_out = held_out(&args.held_out)?;
    args.topology.pin_self()?;
    let told = TopologyArgs { tpot_slo: inputs.slo.tpot, ..args.topology.clone() };
    let model = model::check_one(&args.topology.models).await?;
    let screen = Screen::new(&args.log)?;
    let dir = tempfile::tempdir().map_err(|e| CliError::failed("cannot make a folder", &e))?;
    let settings = settings(args)?;
    let mut validation = MeasuredValidation {
        inputs,
        starter: &Starter { args: &told, model: &model, screen: &screen, dir: dir.path() },
        settings: &settings,
        report: &|line| screen.say(line),
        save: &|validation| save((&args.output, inputs), validation),
        validation: Validation {
            facts: facts(args, inputs),
            warnings: warnings(args, inputs),
            ..Validation::default()
        },
    };
    validation.latencies().await?;
    for workload in &held_out {
        validation.regret(workload).await?;
    }
    let validation = validation.validation;
    let (misses, all) = validation.misses();
    screen.say(&format!("{misses} of {all} percentiles miss their goal"));
    for bar in validation.bars() {
        let word = bar.passed.map_or("not measured", |passed| if passed { "passed" } else { "missed" });
        screen.say(&format!("{word}: {}: {}, allowed {}", bar.what, bar.found, bar.allowed));
    }
    Ok(validation)
}

fn settings(args: &ValidateArgs) -> Result<ValidationSettings, CliError> {
    let question = &args.question;
    let seeds = if question.quick { vec![1] } else { (1..=question.seeds.unwrap_or(3)).collect() };
    let (cores, _) = args.topology.core_lists()?;
    Ok(ValidationSettings {
        sweep: SweepSettings {
            arrivals: question.arrivals,
            seeds,
            n_requests: n_requests(args),
            max_window: Duration::from_secs(if question.quick { 4 } else { args.max_window_s }),
            warm_up: question.quick.then(|| Duration::from_secs(1)),
            commit: commit(),
            ..SweepSettings::default()
        },
        resolution: if question.quick { 1.0 } else { 0.05 },
        n_cores: cores.iter().count(),
        topologies: topologies(args)?,
    })
}

/// Writes the comparisons so far.
fn save((dir, inputs): (&Path, &PlanInputs), validation: &Validation) -> Result<(), MeasureError> {
    let report = validation.report();
    write_json(&dir.join("validation.json"), validation)?;
    write_json(&dir.join("residuals.json"), &validation.residuals(inputs))?;
    write(&dir.join("validation.md"), &report)?;
    write(&dir.join("validation.html"), &report)
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), MeasureError> {
    std::fs::write(path, to_json(value)?)
        .map_err(|e| MeasureError::failed(format!("cannot write {}", path.display()), &e))
}

fn held_out(text: &str) -> Result<Vec<Workload>, CliError> {
    if text.trim() == "none" {
        return Ok(Vec::new());
    }
    let read =
        |text: &str| Workload::parse(text).map_err(|e| CliError::setting(format!("--held-out {text}"), &e));
    text.split_whitespace().map(read).collect()
}

/// The named topologies, or all ratios of workers with one core each.
fn topologies(args: &ValidateArgs) -> Result<Vec<Topology>, CliError> {
    if !args.topology.topologies.is_empty() {
        return Ok(args.topology.topologies.clone());
    }
    let (cores, _) = args.topology.core_lists()?;
    let n = cores.iter().count();
    let disaggregated = (1..n).map(|n_encoders| Workers::Disaggregated { n_encoders, n_pds: n - n_encoders });
    let colocated = [Workers::Colocated { n }, Workers::Colocated { n: 1 }];
    let mut all: Vec<Topology> =
        disaggregated.chain(colocated).map(|workers| Topology { workers, budget: None }).collect();
    all.dedup();
    Ok(all)
}

fn facts(args: &ValidateArgs, inputs: &PlanInputs) -> Vec<(String, String)> {
    let curves = inputs.curves.iter().map(|c| {
        format!("{} threads, commit {}, {:.0} % busy", c.threads, c.measured.commit, c.measured.busy * 1e2)
    });
    vec![
        ("workload".into(), args.question.workload.clone()),
        ("SLO".into(), inputs.slo.to_string()),
        ("curves".into(), curves.collect::<Vec<_>>().join("; ")),
        ("judged requests of a run".into(), n_requests(args).to_string()),
    ]
}

/// Judged requests of a measured run.
fn n_requests(args: &ValidateArgs) -> u64 {
    if args.question.quick { 20 } else { args.measured_requests }
}

fn warnings(args: &ValidateArgs, inputs: &PlanInputs) -> Vec<String> {
    let mut warnings = Vec::new();
    if args.question.quick {
        warnings.push(
            "a quick run: a few requests of one seed; it shows that everything works, and validates nothing"
                .to_owned(),
        );
    }
    let busy = inputs.curves.iter().map(|c| c.measured.busy).fold(0.0, f64::max);
    if busy > Busy::DOUBTFUL {
        warnings
            .push(format!("the curves were measured on a machine of which others used {:.0} %", busy * 1e2));
    }
    warnings
}
