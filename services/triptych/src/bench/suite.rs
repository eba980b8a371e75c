//! `triptych bench suite`: the flags of the suite, the log of its progress, and its page.

use crate::args::LogArgs;
use crate::commit::commit;
use crate::error::CliError;
use crate::model;
use crate::topology::{Starter, TopologyArgs};
use crate::up::screen::Screen;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::rates::Rates;
use triptych_bench::report::{Report, files};
use triptych_bench::search::SearchPlan;
use triptych_bench::slo::Slo;
use triptych_bench::suite::{self, Results, Size, SuiteObserver, SuitePlan};
use triptych_bench::sweep::{RULE_REQUESTS, RULE_SEEDS, RULE_WINDOW, SweepSettings};
use triptych_bench::workload::Workload;

/// Length of a block of a run, in seconds.
const BLOCK_S: u64 = 120;

/// Flags of `bench suite`.
#[derive(Args, Debug)]
pub struct SuiteArgs {
    /// Folder of results, one file for each workload and topology; results that are there are not measured again
    #[arg(long, value_name = "DIR", default_value = "bench-suite")]
    pub out: PathBuf,
    /// Few workloads and short runs of one seed; the report says that it is less than the rule
    #[arg(long)]
    pub quick: bool,
    /// Workloads instead of the suite's; repeat for several
    #[arg(long = "workload", value_name = "NAME[:KEY=VALUE,…]")]
    pub workloads: Vec<String>,
    /// SLO of every request: about five times the latency of a single one. PD workers are told its `tpot` (`--tpot-slo`)
    #[arg(long, value_name = "SLO", default_value = "ttft=500ms,tpot=50ms", value_parser = str::parse::<Slo>)]
    pub slo: Slo,
    /// PD workers are not told the SLO: prompts and answers share their time by --decode-share
    #[arg(long)]
    pub untold: bool,
    /// Arrival process: own, poisson, gamma:cv=2, constant, ramp:from=0.1,over=60s
    #[arg(long, value_name = "PROCESS", default_value = "own", value_parser = str::parse::<Arrivals>)]
    pub arrivals: Arrivals,
    /// Judged requests of a run. Default: 1000, with --quick 100
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Runs at each rate, each with its own seed; as many more for a rate that fails for rising trends alone. Default: 3, with --quick 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: Option<u64>,
    /// Further seeds only for a rate that the runs so far leave open: one that fails with 90 % of its requests within the SLO or more.
    /// A topology that passes has the seeds of another for which the same rate is open. For short runs, in which one late request of
    /// some dozens fails a rate
    #[arg(long)]
    pub until_clear: bool,
    /// Longest judged part of a run, in seconds. Default: 600, with --quick 60
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_window: Option<u64>,
    /// Load before the judged part of a run, in seconds. Default: a tenth of it, from 5 to 30, at least four times as long as a request
    /// that is alone takes, and as long as one that just meets the SLO (at most ten times as long as one alone)
    #[arg(long, value_name = "S")]
    pub warm_up: Option<u64>,
    /// Length of the blocks into which runs are cut, in seconds: in each all clusters have the same requests, one after the other, and
    /// their differences get an interval over blocks. 0: runs are not cut. Default: 120, with --quick 0
    #[arg(long, value_name = "S")]
    pub block: Option<u64>,
    /// Measure anew the results whose workload and topology contain this text, as in `images=2 dp2`; repeat for several
    #[arg(long, value_name = "TEXT")]
    pub again: Vec<String>,
    /// Relative difference of two rates at which a search ends. Default: 0.05, with --quick 0.2
    #[arg(long, value_name = "SHARE")]
    pub resolution: Option<f64>,
    /// Rates in requests a second, instead of a search: 1,2,4
    #[arg(long, value_name = "RATES", value_delimiter = ',', conflicts_with_all = ["first_rate", "resolution"])]
    pub rates: Vec<f64>,
    /// Of --rates only those up to one that passes below one that fails, beginning with the middle one: clusters that are compared
    /// have the same rates at the same time, and no rate that decides nothing
    #[arg(long, requires = "rates")]
    pub until_bracketed: bool,
    /// First rate of every search, in requests a second, near the expected goodput, as `triptych plan` gives it.
    /// Default: found by sending a few requests one after the other
    #[arg(long, value_name = "RATE")]
    pub first_rate: Option<f64>,
    /// The clusters
    #[command(flatten)]
    pub topology: TopologyArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

impl SuiteArgs {
    fn plan(&self) -> Result<SuitePlan, CliError> {
        let either = |full: u64, quick: u64| if self.quick { quick } else { full };
        let texts = match (self.workloads.is_empty(), self.quick) {
            (false, _) => self.workloads.clone(),
            (true, true) => suite::quick_workloads(),
            (true, false) => suite::workloads(),
        };
        let read = |text: &String| Workload::parse(text).map_err(|e| CliError::setting("--workload", &e));
        let topologies = match self.topology.topologies.as_slice() {
            // Constant names, all of which parse.
            [] => suite::TOPOLOGIES.iter().filter_map(|name| name.parse().ok()).collect(),
            given => given.to_vec(),
        };
        let resolution = self.resolution.unwrap_or(if self.quick { 0.2 } else { 0.05 });
        if !(0.001..=1.0).contains(&resolution) {
            return Err(CliError::Setting(format!(
                "--resolution {resolution}: allowed are shares from 0.001 to 1"
            )));
        }
        let given = self.rates.iter().chain(&self.first_rate);
        if let Some(rate) = given.into_iter().find(|rate| !(0.001..=1e6).contains(*rate)) {
            return Err(CliError::Setting(format!(
                "a rate of {rate}: allowed are 0.001 to 1000000 requests a second"
            )));
        }
        let size = Size {
            n_requests: self.requests.unwrap_or(either(RULE_REQUESTS, 100)),
            n_seeds: self.seeds.unwrap_or(either(RULE_SEEDS as u64, 1)),
            max_window: Duration::from_secs(self.max_window.unwrap_or(either(RULE_WINDOW.as_secs(), 60))),
            block: Some(self.block.unwrap_or(either(BLOCK_S, 0))).filter(|s| *s > 0).map(Duration::from_secs),
        };
        let settings = SweepSettings {
            arrivals: self.arrivals,
            seeds: (1..=size.n_seeds).collect(),
            until_clear: self.until_clear,
            n_requests: size.n_requests,
            max_window: size.max_window,
            block: size.block,
            warm_up: self.warm_up.map(Duration::from_secs),
            rates: match (self.rates.is_empty(), self.until_bracketed) {
                (true, _) => Rates::Search { first: self.first_rate, resolution },
                (false, true) => Rates::Bracketed(self.rates.clone()),
                (false, false) => Rates::Listed(self.rates.clone()),
            },
            pd_tpot_slo: self.topology.told(),
            worker_flags: self.topology.recorded_flags(),
            commit: commit(),
            ..SweepSettings::default()
        };
        let search = SearchPlan::from(self.first_rate.unwrap_or(5.0), resolution);
        Ok(SuitePlan {
            workloads: texts.iter().map(read).collect::<Result<_, _>>()?,
            topologies,
            slo: self.slo,
            settings,
            size,
            search,
        })
    }
}

/// Measures the missing results, and writes the page.
///
/// # Errors
/// [`CliError`] if a cluster cannot start or dies; earlier results are kept.
pub async fn run(mut args: SuiteArgs) -> Result<(), CliError> {
    args.topology.tpot_slo = args.slo.tpot.filter(|_| !args.untold);
    let plan = args.plan()?;
    let screen = Screen::of("bench", &args.log)?;
    let unwritable =
        |e: std::io::Error| CliError::failed(format!("cannot write into {}", args.out.display()), &e);
    let results = Results::in_dir(&args.out).map_err(unwritable)?;
    for part in &args.again {
        plan.forget(&results, part)?;
    }
    let n_missing = plan.n_missing(&results);
    screen.say(&plan.describe(n_missing));
    let pages = Pages { args: &args, plan: &plan, results: &results, screen: &screen };
    let mut placement = Vec::new();
    let mut is_stopped = false;
    if n_missing > 0 {
        tokio::select! {
            measured = measure(&pages) => placement = measured?,
            _ = tokio::signal::ctrl_c() => is_stopped = true,
        }
    }
    let page = pages.write(placement)?;
    print!("{}", page.to_markdown());
    screen.say(&format!("the page with charts: {}", args.out.join("report.html").display()));
    if is_stopped {
        return Err(CliError::Failed("stopped; the same command goes on where it was".into()));
    }
    Ok(())
}

/// The pages of a suite, written anew with each result.
struct Pages<'a> {
    args: &'a SuiteArgs,
    plan: &'a SuitePlan,
    results: &'a Results,
    screen: &'a Screen,
}

