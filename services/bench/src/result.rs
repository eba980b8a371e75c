//! Results of a run and of a sweep, as one JSON document that the report and the planner read.
//!
//! Times are milliseconds and rates are per second, as plain numbers, so that any program can read them. A number that
//! is not there is `null`, never zero.

use crate::judge::{Ends, Rule, RunVerdict};
use crate::search::Trial;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the document. Readers refuse other versions.
pub const VERSION: u32 = 1;

/// Runs over several rates, and the goodput that they show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepResult {
    /// [`VERSION`].
    pub version: u32,
    /// The measuring machine.
    pub host: Host,
    /// Settings of the measurement.
    pub setup: Setup,
    /// Requirements of the rule that are not met: too few requests or seeds. `None`: all are met.
    pub shorter_than_the_rule: Option<String>,
    /// True if it was stopped before its end: goodput is of the rates so far, and the last window may have been cut.
    #[serde(default)]
    pub partial: bool,
    /// Each tested rate, in rising order of what was offered.
    pub rates: Vec<RateResult>,
    /// Goodput over all rates.
    pub goodput: Goodput,
}

impl SweepResult {
    /// Reads a document.
    ///
    /// # Errors
    /// One that is not this, or of another version.
    pub fn read(json: &str) -> Result<Self, ReadError> {
        let version = serde_json::from_str::<Versioned>(json)?.version;
        if version != VERSION {
            return Err(ReadError::Version { found: version });
        }
        Ok(serde_json::from_str(json)?)
    }

    /// The document, indented.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("its keys are text and its numbers finite or null")
    }
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// A document that is no result.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is of another version.
    #[error("a result of version {found}, {VERSION} is read")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It is something else.
    #[error("no result of a bench")]
    Json(#[from] serde_json::Error),
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The processor's name.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: u32,
    /// Memory in MiB.
    pub memory_mib: Option<u64>,
    /// Time of the measurement, in seconds since 1970.
    pub at_unix_s: u64,
    /// The commit of the bench, if it is known.
    pub commit: Option<String>,
}

/// Settings of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// URL or address of the server.
    pub target: String,
    /// Topology of its processes, if the bench started them: `1e1pd`, `dp2`, `colocated`.
    pub topology: Option<String>,
    /// The model's name.
    pub model: String,
    /// Text on the command line.
    pub workload: String,
    /// Text on the command line.
    pub arrivals: String,
    /// Text on the command line.
    pub slo: String,
    /// TTFT limit in milliseconds.
    pub slo_ttft_ms: Option<f64>,
    /// TPOT limit in milliseconds.
    pub slo_tpot_ms: Option<f64>,
    /// Limit of the end-to-end latency in milliseconds.
    pub slo_e2el_ms: Option<f64>,
    /// The rule of a pass.
    pub rule: Rule,
    /// Seeds, one run each at each rate.
    pub seeds: Vec<u64>,
    /// Judged requests of a run.
    pub n_requests: u64,
    /// The longest judged window, in seconds.
    pub max_window_s: f64,
    /// Length of the blocks between which compared servers took turns, in seconds. `None`: runs were not cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_s: Option<f64>,
    /// Further seeds were only for rates that the ones before left open ([`crate::sweep::OPEN`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub until_clear: bool,
    /// TPOT SLO that the bench told its PD workers (`--tpot-slo`), in milliseconds. `None`: it told them none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pd_tpot_slo_ms: Option<f64>,
    /// More flags that every encoder and PD worker was started with; empty: none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub worker_flags: String,
    /// Two rates are close enough if they differ by less than this share.
    pub resolution: f64,
    /// Number that the content of texts and items depends on.
    pub salt: u64,
}

impl Setup {
    /// Number of seeds at each rate, as text.
    pub(crate) fn n_seeds(&self) -> String {
        let n = self.seeds.len();
        if self.until_clear && n > 1 { format!("1 to {n}") } else { n.to_string() }
    }
}

/// One rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateResult {
    /// Requests a second that were asked for, in the mean.
    pub rate: f64,
    /// Requests a second that were offered in the judged windows: the rate that the verdict and goodput are about.
    /// `None` in older documents, whose goodput is by the asked rate.
    #[serde(default)]
    pub offered_per_s: Option<f64>,
    /// All seeds together.
    pub verdict: RunVerdict,
    /// Each seed.
    pub runs: Vec<RunResult>,
}

