//! A sweep: run after run at rates that the search picks, until goodput is known to a resolution.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use triptych_bench::client::http::{Endpoint, HttpTarget};
//! use triptych_bench::{scrape::Scraper, sweep, workload::Workload};
//!
//! let target = HttpTarget::new("http://127.0.0.1:8080", Endpoint::Chat, "my-model".into(), None)?;
//! let server = sweep::Server { target: Arc::new(target), scraper: Scraper::nobody()? };
//! let workload = Workload::parse("epd-short:images=2,share=0.5")?;
//! let slo = "ttft=500ms,tpot=50ms".parse()?;
//! let found = sweep::run_sweep(&server, &workload, &slo, &sweep::SweepSettings::default(), &|_| ()).await?;
//! println!("{}", found.to_json());
//! # Ok(())
//! # }
//! ```

mod full_rule;
mod run_length;

pub use full_rule::{RULE_REQUESTS, RULE_SEEDS, RULE_WINDOW};
use full_rule::{least_seeds, shorter};
use run_length::{AnswerTimes, warm_up, window};

use crate::arrivals::Arrivals;
use crate::blocks::{Block, RunKey, n_blocks};
use crate::client::grpc::GrpcTarget;
use crate::client::{Clock, ContentSource, Target, learn_wording};
use crate::error::MeasureError;
use crate::goodput::{Tested, goodput};
use crate::judge::{Finding, JudgedWindow, Rule, Run, RunVerdict, judge_runs};
use crate::media::Media;
use crate::outcome::{End, Outcome};
use crate::prompt::Wording;
use crate::rates::{Rates, Steps};
use crate::repeat;
use crate::result::{Host, RateResult, RunResult, Setup, SweepResult, VERSION};
use crate::run::{Progress, Ran, RunObservers, RunPlan, run, run_result};
use crate::scrape::Scraper;
use crate::seed::mix;
use crate::slo::Slo;
use crate::workload::Workload;
use futures::future::BoxFuture;
use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use triptych_runtime::grpc;

/// Connections to a gRPC server: a stream must not wait behind all others.
pub const N_CHANNELS: usize = 4;
/// Share of requests within the SLO below which a rate fails clearly: no chance of a short run takes a tenth of them.
pub const OPEN: f64 = 0.9;
/// Rates from the first on whose runs are all void: then no slower one helps, since it is the bench that is short of
/// time.
const MAX_VOID: usize = 3;
/// Requests sent one after the other to find a first rate.
const N_FIRST: usize = 3;
/// The longest wait for a server to become idle between runs.
const SETTLE: Duration = Duration::from_secs(20);
/// Time between two reports of how far a run is.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// The server that is measured.
#[derive(Clone)]
pub struct Server {
    /// Target of the requests.
    pub target: Arc<dyn Target>,
    /// Reader of its metrics.
    pub scraper: Scraper,
}

impl Server {
    /// A Triptych cluster at a gRPC address, over several connections, with the `/metrics` of its processes.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if a client cannot be made.
    pub fn grpc(address: &str, model: &str, metrics: Vec<String>) -> Result<Self, MeasureError> {
        let failed = |e: &dyn std::error::Error| MeasureError::failed("cannot make a client", e);
        let channels = (0..N_CHANNELS).map(|_| grpc::channel(address));
        let channels = channels.collect::<Result<Vec<_>, _>>().map_err(|e| failed(&e))?;
        let target = GrpcTarget::new(address, channels, model.to_owned(), None).map_err(|e| failed(&e))?;
        let scraper = Scraper::new(metrics).map_err(|e| failed(&e))?;
        Ok(Self { target: Arc::new(target), scraper })
    }
}

/// Requests that are offered, and the SLO that they are judged by.
#[derive(Clone, Copy, Debug)]
pub struct OfferedLoad<'a> {
    /// Source of the requests.
    pub workload: &'a Workload,
    /// Latency limits.
    pub slo: &'a Slo,
}

