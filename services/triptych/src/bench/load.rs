//! `triptych bench run`: the flags of a sweep over a running server, and its result on the terminal.

mod screen;
mod server;

use crate::commit::commit;
use crate::error::{CliError, chain};
use crate::up::signals::Signals;
use clap::Args;
use screen::Screen;
use server::ServerArgs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio_util::sync::CancellationToken;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::rates::Rates;
use triptych_bench::report::{Report, files};
use triptych_bench::result::SweepResult;
use triptych_bench::slo::Slo;
use triptych_bench::sweep::{SweepError, SweepEvent, SweepSettings, run_sweep};
use triptych_bench::text::{TextError, duration};
use triptych_bench::workload::Workload;

/// Flags of `bench run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Server
    #[command(flatten)]
    pub server: ServerArgs,
    /// Load
    #[command(flatten)]
    pub load: LoadArgs,
    /// Size of the runs
    #[command(flatten)]
    pub size: SizeArgs,
    /// Files of the result
    #[command(flatten)]
    pub files: FileArgs,
}

/// Flags of the result's files.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Result")]
pub struct FileArgs {
    /// Write the whole result here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with charts here: HTML, or Markdown if it ends with `.md`
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Flags of the load.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Kind of requests: NAME[:key=value,…]; the names and keys are below
    #[arg(long, value_name = "WORKLOAD", default_value = "epd-short")]
    pub workload: String,
    /// SLO of every request: limits of the time to the first token (ttft), of the time of each further token (tpot), and of
    /// the time to the end (e2el)
    #[arg(long, value_name = "SLO", default_value = "ttft=500ms,tpot=50ms", value_parser = str::parse::<Slo>)]
    pub slo: Slo,
    /// Arrival process: own (the workload's, mostly Poisson), poisson, gamma:cv=2, constant,
    /// ramp:from=0.1,over=60s
    #[arg(long, value_name = "PROCESS", default_value = "own", value_parser = str::parse::<Arrivals>)]
    pub arrivals: Arrivals,
    /// Rates in requests a second, instead of a search: 1,2,4
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = rate)]
    pub rates: Vec<f64>,
    /// First rate of the search. Default: half of the rate of requests sent one after the other
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "rates")]
    pub from_rate: Option<f64>,
    /// The search ends when the highest rate that passes and the lowest that fails differ by less than this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = share, conflicts_with = "rates")]
    pub resolution: f64,
}

/// Flags of the size of the runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Size")]
pub struct SizeArgs {
    /// Judged requests of a run. The rule asks for 1000, or for 600 s; fewer are marked as such in the result
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub requests: u64,
    /// Longest judged window
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = time)]
    pub max_window: Duration,
    /// Load before the window that is not judged. Default: a tenth of the window, from 5 s to 30 s, at least four times as long as a
    /// request that is alone takes, and as long as one that just meets the SLO (at most ten times as long as one alone)
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub warm_up: Option<Duration>,
    /// Time after the window in which its requests may end before they count as failed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub drain: Duration,
    /// Largest p99 of the delay with which the bench itself sends requests, before a run is void. Default: a tenth of the
    /// TTFT limit, and at least 20ms
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub max_late: Option<Duration>,
    /// Seeds, one run for each at every rate. The rule asks for three
    #[arg(long, value_name = "SEEDS", value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Number that the content of texts and items depends on; a repeated one hits the server's caches. Default: the time of
    /// day
    #[arg(long, value_name = "N")]
    pub salt: Option<u64>,
}

fn time(text: &str) -> Result<Duration, TextError> {
    duration("time", text)
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.trim().parse().ok().filter(|r: &f64| (0.001..=1e6).contains(r));
    rate.ok_or_else(|| "a rate is a number of requests a second, from 0.001 to 1000000".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|s: &f64| (0.005..=1.0).contains(s));
    share.ok_or_else(|| "a share is a number from 0.005 to 1".to_owned())
}

/// Runs the sweep, and prints its result.
///
/// # Errors
/// [`CliError`] for settings, a server that does not answer, and files that cannot be written.
pub async fn run(args: RunArgs) -> Result<(), CliError> {
    let workload = Workload::parse(&args.load.workload).map_err(|e| CliError::setting("--workload", &e))?;
    let mut signals = Signals::watch()?;
    let settings = settings(&args);
    let screen = Screen::new();
    let server = tokio::select! {
        server = server::find(&args.server, &workload, &screen) => server?,
        () = signals.next() => return Err(CliError::Failed(SweepError::Stopped.to_string())),
    };
    screen.line(&format!("{} · {} · {}", server.target.name(), workload.text(), args.load.slo));
    let listener = |event: SweepEvent<'_>| screen.show(event);
    let sweep = run_sweep(&server, &workload, &args.load.slo, &settings, &listener);
    let found = tokio::select! {
        found = sweep => found.map_err(|e| CliError::Failed(chain(&e))),
        () = stopped_twice(&mut signals, &settings.stop, &screen) => {
            Err(CliError::Failed("stopped at once; nothing was written".into()))
        }
    };
    screen.end();
    finish(&args.files, &found?)
}

/// Stops the sweep at the first signal; ends at the second.
async fn stopped_twice(signals: &mut Signals, stop: &CancellationToken, screen: &Screen) {
    signals.next().await;
    stop.cancel();
    screen.line(
        "stopping: the result so far is written when the requests under way have ended; again: at once",
    );
    signals.next().await;
}

/// Writes the files, and prints the result.
fn finish(files: &FileArgs, found: &SweepResult) -> Result<(), CliError> {
    if let Some(file) = &files.json {
        std::fs::write(file, found.to_json())
            .map_err(|e| CliError::failed(format!("cannot write {}", file.display()), &e))?;
    }
    let page = Report::of_sweeps("Goodput", std::slice::from_ref(found));
    if let Some(file) = &files.report {
        files::write(file, &page)?;
    }
    print(&page.to_markdown());
    print(&goodput_line(found));
    match found.partial {
        true => Err(CliError::Failed("stopped before the end: the result is partial".into())),
        false => Ok(()),
    }
}

/// A reader that went away does not fail the command.
fn print(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The goodput in a sentence.
fn goodput_line(found: &SweepResult) -> String {
    let goodput = &found.goodput;
    let mut text = match (goodput.rate, goodput.interval) {
        (Some(rate), Some((low, high))) => {
            format!("goodput {rate} requests/s ({low} to {high} in 95 % of resamples)")
        }
        (Some(rate), None) => format!("goodput {rate} requests/s"),
        (None, _) => "no tested rate meets the SLO".to_owned(),
    };
    if goodput.fails_at.is_none() && goodput.rate.is_some() {
        text.push_str("; every tested rate passes, so it may be higher");
    }
    if let Some(shorter) = &found.shorter_than_the_rule {
        text = format!("{text}\n{shorter}");
    }
    text
}

fn settings(args: &RunArgs) -> SweepSettings {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    SweepSettings {
        arrivals: args.load.arrivals,
        seeds: args.size.seeds.clone(),
        n_requests: args.size.requests,
        max_window: args.size.max_window,
        warm_up: args.size.warm_up,
        drain: args.size.drain,
        max_late: args.size.max_late,
        rates: match args.load.rates.is_empty() {
            true => Rates::Search { first: args.load.from_rate, resolution: args.load.resolution },
            false => Rates::Listed(args.load.rates.clone()),
        },
        salt: args.size.salt.unwrap_or(now),
        commit: commit(),
        ..SweepSettings::default()
    }
}
