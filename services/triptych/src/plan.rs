//! `triptych plan`: how many workers of which kind, and with which settings.
//!
//! The arithmetic is [`triptych_plan`]'s; here curves are read, metrics are fetched, and replicas are set.

mod apply;
mod fleets;
mod validate;
mod watch;

use crate::error::CliError;
use clap::builder::FalseyValueParser;
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;
use triptych_bench::workload::Workload;
use triptych_plan::curves::CostCurves;
use triptych_plan::planner::{self, Answer, Budget, Demand, Effort, Named, Question};
use triptych_plan::simulator::spec::FrontCores;

/// Flags of `triptych plan`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct PlanArgs {
    /// Other things to do
    #[command(subcommand)]
    pub command: Option<PlanCommand>,
    /// What is asked
    #[command(flatten)]
    pub question: QuestionArgs,
    /// What there is: cores, or workers, as in 8cores or 6workers
    #[arg(long, value_name = "N", required_unless_present = "watch")]
    pub budget: Option<Budget>,
    /// One JSON document instead of a page
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// Beside a running cluster
    #[command(flatten)]
    pub watch: watch::WatchArgs,
}

/// Other things to do.
#[derive(Debug, Subcommand)]
pub enum PlanCommand {
    /// Plan fleets of 8, 64 and 512 workers, and show what a request costs in each
    Fleets(Box<fleets::FleetsArgs>),
    /// Measure clusters on this machine beside their simulation, and say how far apart they are
    Validate(Box<validate::ValidateArgs>),
}

/// What a plan is made of.
#[derive(Args, Clone, Debug)]
pub struct QuestionArgs {
    /// What `triptych profile` wrote; once for each number of threads that a worker may have
    #[arg(long, value_name = "FILE", default_value = "curves.json")]
    pub curves: Vec<PathBuf>,
    /// Only curves of workers with so many threads
    #[arg(long, value_name = "N")]
    pub threads_per_worker: Option<usize>,
    /// What will be offered, as `triptych bench` takes it: NAME[:key=value,…]
    #[arg(long, value_name = "WORKLOAD", default_value = "epd-short")]
    pub workload: String,
    /// How requests are spread over time: own, poisson, gamma:cv=2, constant
    #[arg(long, value_name = "ARRIVALS", default_value = "own")]
    pub arrivals: Arrivals,
    /// What is promised, as in ttft=500ms,tpot=50ms
    #[arg(long, value_name = "SLO", required = true)]
    pub slo: Option<Slo>,
    /// Proxy, store and clients use the workers' cores, as on one machine; otherwise they have their own
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub one_machine: bool,
    /// Fewer and shorter simulations: seconds instead of minutes, and a wider interval
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub quick: bool,
    /// Seeds that the best few are simulated with; the interval is over them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: Option<u64>,
    /// Requests of a simulated run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(50..=1_000_000))]
    pub requests: Option<u32>,
}

/// What a plan is made of, read.
#[derive(Clone)]
pub struct Asked {
    /// Of each file.
    pub curves: Vec<Arc<CostCurves>>,
    /// What is offered.
    pub demand: Named,
    /// What is promised.
    pub slo: Slo,
    front: FrontCores,
    effort: Effort,
}

impl QuestionArgs {
    /// Reads files and texts.
    ///
    /// # Errors
    /// [`CliError::Setting`] that names the flag, what was found and what is allowed.
    pub fn read(&self) -> Result<Asked, CliError> {
        let mut curves = Vec::new();
        for path in &self.curves {
            let wrong =
                |e: &dyn std::error::Error| CliError::setting(format!("--curves {}", path.display()), e);
            let text = std::fs::read_to_string(path).map_err(|e| wrong(&e))?;
            curves.push(Arc::new(CostCurves::read(&text).map_err(|e| wrong(&e))?));
        }
        if let Some(threads) = self.threads_per_worker {
            let there: Vec<String> = curves.iter().map(|c| c.threads.to_string()).collect();
            curves.retain(|c| c.threads == threads);
            if curves.is_empty() {
                return Err(CliError::Setting(format!(
                    "--threads-per-worker {threads}: the curves are of workers with {} threads",
                    there.join(", ")
                )));
            }
        }
        let workload = Workload::parse(&self.workload)
            .map_err(|e| CliError::setting(format!("--workload {}", self.workload), &e))?;
        let slo = self.slo.ok_or_else(|| CliError::Setting("--slo is missing, as in ttft=500ms".into()))?;
        Ok(Asked {
            curves,
            demand: Named { workload, arrivals: self.arrivals },
            slo,
            front: if self.one_machine { FrontCores::Workers } else { FrontCores::Own },
            effort: self.effort(),
        })
    }

    fn effort(&self) -> Effort {
        let base = if self.quick { Effort::QUICK } else { Effort::FULL };
        Effort {
            seeds: self.seeds.unwrap_or(base.seeds),
            requests: self.requests.and_then(|n| usize::try_from(n).ok()).unwrap_or(base.requests),
            ..base
        }
    }
}

impl Asked {
    /// The question for a budget, and for another demand than that of the flags if one is given.
    pub fn question<'a>(&self, budget: Budget, demand: &'a dyn Demand) -> Question<'a> {
        Question {
            demand,
            slo: self.slo,
            rule: Rule::default(),
            curves: self.curves.clone(),
            budget,
            front: self.front,
            prompt: self.curves.first().map(|curves| curves.prompt).unwrap_or_default(),
            effort: self.effort,
        }
    }
}

/// Runs it.
///
/// # Errors
/// [`CliError`] for files and texts that cannot be used, and for a budget without room.
pub async fn run(args: PlanArgs) -> Result<(), CliError> {
    match args.command {
        Some(PlanCommand::Fleets(args)) => return blocking(move || fleets::run(&args)).await,
        Some(PlanCommand::Validate(args)) => return validate::run(*args).await,
        None => {}
    }
    if args.watch.watch.is_some() {
        return watch::run(&args.watch, &args.question, args.json).await;
    }
    let budget = args.budget.ok_or_else(|| CliError::Setting("--budget is missing, as in 8cores".into()))?;
    let (question, json) = (args.question, args.json);
    blocking(move || {
        let asked = question.read()?;
        let answer = answer(&asked, budget)?;
        let page = if json { to_json(&answer)? } else { planner::markdown(&answer) };
        print(&page)
    })
    .await
}

/// Plans, with a bar on a terminal.
fn answer(asked: &Asked, budget: Budget) -> Result<Answer, CliError> {
    let bar = bar();
    let progress = |done: usize, of: usize, what: &str| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
    };
    let answer = planner::plan(&asked.question(budget, &asked.demand), &progress);
    bar.finish_and_clear();
    answer.map_err(|e| CliError::setting("no plan", &e))
}

/// Simulations compute; they do not run on an async worker.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CliError> + Send + 'static,
) -> Result<T, CliError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| CliError::failed("planning ended early", &e))?
}

fn to_json(value: &impl serde::Serialize) -> Result<String, CliError> {
    let text = serde_json::to_string_pretty(value);
    text.map(|text| text + "\n").map_err(|e| CliError::failed("cannot write JSON", &e))
}

fn print(page: &str) -> Result<(), CliError> {
    let written = std::io::stdout().lock().write_all(page.as_bytes());
    written.map_err(|e| CliError::failed("cannot write the answer", &e))
}

fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}");
    let bar = ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