/// Settings of a sweep. The default is the full rule.
#[derive(Clone, Debug)]
pub struct SweepSettings {
    /// Arrival process.
    pub arrivals: Arrivals,
    /// Seeds, one run each; a rate that fails for rising trends alone is repeated with as many others ([`repeat`](crate::repeat)).
    pub seeds: Vec<u64>,
    /// Further seeds only for a rate that its runs so far leave open: that fails with [`OPEN`] or more of its requests within the SLO.
    /// Of servers that are compared, one that passes has the seeds of another for which the same rate is open.
    pub until_clear: bool,
    /// Judged requests of a run.
    pub n_requests: u64,
    /// The longest judged window.
    pub max_window: Duration,
    /// Length of the warm-up; `None`: a tenth of the window, from 5 to 30 seconds, at least four times as long as a request that
    /// is alone takes, and at least as long as one that just meets the SLO, if that is no more than ten times as long.
    pub warm_up: Option<Duration>,
    /// Length of the blocks into which runs of compared servers are cut, which then take turns; `None`: they are not cut.
    pub block: Option<Duration>,
    /// Time after the window in which its requests may end.
    pub drain: Duration,
    /// Allowed delay of the bench itself ([`RunPlan::max_late`]).
    pub max_late: Option<Duration>,
    /// The rule of a pass.
    pub rule: Rule,
    /// Rates of the sweep.
    pub rates: Rates,
    /// Number that the content depends on: the same number gives the same bytes, another shares none.
    pub salt: u64,
    /// Layout of the processes, for the result.
    pub topology: Option<String>,
    /// TPOT SLO that the PD workers were started with, for the result.
    pub pd_tpot_slo: Option<Duration>,
    /// More flags that every encoder and PD worker was started with, for the result.
    pub worker_flags: String,
    /// Commit of the bench, for the result.
    pub commit: Option<String>,
    /// Stops the sweep: the window of the run under way ends at once, and the result so far is partial.
    pub stop: CancellationToken,
}

impl Default for SweepSettings {
    fn default() -> Self {
        Self {
            arrivals: Arrivals::Own,
            seeds: vec![1, 2, 3],
            until_clear: false,
            n_requests: RULE_REQUESTS,
            max_window: RULE_WINDOW,
            warm_up: None,
            block: None,
            drain: Duration::from_secs(60),
            max_late: None,
            rule: Rule::default(),
            rates: Rates::Search { first: None, resolution: 0.05 },
            salt: 0,
            topology: None,
            pd_tpot_slo: None,
            worker_flags: String::new(),
            commit: None,
            stop: CancellationToken::new(),
        }
    }
}

impl SweepSettings {
    fn window_at(&self, rate: f64) -> Duration {
        window(self.n_requests, self.max_window, rate)
    }

    fn warm_up_of(&self, window: Duration, answers: &AnswerTimes) -> Duration {
        self.warm_up.unwrap_or_else(|| warm_up(window, answers))
    }
}

/// An event of a running sweep.
#[derive(Clone, Copy, Debug)]
pub enum SweepEvent<'a> {
    /// Before the first run: the planned runs and their estimated time.
    Plan(&'a str),
    /// A run begins.
    Run {
        /// Its rate.
        rate: f64,
        /// Its seed.
        seed: u64,
    },
    /// Progress of the run.
    Progress(Progress),
    /// A judged rate.
    Rate(&'a RateResult),
}

/// Observer of a sweep.
pub type Listener<'a> = &'a (dyn Fn(SweepEvent<'_>) + Send + Sync);

/// A sweep without a result.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// It was stopped before a request was judged.
    #[error("stopped before a request was judged; there is no result")]
    Stopped,
    /// The server does not answer a request that is alone.
    #[error("{target} does not answer a single request: {end:?}")]
    NoAnswer {
        /// Name of the server.
        target: String,
        /// End of the request.
        end: End,
    },
}

/// Measures goodput of a server that runs already. If it is stopped, the result is of what was judged until then.
///
/// # Errors
/// [`SweepError`] if it answers nothing at all, or was stopped before anything was judged. Once it has answered, every
/// further failure is a part of the result.
pub fn run_sweep<'a>(
    server: &'a Server,
    workload: &'a Workload,
    slo: &'a Slo,
    settings: &'a SweepSettings,
    listener: Listener<'a>,
) -> BoxFuture<'a, Result<SweepResult, SweepError>> {
    Box::pin(sweep(server, workload, slo, settings, listener))
}