impl RateResult {
    /// The rate that its verdict is about, in requests a second.
    pub fn offered(&self) -> f64 {
        self.offered_per_s.unwrap_or(self.rate)
    }

    /// The rate with its verdict.
    pub fn trial(&self) -> Trial {
        Trial { asked: self.rate, offered: self.offered(), passed: self.verdict.passed }
    }

    /// The rate in words: what was offered, and what was asked for where that is another number.
    pub fn rate_text(&self) -> String {
        let (asked, offered) = (self.rate, self.offered());
        match (offered / asked - 1.0).abs() < NEARLY_ASKED {
            true => format!("{offered} requests/s"),
            false => format!("{offered} requests/s ({asked} asked for)"),
        }
    }
}

/// Relative difference below which an offered rate counts as the one that was asked for.
const NEARLY_ASKED: f64 = 0.005;

/// One run. Counts, latencies and throughput are those of its window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// [`VERSION`].
    pub version: u32,
    /// Requests a second that were asked for, in the mean; [`Throughput::offered_per_s`] were offered.
    pub rate: f64,
    /// Its seed.
    pub seed: u64,
    /// Index of its block, if the run with the seed was cut into blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u32>,
    /// Length of the warm-up, in seconds.
    pub warm_up_s: f64,
    /// Length of the window, in seconds.
    pub window_s: f64,
    /// Requests that were sent over the whole run.
    pub n_sent: u64,
    /// The run, judged.
    pub verdict: RunVerdict,
    /// Over requests that ended whole.
    pub ttft_ms: Distribution,
    /// Over requests with more than one token.
    pub tpot_ms: Distribution,
    /// Gaps between one token and the next; tokens of one message have none between them.
    pub itl_ms: Distribution,
    /// Over requests that ended whole.
    pub e2el_ms: Distribution,
    /// Throughput.
    pub throughput: Throughput,
    /// Lateness of the bench itself.
    pub generator: Generator,
    /// Prompt tokens as the server counted them, over whole requests.
    pub prompt_tokens: Option<Distribution>,
    /// Times of the stages, if the server reports them.
    pub stages: Option<Stages>,
    /// Sources of the items' encoder outputs, if the server reports them.
    pub item_sources: Option<ItemSources>,
    /// The server's counters over the run. `None`: it has no metrics of ours.
    pub server: Option<ServerCounts>,
    /// Ends of all requests, those of warm-up and drain included.
    pub all_ends: Ends,
    /// Number of failures of each kind.
    pub errors: BTreeMap<String, u64>,
    /// One sample a second.
    pub timeline: Vec<TimelineSample>,
}

/// A distribution, from a histogram with three significant digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Number of values.
    pub n: u64,
    /// Mean; `None`, as the others, without values.
    pub mean: Option<f64>,
    /// 50th percentile.
    pub p50: Option<f64>,
    /// 90th percentile.
    pub p90: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// The largest.
    pub max: Option<f64>,
}

impl Distribution {
    /// Of milliseconds, or anything else that is not below zero.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        // In thousandths: microseconds of milliseconds, up to years; what is above counts as that.
        let histogram = hdrhistogram::Histogram::<u64>::new_with_bounds(1, 1 << 45, 3);
        let mut histogram = histogram.expect("three digits over this range are allowed");
        let mut n = 0u64;
        let mut sum = 0.0;
        for value in values.into_iter().filter(|v| v.is_finite() && *v >= 0.0) {
            (n, sum) = (n + 1, sum + value);
            histogram.saturating_record((value * 1e3).round() as u64);
        }
        let at = |q: f64| (n > 0).then(|| histogram.value_at_quantile(q) as f64 / 1e3);
        Self {
            n,
            mean: (n > 0).then(|| sum / n as f64),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// Throughput over the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Requests that were offered.
    pub offered_per_s: f64,
    /// Requests that ended whole.
    pub requests_per_s: f64,
    /// Requests that were due in the window and met the SLO.
    pub good_per_s: f64,
    /// Tokens that arrived.
    pub output_tokens_per_s: f64,
    /// Images of requests that ended whole.
    pub images_per_s: f64,
    /// Seconds of audio of requests that ended whole.
    pub audio_s_per_s: f64,
}

/// Lateness of the bench's own sends: a late client is not a slow server, and a run with a client that was too
/// late says nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generator {
    /// Delay of sending.
    pub late_ms: Distribution,
    /// The 99th percentile that is allowed.
    pub allowed_ms: f64,
    /// True if the run is void.
    pub void: bool,
}

