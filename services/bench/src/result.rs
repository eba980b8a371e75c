//! What a run and a sweep found, as one JSON document: written here, read by the report and by the planner.
//!
//! Times are milliseconds and rates are per second, as plain numbers, so that any program can read them. A number that
//! is not there is `null`, never zero.

use crate::judge::{Ends, Rule, Verdict};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Of the document. A reader refuses another one.
pub const VERSION: u32 = 1;

/// Runs over several rates, and the goodput that they show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepResult {
    /// [`VERSION`].
    pub version: u32,
    /// Where it was measured.
    pub host: Host,
    /// What was measured, and how.
    pub setup: Setup,
    /// Why it is less than the rule asks for: too few requests or seeds. None: it is all that.
    pub shorter_than_the_rule: Option<String>,
    /// Each tested rate, in rising order.
    pub rates: Vec<RateResult>,
    /// What they come to.
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
    /// When it was measured, in seconds since 1970.
    pub at_unix_s: u64,
    /// The commit of the bench, if it is known.
    pub commit: Option<String>,
}

/// What was measured, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Who was asked: a URL or an address.
    pub target: String,
    /// How its processes were laid out, where the bench started them: `1e1pd`, `dp2`, `colocated`.
    pub topology: Option<String>,
    /// The model's name.
    pub model: String,
    /// As on the command line.
    pub workload: String,
    /// As on the command line.
    pub arrivals: String,
    /// As on the command line.
    pub slo: String,
    /// The promises in milliseconds: time to first token.
    pub slo_ttft_ms: Option<f64>,
    /// Of each further token.
    pub slo_tpot_ms: Option<f64>,
    /// Of the whole answer.
    pub slo_e2el_ms: Option<f64>,
    /// The rule of a pass.
    pub rule: Rule,
    /// Seeds, one run each at each rate.
    pub seeds: Vec<u64>,
    /// Judged requests of a run.
    pub n_requests: u64,
    /// The longest judged window, in seconds.
    pub max_window_s: f64,
    /// Two rates are close enough if they differ by less than this share.
    pub resolution: f64,
    /// What texts and items were made with: the same number gives the same bytes.
    pub salt: u64,
}

/// One rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateResult {
    /// Requests a second that were offered, in the mean.
    pub rate: f64,
    /// All seeds together.
    pub verdict: Verdict,
    /// Each seed.
    pub runs: Vec<RunResult>,
}

/// One run. Counts, latencies and throughput are those of its window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// [`VERSION`].
    pub version: u32,
    /// Requests a second that were offered, in the mean.
    pub rate: f64,
    /// Its seed.
    pub seed: u64,
    /// Length of the warm-up, in seconds.
    pub warm_up_s: f64,
    /// Length of the window, in seconds.
    pub window_s: f64,
    /// Requests that were sent over the whole run.
    pub n_sent: u64,
    /// The run, judged.
    pub verdict: Verdict,
    /// Of requests that ended whole.
    pub ttft_ms: Spread,
    /// Of those with more than one token.
    pub tpot_ms: Spread,
    /// Gaps between one token and the next; tokens of one message have none between them.
    pub itl_ms: Spread,
    /// Of requests that ended whole.
    pub e2el_ms: Spread,
    /// What was served.
    pub throughput: Throughput,
    /// How late the bench itself was.
    pub generator: Generator,
    /// Prompt tokens as the server counted them, over whole requests.
    pub prompt_tokens: Option<Spread>,
    /// Where the time went, where the server says so.
    pub stages: Option<Stages>,
    /// Items and where their encoder outputs came from, where the server says so.
    pub item_sources: Option<ItemSources>,
    /// What the server counted over the run. None: it has no metrics of ours.
    pub server: Option<ServerCounts>,
    /// How requests of the whole run ended, warm-up and drain included.
    pub all_ends: Ends,
    /// Each kind of failure, and how often it came.
    pub errors: BTreeMap<String, u64>,
    /// One sample a second.
    pub timeline: Vec<Sample>,
}