async fn sweep(
    server: &Server,
    workload: &Workload,
    slo: &Slo,
    settings: &SweepSettings,
    listener: Listener<'_>,
) -> Result<SweepResult, SweepError> {
    let sweep = tokio::select! {
        begun = Sweep::begin(server, workload, slo, settings) => begun?,
        () = settings.stop.cancelled() => return Err(SweepError::Stopped),
    };
    let mut steps = Steps::new(&settings.rates, sweep.safe_rate());
    listener(SweepEvent::Plan(&describe(&steps, settings, &sweep.answers)));
    let mut tested = Vec::new();
    let mut rates = Vec::new();
    while let Some(rate) = steps.next() {
        let runs = sweep.runs(rate, listener).await;
        if runs.is_empty() {
            break;
        }
        let (one, result) = sweep.judge(rate, runs);
        listener(SweepEvent::Rate(&result));
        steps.record(result.trial());
        tested.push(one);
        rates.push(result);
        if tested.len() >= MAX_VOID && tested.iter().all(|t| t.void) {
            break;
        }
    }
    if rates.is_empty() && settings.stop.is_cancelled() {
        return Err(SweepError::Stopped);
    }
    Ok(sweep.result(&tested, rates))
}

/// One run of a sweep.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Result for the document.
    pub result: RunResult,
    /// Outcome of each request.
    pub outcomes: Vec<Outcome>,
    /// Judged window.
    pub window: JudgedWindow,
}

/// The steps of a sweep, for callers that pick rates and the order of runs themselves.
#[derive(Clone)]
pub struct Sweep {
    server: Server,
    workload: Workload,
    slo: Slo,
    settings: SweepSettings,
    content: ContentSource,
    answers: AnswerTimes,
}

impl Sweep {
    /// Measures the tokens of texts, and the time of a single request.
    ///
    /// # Errors
    /// [`SweepError`] if it answers nothing.
    pub async fn begin(
        server: &Server,
        workload: &Workload,
        slo: &Slo,
        settings: &SweepSettings,
    ) -> Result<Self, SweepError> {
        let media = Media::new(settings.salt);
        let wording = learn_wording(server.target.as_ref(), &media, settings.salt).await;
        // A server of speech has no prompt to count; what cannot be asked is taken to be usual.
        let wording = wording.unwrap_or(Wording::DIGITS);
        let content = ContentSource { media, wording, seed: settings.salt };
        let alone_s = alone(server, workload, &content, settings)
            .await
            .map_err(|end| SweepError::NoAnswer { target: server.target.name(), end })?;
        let answers = AnswerTimes::of(workload, slo, alone_s);
        let workload = workload.clone();
        let slo = *slo;
        let settings = settings.clone();
        Ok(Self { server: server.clone(), workload, slo, settings, content, answers })
    }

    /// Half of the rate of requests sent one after the other, which every server can serve.
    pub fn safe_rate(&self) -> f64 {
        let safe = (0.5 / self.answers.alone_s.max(1e-3)).clamp(0.001, 1000.0);
        let digits = 10f64.powf(1.0 - safe.log10().floor());
        (safe * digits).round() / digits
    }

    /// A run with each seed, and with further ones if the rate has to be repeated; fewer if it fails beyond doubt, or the sweep
    /// is stopped.
    async fn runs(&self, rate: f64, listener: Listener<'_>) -> Vec<Measured> {
        let mut runs = Vec::new();
        for seed in repeat::all_seeds(&self.settings.seeds) {
            if self.settings.stop.is_cancelled() {
                break;
            }
            let measured = self.run(RunKey { rate, seed, block: Block::WHOLE }, listener).await;
            // One that was stopped in its warm-up judged nothing.
            if measured.result.verdict.n_offered > 0 || !self.settings.stop.is_cancelled() {
                runs.push(measured);
            }
            if self.is_decided(&runs) {
                break;
            }
        }
        runs
    }

    /// Blocks of a run at a rate.
    pub fn n_blocks(&self, rate: f64) -> u32 {
        n_blocks(self.settings.window_at(rate), self.settings.block)
    }

    /// One run, or a block of one, and then a pause until the server is idle.
    pub async fn run(&self, key: RunKey, listener: Listener<'_>) -> Measured {
        let RunKey { rate, seed, block } = key;
        listener(SweepEvent::Run { rate, seed });
        let plan = RunPlan {
            rate,
            arrivals: self.settings.arrivals,
            seed: block.seed(seed),
            warm_up: self.settings.warm_up_of(block.window(self.settings.window_at(rate)), &self.answers),
            n_requests: block.requests(self.settings.n_requests),
            max_window: block.window(self.settings.max_window),
            drain: self.settings.drain,
            max_late: self.settings.max_late,
        };
        let ran = self.send(&plan, listener).await;
        let result = run_result(&ran, &plan, &self.slo, &self.settings.rule);
        let result = RunResult { seed, block: (block.n > 1).then_some(block.idx), ..result };
        self.settle().await;
        Measured { result, outcomes: ran.outcomes, window: ran.window }
    }

