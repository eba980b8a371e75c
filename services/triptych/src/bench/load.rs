//! `triptych bench run`: the flags of a sweep over a running server, and its result on the terminal.

mod screen;

use crate::commit::commit;
use crate::error::{CliError, chain};
use clap::{Args, ValueEnum};
use screen::Screen;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use triptych_bench::arrivals::Arrivals;
use triptych_bench::client::Target;
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::client::http::{Endpoint, HttpTarget};
use triptych_bench::report::{Report, files};
use triptych_bench::result::SweepResult;
use triptych_bench::scrape::Scraper;
use triptych_bench::slo::Slo;
use triptych_bench::sweep::{N_CHANNELS, Rates, Server, SweepEvent, SweepSettings, run_sweep};
use triptych_bench::text::{TextError, duration};
use triptych_bench::workload::Workload;
use triptych_runtime::grpc;

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
    /// Write the whole result here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with charts here: HTML, or Markdown if it ends with `.md`
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Flags of the server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// An OpenAI-compatible server, as in `http://127.0.0.1:8080`: this one or any other
    #[arg(long, value_name = "URL", required_unless_present = "grpc", conflicts_with = "grpc")]
    pub url: Option<String>,
    /// Triptych's gRPC API, as in `127.0.0.1:50051`: exact token times, stages, and where items came from
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<String>,
    /// Over HTTP: the endpoint of OpenAI's API. The completions of other servers take no items
    #[arg(long, value_name = "ENDPOINT", value_enum, default_value_t = EndpointArg::Chat, conflicts_with = "grpc")]
    pub endpoint: EndpointArg,
    /// The model's name; left out, the first that the server lists
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// An API key or a token
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// URL of a process's metrics; repeat for every worker. Left out, `/metrics` of --url
    #[arg(long, value_name = "URL")]
    pub metrics: Vec<String>,
}

/// Endpoints of OpenAI's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EndpointArg {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
    /// /v1/audio/transcriptions; answers are as long as the model makes them
    Transcriptions,
}

/// Flags of the load.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Kind of requests: NAME[:key=value,…]; the names and keys are below
    #[arg(long, value_name = "WORKLOAD", default_value = "epd-short")]
    pub workload: String,
    /// SLO of every request: the limits of time to the first token, time of each further token, and e2el, the time to the
    /// end
    #[arg(long, value_name = "SLO", default_value = "ttft=500ms,tpot=50ms", value_parser = str::parse::<Slo>)]
    pub slo: Slo,
    /// Arrival process: own (the workload's, mostly Poisson), poisson, gamma:cv=2, constant,
    /// ramp:from=0.1,over=60s
    #[arg(long, value_name = "PROCESS", default_value = "own", value_parser = str::parse::<Arrivals>)]
    pub arrivals: Arrivals,
    /// Rates in requests a second, instead of a search: 1,2,4
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = rate)]
    pub rates: Vec<f64>,
    /// The first rate of the search; left out, half of the rate of requests sent one after the other
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
    /// The longest judged window
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = time)]
    pub max_window: Duration,
    /// Load before the window that is not judged; left out, a tenth of the window, from 5 s to 30 s
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub warm_up: Option<Duration>,
    /// Time after the window in which its requests may end before they count as failed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub drain: Duration,
    /// Largest p99 of the delay with which the bench itself sends requests, before a run is void; left out, a tenth of the
    /// TTFT limit, and at least 20ms
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub max_late: Option<Duration>,
    /// Seeds, one run for each at every rate. The rule asks for three
    #[arg(long, value_name = "SEEDS", value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Number that the content of texts and items depends on; a repeated one hits the server's caches. Left out, the time of
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
    let server = server(&args.server).await?;
    let settings = settings(&args);
    let screen = Screen::new();
    screen.line(&format!("{} · {} · {}", server.target.name(), workload.text(), args.load.slo));
    let listener = |event: SweepEvent<'_>| screen.show(event);
    let sweep = run_sweep(&server, &workload, &args.load.slo, &settings, &listener);
    let found = tokio::select! {
        found = sweep => found.map_err(|e| CliError::Failed(chain(&e)))?,
        // An incomplete sweep has no result.
        _ = tokio::signal::ctrl_c() => return Err(CliError::Failed("stopped before the end".into())),
    };
    screen.end();
    if let Some(file) = &args.json {
        std::fs::write(file, found.to_json())
            .map_err(|e| CliError::failed(format!("cannot write {}", file.display()), &e))?;
    }
    let page = Report::of_sweeps("Goodput", std::slice::from_ref(&found));
    if let Some(file) = &args.report {
        files::write(file, &page)?;
    }
    print(&page.to_markdown());
    print(&goodput_line(&found));
    Ok(())
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

/// The server, with the model's name.
async fn server(args: &ServerArgs) -> Result<Server, CliError> {
    let key = args.api_key.clone();
    let (target, own): (Arc<dyn Target>, Option<String>) = match (&args.url, &args.grpc) {
        (_, Some(address)) => (Arc::new(grpc_target(args, address)?), None),
        (Some(url), None) => {
            let endpoint = match args.endpoint {
                EndpointArg::Chat => Endpoint::Chat,
                EndpointArg::Completions => Endpoint::Completions,
                EndpointArg::Transcriptions => Endpoint::Transcriptions,
            };
            let target = HttpTarget::new(url, endpoint, args.model.clone().unwrap_or_default(), key)
                .map_err(|e| CliError::setting(format!("--url {url}"), &e))?;
            let target = match &args.model {
                Some(_) => target,
                None => {
                    let model = target
                        .first_model()
                        .await
                        .map_err(|e| CliError::failed(format!("no models are listed at {url}"), &e))?;
                    let none = || CliError::Failed(format!("{url} lists no model; --model names one"));
                    target.with_model(model.ok_or_else(none)?)
                }
            };
            let metrics = format!("{}/metrics", target.base());
            (Arc::new(target), Some(metrics))
        }
        (None, None) => return Err(CliError::Setting("the server is missing: give --url or --grpc".into())),
    };
    let urls = if args.metrics.is_empty() { own.into_iter().collect() } else { args.metrics.clone() };
    let scraper = Scraper::new(urls).map_err(|e| CliError::failed("cannot make an HTTP client", &e))?;
    Ok(Server { target, scraper })
}

fn grpc_target(args: &ServerArgs, address: &str) -> Result<GrpcTarget, CliError> {
    let channels = (0..N_CHANNELS).map(|_| grpc::channel(address)).collect::<Result<Vec<_>, _>>();
    let channels = channels.map_err(|e| {
        CliError::setting(format!("--grpc {address}: an address looks like 127.0.0.1:50051"), &e)
    })?;
    let model = args.model.clone().unwrap_or_default();
    // The error would repeat the key.
    GrpcTarget::new(address, channels, model, args.api_key.as_deref())
        .map_err(|_| CliError::Setting("--api-key is not ASCII text on one line".into()))
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
