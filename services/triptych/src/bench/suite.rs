//! `triptych bench suite`: the claim, measured with one command. What was measured is kept cell by cell, so that a suite
//! that was broken off goes on where it was.

use super::report;
use super::side_by_side::SideBySide;
use crate::args::LogArgs;
use crate::error::CliError;
use crate::topology::TopologyArgs;
use crate::up::screen::Screen;
use clap::Args;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use triptych_bench::arrivals::Arrivals;
use triptych_bench::race::Spectator;
use triptych_bench::report::Report;
use triptych_bench::result::{RateResult, SweepResult};
use triptych_bench::search::SearchPlan;
use triptych_bench::slo::Slo;
use triptych_bench::suite::{self, Results, Size, spoken};
use triptych_bench::sweep::{News, RULE_REQUESTS, RULE_SEEDS, RULE_WINDOW, Rates, SweepSettings};
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;

/// Flags of `bench suite`.
#[derive(Args, Debug)]
pub struct SuiteArgs {
    /// Folder of results, one file for each workload and topology; what is there is not measured again
    #[arg(long, value_name = "DIR", default_value = "bench-suite")]
    pub out: PathBuf,
    /// A first look: few workloads, short runs of one seed; the report says that it is less than the rule
    #[arg(long)]
    pub quick: bool,
    /// Workloads instead of the suite's; repeat for several
    #[arg(long = "workload", value_name = "NAME[:KEY=VALUE,…]")]
    pub workloads: Vec<String>,
    /// What is promised to clients. Choose about five times what a request takes that is alone
    #[arg(long, value_name = "PROMISES", default_value = "ttft=500ms,tpot=50ms", value_parser = str::parse::<Slo>)]
    pub slo: Slo,
    /// How requests are spread
    #[arg(long, value_name = "PROCESS", default_value = "own", value_parser = str::parse::<Arrivals>)]
    pub arrivals: Arrivals,
    /// Judged requests of a run. Default: 1000, with --quick 100
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Runs at each rate, each with its own seed. Default: 3, with --quick 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: Option<u64>,
    /// Longest judged part of a run, in seconds. Default: 600, with --quick 60
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_window: Option<u64>,
    /// Load before the judged part of a run, in seconds. Default: a tenth of it, from 5 to 30
    #[arg(long, value_name = "S")]
    pub warm_up: Option<u64>,
    /// How close two rates are that goodput lies between, as a share. Default: 0.05, with --quick 0.2
    #[arg(long, value_name = "SHARE")]
    pub resolution: Option<f64>,
    /// These rates, in requests a second, in place of a search: 1,2,4
    #[arg(long, value_name = "RATES", value_delimiter = ',', conflicts_with_all = ["first_rate", "resolution"])]
    pub rates: Vec<f64>,
    /// First rate of every search, in requests a second, near where goodput is expected, as `triptych plan` tells it.
    /// Default: found by asking one after the other
    #[arg(long, value_name = "RATE")]
    pub first_rate: Option<f64>,
    /// The clusters
    #[command(flatten)]
    pub topology: TopologyArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// What is measured, decided before anything is started.
struct Plan {
    workloads: Vec<Workload>,
    topologies: Vec<Topology>,
    settings: SweepSettings,
    size: Size,
    search: SearchPlan,
}

impl SuiteArgs {
    fn plan(&self) -> Result<Plan, CliError> {
        let either = |full: u64, quick: u64| if self.quick { quick } else { full };
        let texts = match (self.workloads.is_empty(), self.quick) {
            (false, _) => self.workloads.clone(),
            (true, true) => suite::quick_workloads(),
            (true, false) => suite::workloads(),
        };
        let read = |text: &String| Workload::parse(text).map_err(|e| CliError::setting("--workload", &e));
        let topologies = match self.topology.topologies.as_slice() {
            // Names of our own.
            [] => suite::TOPOLOGIES.iter().filter_map(|name| name.parse().ok()).collect(),
            given => given.to_vec(),
        };
        let resolution = self.resolution.unwrap_or(if self.quick { 0.2 } else { 0.05 });
        if !(0.001..=1.0).contains(&resolution) {
            return Err(CliError::Setting(format!("--resolution {resolution} is no share from 0.001 to 1")));
        }
        let given = self.rates.iter().chain(&self.first_rate);
        if let Some(rate) = given.into_iter().find(|rate| !(0.001..=1e6).contains(*rate)) {
            return Err(CliError::Setting(format!(
                "{rate} is no rate from 0.001 to 1000000 requests a second"
            )));
        }
        let size = Size {
            n_requests: self.requests.unwrap_or(either(RULE_REQUESTS, 100)),
            n_seeds: self.seeds.unwrap_or(either(RULE_SEEDS as u64, 1)),
            max_window: Duration::from_secs(self.max_window.unwrap_or(either(RULE_WINDOW.as_secs(), 60))),
        };
        let settings = SweepSettings {
            arrivals: self.arrivals,
            seeds: (1..=size.n_seeds).collect(),
            n_requests: size.n_requests,
            max_window: size.max_window,
            warm_up: self.warm_up.map(Duration::from_secs),
            rates: match self.rates.is_empty() {
                true => Rates::Search { first: self.first_rate, resolution },
                false => Rates::Listed(self.rates.clone()),
            },
            commit: crate::cli::commit(),
            ..SweepSettings::default()
        };
        let search = SearchPlan::from(self.first_rate.unwrap_or(5.0), resolution);
        Ok(Plan {
            workloads: texts.iter().map(read).collect::<Result<_, _>>()?,
            topologies,
            settings,
            size,
            search,
        })
    }
}

impl Plan {
    /// Whether a stored result is what would be measured now.
    fn is_same(&self, slo: &Slo, found: &SweepResult) -> bool {
        let (setup, settings) = (&found.setup, &self.settings);
        setup.slo == slo.to_string()
            && setup.arrivals == settings.arrivals.to_string()
            && setup.seeds == settings.seeds
            && match &settings.rates {
                Rates::Search { resolution, .. } => (setup.resolution - resolution).abs() < 1e-9,
                Rates::Listed(rates) => rates.iter().all(|rate| found.rates.iter().any(|r| r.rate == *rate)),
            }
            && setup.n_requests == settings.n_requests
            && (setup.max_window_s - settings.max_window.as_secs_f64()).abs() < 1e-6
    }