impl Pages<'_> {
    /// Writes the pages of what is stored.
    fn write(&self, placement: Vec<(String, String)>) -> Result<Report, CliError> {
        let title = if self.args.quick { "Goodput by topology: a quick run" } else { "Goodput by topology" };
        let mut page = Report::of_sweeps(title, &self.plan.all_stored(self.results));
        page.facts.extend(placement);
        let (left, all) =
            (self.plan.n_missing(self.results), self.plan.workloads.len() * self.plan.topologies.len());
        if left > 0 {
            page.warnings.insert(0, format!("Partial: {left} of {all} results are missing."));
        }
        for file in ["report.html", "report.md"] {
            files::write(&self.args.out.join(file), &page)?;
        }
        Ok(page)
    }
}

impl SuiteObserver for Pages<'_> {
    fn line(&self, text: &str) {
        self.screen.say(text);
    }

    fn stored(&self) {
        if let Err(e) = self.write(Vec::new()) {
            self.screen.say(&e.to_string());
        }
    }
}

/// Starts the clusters and measures; returns the cores of every process.
async fn measure(pages: &Pages<'_>) -> Result<Vec<(String, String)>, CliError> {
    let &Pages { args, plan, results, screen } = pages;
    let temporary = tempfile::tempdir().map_err(|e| CliError::failed("cannot make a folder for logs", &e))?;
    let dir = args.topology.worker_logs.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&dir).map_err(|e| CliError::failed(dir.display(), &e))?;
    args.topology.pin_self()?;
    let model = model::check_one(&args.topology.models).await?;
    let starter = Starter { args: &args.topology, model: &model, screen, dir: &dir };
    Ok(plan.measure(&starter, results, pages).await?)
}