    /// True if the verdict on a rate needs no further run.
    pub fn is_decided(&self, runs: &[Measured]) -> bool {
        let Some(first) = runs.first().map(|run| &run.result) else { return false };
        if self.is_hopeless(runs) {
            return true;
        }
        let n_blocks = first.block.map_or(1, |_| self.n_blocks(first.rate).max(1) as usize);
        if !runs.len().is_multiple_of(n_blocks) {
            return false;
        }
        match (runs.len() / n_blocks).cmp(&self.settings.seeds.len()) {
            Ordering::Less => self.settings.until_clear && is_clear(&self.verdict(runs)),
            Ordering::Equal => !self.verdict(runs).only_rises(),
            // All seeds of a repetition: one that ended with the first that passes would pass too often.
            Ordering::Greater => false,
        }
    }

    /// True if a rate passes by these runs.
    pub fn passes(&self, runs: &[Measured]) -> bool {
        self.verdict(runs).passed
    }

    fn verdict(&self, runs: &[Measured]) -> RunVerdict {
        let judged: Vec<_> =
            runs.iter().map(|run| Run { outcomes: &run.outcomes, window: run.window }).collect();
        judge_runs(&judged, &self.slo, &self.settings.rule)
    }

    /// True if so many requests missed the SLO that the rate fails at 90 % too, whatever the remaining seeds add.
    fn is_hopeless(&self, runs: &[Measured]) -> bool {
        let verdicts = || runs.iter().map(|r| &r.result.verdict);
        let bad: u64 = verdicts().map(|v| v.n_offered - v.n_good).sum();
        let each = verdicts().map(|v| v.n_offered).max().unwrap_or(0);
        let n_blocks = runs.first().map_or(1, |run| self.n_blocks(run.result.rate));
        // Half as much again as a tenth: seeds may differ a little in number.
        bad as f64 > 0.15 * each as f64 * self.settings.seeds.len() as f64 * f64::from(n_blocks)
    }

    /// RunVerdict on all runs of a rate.
    pub fn judge(&self, rate: f64, runs: Vec<Measured>) -> (Tested, RateResult) {
        let void = runs.iter().any(|r| r.result.generator.void);
        let n_first = repeat::n_first(runs.iter().map(|run| run.result.seed), &self.settings.seeds);
        let mut tested = Tested { rate, runs: Vec::new(), n_first, void };
        let mut results = Vec::new();
        for run in runs {
            results.push(run.result);
            tested.runs.push((run.outcomes, run.window));
        }
        let mut verdict = tested.judge(&self.slo, &self.settings.rule);
        if void {
            verdict.passed = false;
            verdict.findings.push(Finding {
                rule: "the bench is in time".to_owned(),
                passed: false,
                found: "a run is void: the bench itself was late with its requests".to_owned(),
            });
        }
        let offered_per_s = Some(tested.offered());
        (tested, RateResult { rate, offered_per_s, verdict, runs: results })
    }

    /// The document.
    pub fn result(&self, tested: &[Tested], mut rates: Vec<RateResult>) -> SweepResult {
        rates.sort_by(|a, b| a.offered().total_cmp(&b.offered()));
        let n_seeds = match self.settings.until_clear {
            true => least_seeds(&rates),
            false => self.settings.seeds.len(),
        };
        SweepResult {
            version: VERSION,
            host: Host::here(self.settings.commit.clone()),
            setup: self.setup(),
            shorter_than_the_rule: shorter(&rates, self.settings.n_requests, n_seeds),
            partial: self.settings.stop.is_cancelled(),
            goodput: goodput(tested, &self.slo, &self.settings.rule),
            rates,
        }
    }

    async fn send(&self, plan: &RunPlan, listener: Listener<'_>) -> Ran {
        // No two runs of a sweep share a byte, so none finds in a cache what another one left there.
        let salt = mix(self.settings.salt ^ mix(plan.seed) ^ plan.rate.to_bits());
        let content =
            ContentSource { media: self.content.media.with_salt(salt), seed: salt, ..self.content.clone() };
        let (progress, mut heard) = watch::channel(Progress::default());
        let telling = async {
            while heard.changed().await.is_ok() {
                listener(SweepEvent::Progress(*heard.borrow_and_update()));
                tokio::time::sleep(TELL_EVERY).await;
            }
            std::future::pending::<()>().await;
        };
        let observers =
            RunObservers { scraper: &self.server.scraper, progress: &progress, stop: &self.settings.stop };
        tokio::select! {
            ran = run(&self.server.target, &self.workload, &content, plan, observers) => ran,
            () = telling => unreachable!("telling goes on until the run is over"),
        }
    }