    /// What it will take, before it begins.
    fn told(&self, n_left: usize, args: &SuiteArgs) -> String {
        let n = self.workloads.len() * self.topologies.len();
        let at = suite::estimate(n_left, &self.search, &self.size);
        let slow = SearchPlan { first: 1.0, ..self.search };
        let guess = if args.first_rate.is_some() { "" } else { ", if goodput is about 5 requests/s" };
        format!(
            "{n_left} of {n} results are to be measured: about {}{guess}; at 1 request/s it would be {}",
            spoken(at),
            spoken(suite::estimate(n_left, &slow, &self.size))
        )
    }
}

/// Measures what is missing, and writes the page.
///
/// # Errors
/// [`CliError`] if a cluster cannot start or dies; what was measured before is kept.
pub async fn run(args: SuiteArgs) -> Result<(), CliError> {
    let plan = args.plan()?;
    let screen = Screen::of("bench", &args.log)?;
    let unwritable =
        |e: std::io::Error| CliError::failed(format!("cannot write into {}", args.out.display()), &e);
    let results = Results::in_dir(&args.out).map_err(unwritable)?;
    let find = |workload: &Workload, topology: &Topology| {
        results.read(workload.text(), topology, |found| plan.is_same(&args.slo, found))
    };
    let cells = || plan.workloads.iter().flat_map(|w| plan.topologies.iter().map(move |t| (w, t)));
    let n_left = cells().filter(|(w, t)| find(w, t).is_none()).count();
    screen.say(&plan.told(n_left, &args));
    let mut placement = Vec::new();
    if n_left > 0 {
        placement = tokio::select! {
            measured = measure(&args, &plan, (&results, n_left), &screen) => measured?,
            _ = tokio::signal::ctrl_c() => {
                return Err(CliError::Failed("stopped; the same command goes on where it was".into()));
            }
        };
    }
    let sweeps: Vec<SweepResult> = cells().filter_map(|(w, t)| find(w, t)).collect();
    let title = if args.quick { "Goodput by topology: a first look" } else { "Goodput by topology" };
    let mut page = Report::of_sweeps(title, &sweeps);
    page.facts.extend(placement);
    for file in ["report.html", "report.md"] {
        report::write(&args.out.join(file), &page)?;
    }
    print!("{}", page.to_markdown());
    screen.say(&format!("the page with drawings: {}", args.out.join("report.html").display()));
    Ok(())
}

/// Measures what is missing; says where everything ran.
async fn measure(
    args: &SuiteArgs,
    plan: &Plan,
    (results, n_left): (&Results, usize),
    screen: &Screen,
) -> Result<Vec<(String, String)>, CliError> {
    let temporary = tempfile::tempdir().map_err(|e| CliError::failed("no folder for logs", &e))?;
    let dir = args.topology.worker_logs.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&dir).map_err(|e| CliError::failed(dir.display(), &e))?;
    let mut clusters = SideBySide::start(&args.topology, &plan.topologies, &dir, screen).await?;
    let watch = Watch { screen, began: Instant::now(), n_left: n_left as u64, n_done: AtomicU64::new(0) };
    for workload in &plan.workloads {
        let is_missing = |topology: &Topology| {
            results.read(workload.text(), topology, |found| plan.is_same(&args.slo, found)).is_none()
        };
        let missing: Vec<Topology> = plan.topologies.iter().filter(|t| is_missing(t)).cloned().collect();
        if missing.is_empty() {
            continue;
        }
        let lanes =
            Lanes { watch: &watch, results, workload, topologies: &missing, unwritten: Mutex::default() };
        let settings = SweepSettings { salt: salt_of(workload), ..plan.settings.clone() };
        let raced = clusters.race(&missing, (workload, &args.slo), &settings, &lanes).await;
        if let Err(e) = raced.and_then(|()| lanes.written()) {
            clusters.stop().await;
            return Err(e);
        }
    }
    let placement = clusters.placement();
    clusters.stop().await;
    Ok(placement)
}

