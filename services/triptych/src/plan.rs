//! `triptych plan`: the flags of the planner, which is [`triptych_plan`], and its output.

mod calibrate;
mod compare;
mod fleets;
mod maps;
mod output;
mod papers;
mod question;
mod run;
mod trace;
mod validate;
mod watch;

use crate::error::CliError;
use clap::builder::FalseyValueParser;
use clap::{Args, Subcommand};
use output::{PlanScreen, print, to_json};
use question::QuestionArgs;
use run::blocking;
use triptych_plan::planner::inputs::PlanInputs;
use triptych_plan::planner::{self, Budget, Recommendation};

/// Flags of `triptych plan`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct PlanArgs {
    /// Other command
    #[command(subcommand)]
    pub command: Option<PlanCommand>,
    /// Inputs of the plan
    #[command(flatten)]
    pub question: QuestionArgs,
    /// Budget of cores or workers, as in 8cores or 6workers; required without --watch
    #[arg(long, value_name = "N", required_unless_present = "watch")]
    pub budget: Option<Budget>,
    /// One JSON document instead of a page
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// Beside a running cluster
    #[command(flatten)]
    pub watch: watch::WatchArgs,
}

/// Other commands.
#[derive(Debug, Subcommand)]
pub enum PlanCommand {
    /// Scale cost curves to a cluster in service: a short load on this machine, and its processor time beside the simulated one
    #[command(after_help = CALIBRATE_EXAMPLES)]
    Calibrate(Box<calibrate::CalibrateArgs>),
    /// Compare topologies by simulation, over the bench's suite and a day that changes
    #[command(after_help = COMPARE_EXAMPLES)]
    Compare(Box<compare::CompareArgs>),
    /// Plan fleets of 8, 64 and 512 workers, and show the cost of a request in each
    #[command(after_help = FLEETS_EXAMPLES)]
    Fleets(Box<fleets::FleetsArgs>),
    /// Draw where disaggregated encoders serve more: over images and text of a request, repeated images, SLOs and fleets
    #[command(after_help = MAP_EXAMPLES)]
    Map(Box<maps::MapArgs>),
    /// Simulate clusters that others measured, and set the figures side by side
    #[command(after_help = PAPERS_EXAMPLES)]
    Papers(papers::PapersArgs),
    /// Write the timeline of a simulated run, to lay over a cluster's --trace-file with benches/overlay.py
    #[command(after_help = TRACE_EXAMPLES)]
    Trace(Box<trace::TraceArgs>),
    /// Measure clusters on this machine, and compare them with their simulation
    #[command(after_help = VALIDATE_EXAMPLES)]
    Validate(Box<validate::ValidateArgs>),
}

const CALIBRATE_EXAMPLES: &str = "\
Examples:
  triptych plan calibrate --curves one.json --curves two.json --model ./my-qwen2-vl --cores 0,1 --output in-service
  triptych plan --curves in-service/one.json --curves in-service/two.json --one-machine --slo ttft=2s --budget 2cores";

const COMPARE_EXAMPLES: &str = "\
Examples:
  triptych plan compare --curves one.json --curves two.json --one-machine --slo ttft=1500ms,tpot=5ms --long-slo ttft=3s,tpot=5ms
  triptych plan compare --curves one.json --topology elastic4,2e2pd,dp4 --cores 4 --slo ttft=2s --workloads epd-short --day none";

const FLEETS_EXAMPLES: &str = "\
Examples:
  triptych plan fleets --curves one.json --workload epd-short --slo ttft=2s,tpot=100ms
  triptych plan fleets --curves one.json --slo ttft=2s --workers 16,128 --quick --output results";

const MAP_EXAMPLES: &str = "\
Examples:
  triptych plan map --curves benches/papers/a100-qwen3-vl-4b.json --slo ttft=2s,tpot=50ms --slo ttft=10s,tpot=100ms
  triptych plan map --curves one.json --slo ttft=2s --workers 8 --images 1,4 --text 400,2000 --reuse 0";

const PAPERS_EXAMPLES: &str = "\
Examples:
  triptych plan papers benches/papers/vllm-epd.json benches/papers/sglang-epd.json --output benches/results";

const TRACE_EXAMPLES: &str = "\
Examples:
  triptych plan trace --curves one.json --slo ttft=2s --one-machine --topology 1e1pd --workload epd-short:images=2 --rate 5
  python3 benches/overlay.py trace.json simulated.json";

const VALIDATE_EXAMPLES: &str = "\
Examples:
  triptych plan validate --curves one.json --slo ttft=2s,tpot=100ms --model ./my-qwen2-vl --quick
  triptych plan validate --curves one.json --slo ttft=2s,tpot=100ms --model ./my-qwen2-vl \\
                 --topology 1e1pd,dp2 --cores 0-1 --held-out none --output results
  triptych plan validate --curves one.json --slo ttft=2s,tpot=100ms --results bench-suite";

/// Runs the command.
///
/// # Errors
/// [`CliError`] for files and texts that cannot be used, and for a budget without room.
pub async fn run(args: PlanArgs) -> Result<(), CliError> {
    match args.command {
        Some(PlanCommand::Calibrate(args)) => return calibrate::run(*args).await,
        Some(PlanCommand::Compare(args)) => return blocking(move || compare::run(&args)).await,
        Some(PlanCommand::Fleets(args)) => return blocking(move || fleets::run(&args)).await,
        Some(PlanCommand::Map(args)) => return blocking(move || maps::run(&args)).await,
        Some(PlanCommand::Papers(args)) => return blocking(move || papers::run(&args)).await,
        Some(PlanCommand::Trace(args)) => return blocking(move || trace::run(&args)).await,
        Some(PlanCommand::Validate(args)) => return validate::run(*args).await,
        None => {}
    }
    if args.watch.watch.is_some() {
        return watch::run(&args.watch, &args.question, args.json).await;
    }
    let budget = args.budget.ok_or_else(|| CliError::Setting("--budget is missing, as in 8cores".into()))?;
    let question = args.question;
    let json = args.json;
    blocking(move || {
        let recommendation = recommend(&question.read()?, budget)?;
        let page = if json { to_json(&recommendation)? } else { planner::markdown(&recommendation) };
        print(&page)
    })
    .await
}

/// Plans, and shows how far it is.
fn recommend(inputs: &PlanInputs, budget: Budget) -> Result<Recommendation, CliError> {
    let screen = PlanScreen::new();
    let planned = planner::plan(&inputs.question(budget, &inputs.demand), &|step| screen.show(step));
    screen.end();
    planned.map_err(|e| CliError::setting("no plan", &e))
}