/// Stage times by the server's clocks, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// Waiting for an encoder batch and for the first engine step.
    pub queue: Distribution,
    /// Preprocessing and encoder forward.
    pub encode: Distribution,
    /// Publishing encoder outputs.
    pub publish: Distribution,
    /// Loading them.
    pub load: Distribution,
    /// Prefill.
    pub prefill: Distribution,
    /// From the first token to the last.
    pub decode: Distribution,
}

/// Items of requests that ended whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemSources {
    /// Encoded for the request.
    pub encoded: u64,
    /// Shared with another request's encode.
    pub shared: u64,
    /// Found in a cache.
    pub cached: u64,
}

/// Differences of `/metrics` over a run, summed over its processes. `None`: no process has the metric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerCounts {
    /// Items encoded.
    pub encodes: Option<f64>,
    /// Mean time that an encoder job waited for its batch.
    pub encode_queue_ms: Option<f64>,
    /// Mean time of an encoder forward.
    pub encode_ms: Option<f64>,
    /// Encoder outputs that were found in the store.
    pub ec_hits: Option<f64>,
    /// Encoder outputs that were not found in the store.
    pub ec_misses: Option<f64>,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: Option<f64>,
    /// Preempted sequences.
    pub preemptions: Option<f64>,
    /// Mean time of an engine step.
    pub step_ms: Option<f64>,
}

/// One moment of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineSample {
    /// Seconds after the start of the run.
    pub t_s: f64,
    /// Requests that were sent and have not ended, as the bench sees it.
    pub in_flight: u64,
    /// Encoder jobs that were admitted and have not ended.
    pub encoding: Option<f64>,
    /// Requests that an engine works on.
    pub running: Option<f64>,
    /// Requests that wait for their first engine step.
    pub waiting: Option<f64>,
    /// Share of self-attention KV blocks in use; the fullest worker's.
    pub kv_usage: Option<f64>,
}

/// The highest rate that meets the SLO, by three rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The highest offered rate that passes, with every lower one passing. None: none passes.
    pub rate: Option<f64>,
    /// The same in 95 % of bootstrap resamples; an end without a passing rate is 0.
    pub interval: Option<(f64, f64)>,
    /// The lowest tested rate that does not pass; None if all do, and goodput may be higher.
    pub fails_at: Option<f64>,
    /// The same rule with 90 % attainment in place of 99 %, and percentiles at 90.
    pub rate_at_90: Option<f64>,
    /// vLLM's: the largest tested rate whose 99th percentiles are within their limits.
    pub vllm: Option<f64>,
    /// DistServe's: the rate at which attainment falls below 90 %, interpolated between tested rates.
    pub distserve: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_values_of_its_histogram() {
        let spread = Distribution::of((1..=1000).map(f64::from));
        let near = |found: Option<f64>, expect: f64| (found.expect("values") / expect - 1.0).abs() < 0.002;
        assert!(near(spread.p50, 500.0) && near(spread.p90, 900.0) && near(spread.p99, 990.0), "{spread:?}");
        assert!(near(spread.max, 1000.0) && near(spread.mean, 500.5) && spread.n == 1000);
        assert_eq!(Distribution::of([]), Distribution::default());
        assert_eq!(Distribution::of([f64::NAN, f64::INFINITY]).n, 0);
    }

    #[test]
    fn another_version_is_refused_by_its_number() {
        let found = SweepResult::read("{\"version\": 99}").expect_err("another version").to_string();
        assert_eq!(found, "a result of version 99, 1 is read");
        assert!(matches!(SweepResult::read("{}"), Err(ReadError::Json(_))));
    }
}