/// A distribution, from a histogram with three significant digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many values.
    pub n: u64,
    /// Their mean; None of these if there is no value.
    pub mean: Option<f64>,
    /// Half are below.
    pub p50: Option<f64>,
    /// Nine of ten are.
    pub p90: Option<f64>,
    /// All but one of a hundred are.
    pub p99: Option<f64>,
    /// The largest.
    pub max: Option<f64>,
}

impl Spread {
    /// Of milliseconds, or anything else that is not below zero.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        // In thousandths: microseconds of milliseconds, up to years; what is above counts as that.
        let histogram = hdrhistogram::Histogram::<u64>::new_with_bounds(1, 1 << 45, 3);
        let mut histogram = histogram.expect("three digits over this range are allowed");
        let (mut n, mut sum) = (0u64, 0.0);
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

/// What was served in a second, over the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Requests that were offered.
    pub offered_per_s: f64,
    /// Requests that ended whole.
    pub requests_per_s: f64,
    /// Requests that were due in the window and kept every promise.
    pub good_per_s: f64,
    /// Tokens that arrived.
    pub output_tokens_per_s: f64,
    /// Pictures of requests that ended whole.
    pub images_per_s: f64,
    /// Seconds of sound of requests that ended whole.
    pub audio_s_per_s: f64,
}

/// How late the bench was with its own sends: a late client is not a slow server, and a run with a client that was too
/// late says nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generator {
    /// From when requests were due to when they were sent.
    pub late_ms: Spread,
    /// The 99th percentile that is allowed.
    pub allowed_ms: f64,
    /// Whether the run is void.
    pub void: bool,
}

/// Where the time went, by the server's own clocks, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// Waiting for an encoder batch and for the first engine step.
    pub queue: Spread,
    /// Preprocessing and encoder forward.
    pub encode: Spread,
    /// Publishing encoder outputs.
    pub publish: Spread,
    /// Loading them.
    pub load: Spread,
    /// Prefill.
    pub prefill: Spread,
    /// From the first token to the last.
    pub decode: Spread,
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

/// Differences of `/metrics` over a run, summed over the processes that were asked. None: nobody has it.
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
    /// Encoder outputs that were not.
    pub ec_misses: Option<f64>,
    /// Prompt tokens whose keys and values were there already.
    pub cached_tokens: Option<f64>,
    /// Sequences that gave up their blocks.
    pub preemptions: Option<f64>,
    /// Mean time of an engine step.
    pub step_ms: Option<f64>,
}

/// One moment of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
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

/// The highest rate at which the promises hold, by three rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The highest tested rate that passes, with every lower tested rate passing. None: none passes.
    pub rate: Option<f64>,
    /// The same in 95 % of bootstrap resamples; an end without a passing rate is 0.
    pub interval: Option<(f64, f64)>,
    /// The lowest tested rate that does not pass; None if all do, and goodput may be higher.
    pub fails_at: Option<f64>,
    /// The same rule with 90 % attainment in place of 99 %, and percentiles at 90.
    pub rate_at_90: Option<f64>,
    /// vLLM's: the largest tested rate whose 99th percentiles are within their promises.
    pub vllm: Option<f64>,
    /// DistServe's: where attainment falls through 90 %, by a straight line between tested rates.
    pub distserve: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_values_of_its_histogram() {
        let spread = Spread::of((1..=1000).map(f64::from));
        let near = |found: Option<f64>, expect: f64| (found.expect("values") / expect - 1.0).abs() < 0.002;
        assert!(near(spread.p50, 500.0) && near(spread.p90, 900.0) && near(spread.p99, 990.0), "{spread:?}");
        assert!(near(spread.max, 1000.0) && near(spread.mean, 500.5) && spread.n == 1000);
        assert_eq!(Spread::of([]), Spread::default());
        assert_eq!(Spread::of([f64::NAN, f64::INFINITY]).n, 0);
    }

    #[test]
    fn another_version_is_refused_by_its_number() {
        let found = SweepResult::read("{\"version\": 99}").expect_err("another version").to_string();
        assert_eq!(found, "a result of version 99, 1 is read");
        assert!(matches!(SweepResult::read("{}"), Err(ReadError::Json(_))));
    }
}