/// Keeps what one workload sends apart from what the others do: the clusters' caches last through all of them.
fn salt_of(workload: &Workload) -> u64 {
    let digest = blake3::hash(workload.text().as_bytes());
    let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// How far the suite is.
struct Watch<'a> {
    screen: &'a Screen,
    began: Instant,
    n_left: u64,
    n_done: AtomicU64,
}

/// The lanes of one workload: their news are told, their results kept.
struct Lanes<'a> {
    watch: &'a Watch<'a>,
    results: &'a Results,
    workload: &'a Workload,
    topologies: &'a [Topology],
    unwritten: Mutex<Option<std::io::Error>>,
}

impl Lanes<'_> {
    fn say(&self, lane: usize, text: &str) {
        let topology = self.topologies.get(lane).map(ToString::to_string).unwrap_or_default();
        self.watch.screen.say(&format!("{} · {topology}: {text}", self.workload.text()));
    }

    /// Whether all results could be kept.
    fn written(&self) -> Result<(), CliError> {
        match self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).take() {
            None => Ok(()),
            Some(e) => Err(CliError::failed("cannot write a result", &e)),
        }
    }
}

impl Spectator for Lanes<'_> {
    fn news(&self, lane: usize, news: News<'_>) {
        match news {
            News::Plan(plan) => self.say(lane, plan),
            News::Rate(rate) => self.say(lane, &of_rate(rate)),
            News::Run { .. } | News::Progress(_) => {}
        }
    }

    fn result(&self, lane: usize, result: &SweepResult) {
        let Some(topology) = self.topologies.get(lane) else { return };
        if let Err(e) = self.results.write(self.workload.text(), topology, result) {
            *self.unwritten.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
        }
        let n = self.watch.n_done.fetch_add(1, Ordering::Relaxed) + 1;
        let left = self.watch.n_left.saturating_sub(n);
        let each = self.watch.began.elapsed().div_f64(n as f64);
        let goodput =
            result.goodput.rate.map_or_else(|| "no rate passes".to_owned(), |r| format!("{r} requests/s"));
        self.say(
            lane,
            &format!("goodput: {goodput}; {left} are left, about {}", spoken(each.mul_f64(left as f64))),
        );
    }
}

/// A rate in a line.
fn of_rate(rate: &RateResult) -> String {
    let verdict = &rate.verdict;
    let ms = |value: Option<f64>| value.map_or_else(|| "no end".to_owned(), |v| format!("{v:.0} ms"));
    let word = if verdict.passed { "passes" } else { "fails" };
    let broken: Vec<_> = verdict.findings.iter().filter(|f| !f.passed).map(|f| f.rule.as_str()).collect();
    let why = if broken.is_empty() { String::new() } else { format!(" ({})", broken.join(", ")) };
    format!(
        "{} requests/s {word}{why}: {:.1} % kept every promise, P99 TTFT {}, P99 TPOT {}",
        rate.rate,
        verdict.attainment() * 100.0,
        ms(verdict.ttft_ms.p99),
        ms(verdict.tpot_ms.p99)
    )
}