    /// Waits until the server reports that it is idle, or a moment if it reports nothing.
    async fn settle(&self) {
        let give_up = tokio::time::Instant::now() + SETTLE;
        while !self.settings.stop.is_cancelled() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let busy = self.server.scraper.scrape().await.n_busy().unwrap_or(0.0);
            if busy <= 0.0 || tokio::time::Instant::now() >= give_up {
                return;
            }
        }
    }

    fn setup(&self) -> Setup {
        let ms = |t: Option<Duration>| t.map(|t| t.as_secs_f64() * 1e3);
        Setup {
            target: self.server.target.name(),
            topology: self.settings.topology.clone(),
            model: self.server.target.model(),
            workload: self.workload.text().to_owned(),
            arrivals: self.settings.arrivals.to_string(),
            slo: self.slo.to_string(),
            slo_ttft_ms: ms(self.slo.ttft),
            slo_tpot_ms: ms(self.slo.tpot),
            slo_e2el_ms: ms(self.slo.e2el),
            rule: self.settings.rule,
            seeds: self.settings.seeds.clone(),
            n_requests: self.settings.n_requests,
            max_window_s: self.settings.max_window.as_secs_f64(),
            block_s: self.settings.block.map(|block| block.as_secs_f64()),
            until_clear: self.settings.until_clear,
            pd_tpot_slo_ms: ms(self.settings.pd_tpot_slo),
            worker_flags: self.settings.worker_flags.clone(),
            resolution: match self.settings.rates {
                Rates::Search { resolution, .. } => resolution,
                Rates::Listed(_) | Rates::Bracketed(_) => 0.0,
            },
            salt: self.settings.salt,
        }
    }
}

/// True if the runs of whole seeds pass, or fail clearly.
fn is_clear(verdict: &RunVerdict) -> bool {
    verdict.passed || verdict.attainment() < OPEN
}

/// Sends a few requests one after the other; their mean time in seconds.
async fn alone(
    server: &Server,
    workload: &Workload,
    content: &ContentSource,
    settings: &SweepSettings,
) -> Result<f64, End> {
    let content = ContentSource {
        media: content.media.with_salt(mix(!settings.salt)),
        seed: mix(!settings.salt),
        ..content.clone()
    };
    let clock = Clock::started();
    let mut total = Duration::ZERO;
    for offered in workload.requests(1.0, Arrivals::Constant, settings.salt).take(N_FIRST) {
        let ready = server.target.prepare(&offered, &content);
        let sent = clock.now();
        let reply = ready(clock).await;
        match reply.end {
            End::Whole | End::Short => total += reply.ended.saturating_sub(sent),
            end => return Err(end),
        }
    }
    Ok(total.as_secs_f64() / N_FIRST as f64)
}

/// The planned rates and their estimated time, as a sentence.
fn describe(steps: &Steps, settings: &SweepSettings, answers: &AnswerTimes) -> String {
    let seeds = settings.seeds.len();
    let run_s = |rate: f64| {
        let window = (settings.n_requests as f64 / rate).min(settings.max_window.as_secs_f64());
        window + settings.warm_up_of(Duration::from_secs_f64(window), answers).as_secs_f64() + 3.0
    };
    let sum = |rates: &mut dyn Iterator<Item = f64>| rates.map(run_s).sum::<f64>();
    let (rates, seconds) = match steps {
        Steps::Listed(rates, _) => (format!("{} rates", rates.len()), sum(&mut rates.iter().copied())),
        Steps::Bracketed(bracketing) => {
            (format!("up to {} rates", bracketing.rates().count()), sum(&mut bracketing.rates()))
        }
        // The first ones double, the rest lie about where they stop; runs that fail early are shorter.
        Steps::Search(search) => {
            let plan = search.plan();
            let n = plan.likely_rates();
            let doubled = &mut (0..n).map(|i| plan.first * 2f64.powi(i.min(2) as i32));
            (format!("from {} requests/s, about {n} rates", plan.first), sum(doubled))
        }
    };
    format!(
        "{rates} with {seeds} {} of {} requests each: about {:.0} minutes",
        if seeds == 1 { "run" } else { "runs" },
        settings.n_requests,
        (seconds * seeds as f64 / 60.0).max(1.0),
    )
}

#[cfg(test)]
mod tests;
