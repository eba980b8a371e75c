//! Judges a run by its SLO. It knows outcomes and not what made them: a cluster's and the
//! simulator's are judged by the same code.
//!
//! A run passes if, of the requests that were due in its window (warm-up before it and drain behind it are not
//! judged):
//!
//! 1. at least 99 % met the SLO ([`Outcome::meets`]); failed requests count as missing it;
//! 2. the 99th percentile of each latency is within its limit; that of a failed request is infinite;
//! 3. at least 97 % as many requests ended whole within the window as were due in it: no backlog is built. What is
//!    under way at the window's end and was not at its start counts against it, and of that a part is chance, which
//!    in a short window can be more than 3 %: so many less are allowed as two standard deviations of a Poisson
//!    number's change are, twice the root of twice the mean of requests under way;
//! 4. neither concurrency nor time to first token rises over the window ([`trend`]), over all runs of a rate together. Where
//!    nothing else is broken, a rise has to be confirmed by as many runs with other seeds ([`judge_repeated`]).

mod trend;
mod window;

use crate::outcome::{End, Outcome};
use crate::slo::Slo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

pub use trend::{Trend, trend};
pub use window::{JudgedWindow, Run, offered_rate};

/// The numbers of the rule; [`Rule::default`] has those of the header.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// Least share of requests that meet the SLO.
    pub attainment: f64,
    /// The percentile of each latency that has to be within its limit.
    pub percentile: f64,
    /// Least share of what is offered that is served in the same time.
    pub served: f64,
}

impl Default for Rule {
    fn default() -> Self {
        Self { attainment: 0.99, percentile: 99.0, served: 0.97 }
    }
}

/// Latencies at three percentiles in milliseconds, over every judged request. None: so many failed that it is
/// infinite, or there was no request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// 50th percentile.
    pub p50: Option<f64>,
    /// 90th percentile.
    pub p90: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

/// RunVerdict on one rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the rule.
    pub rule: String,
    /// True if the run meets it.
    pub passed: bool,
    /// Found and required values, as a sentence.
    pub found: String,
}

/// A run, judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunVerdict {
    /// True if the run meets every rule.
    pub passed: bool,
    /// True if the run meets the percentiles: vLLM's rule.
    pub percentiles_passed: bool,
    /// RunVerdict on each rule.
    pub findings: Vec<Finding>,
    /// Requests that were due in the window.
    pub n_offered: u64,
    /// Requests that met the SLO.
    pub n_good: u64,
    /// Requests that met the TTFT limit; without a limit, all that ended whole.
    #[serde(default)]
    pub n_ttft_good: u64,
    /// Requests that met the TPOT limit; without a limit, all that ended whole.
    #[serde(default)]
    pub n_tpot_good: u64,
    /// Requests that ended whole within the window, whenever they were due.
    pub n_served: u64,
    /// Growth of the requests in flight over the window that is no backlog.
    #[serde(default)]
    pub by_chance: f64,
    /// Ends of the judged requests.
    pub ends: Ends,
    /// Time to first token.
    pub ttft_ms: Percentiles,
    /// Time of each further token, over requests that asked for more than one.
    pub tpot_ms: Percentiles,
    /// Time to the end.
    pub e2el_ms: Percentiles,
    /// Trend of the requests in flight; `None` if the window is too short.
    pub concurrency_trend: Option<Trend>,
    /// Trend of the time to first token.
    pub ttft_trend: Option<Trend>,
}

/// Number of requests by their end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// [`End::Whole`].
    pub whole: u64,
    /// [`End::Short`].
    pub short: u64,
    /// [`End::Refused`].
    pub refused: u64,
    /// [`End::Failed`].
    pub failed: u64,
    /// [`End::Unended`].
    pub unended: u64,
}

impl Ends {
    /// Counts outcomes. A whole answer without a token counts as short.
    pub fn of<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> Self {
        let mut ends = Self::default();
        for outcome in outcomes {
            *match &outcome.end {
                End::Whole if outcome.tokens.is_empty() => &mut ends.short,
                End::Whole => &mut ends.whole,
                End::Short => &mut ends.short,
                End::Refused => &mut ends.refused,
                End::Failed(_) => &mut ends.failed,
                End::Unended => &mut ends.unended,
            } += 1;
        }
        ends
    }
}

impl RunVerdict {
    /// True if it fails for rising trends alone.
    pub fn only_rises(&self) -> bool {
        !self.passed && self.findings.iter().all(|f| f.passed || TREND_RULES.contains(&f.rule.as_str()))
    }

    /// Share of offered requests that met the SLO; 0 if none was offered.
    pub fn attainment(&self) -> f64 {
        ratio(self.n_good, self.n_offered)
    }

    /// Served over offered; 0 if none was offered.
    pub fn served(&self) -> f64 {
        ratio(self.n_served, self.n_offered)
    }

    /// True if there is no backlog.
    pub fn serves(&self, rule: &Rule) -> bool {
        self.n_served as f64 >= self.n_offered as f64 * rule.served - self.by_chance - EXACT
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Judges one run. `outcomes` are all of it, those of warm-up and drain included, in any order.
pub fn judge(outcomes: &[Outcome], window: JudgedWindow, slo: &Slo, rule: &Rule) -> RunVerdict {
    judge_runs(&[Run { outcomes, window }], slo, rule)
}

/// Judges all runs of one rate, each with its own seed: shares and percentiles over all of their requests, trends that
/// they have in common.
pub fn judge_runs(runs: &[Run], slo: &Slo, rule: &Rule) -> RunVerdict {
    judge_repeated(runs, 0, slo, rule)
}

/// Judges all runs of a rate whose first `n_first` failed for rising trends alone, and which was therefore repeated with other
/// seeds: shares and percentiles over all requests, trends over the repetition. Near its capacity a stable system fills for
/// longer than a warm-up and wanders for long, and the test takes parts of a window as independent, so it claims a rise too often
/// there. Runs with other arrivals confirm one only if it is the system's.
pub fn judge_repeated(runs: &[Run], n_first: usize, slo: &Slo, rule: &Rule) -> RunVerdict {
    let repeated = runs.get(n_first..).filter(|repeated| !repeated.is_empty()).unwrap_or(runs);
    let judged: Vec<&Outcome> =
        runs.iter().flat_map(|run| run.outcomes.iter().filter(|o| run.window.has(o.due))).collect();
    let served =
        |run: &Run| run.outcomes.iter().filter(|o| o.is_whole() && run.window.has(o.ended)).count() as u64;
    let mut verdict = RunVerdict {
        passed: false,
        percentiles_passed: false,
        findings: Vec::new(),
        n_offered: judged.len() as u64,
        n_good: n_meeting(&judged, slo),
        n_ttft_good: n_meeting(&judged, &Slo { tpot: None, e2el: None, ..*slo }),
        n_tpot_good: n_meeting(&judged, &Slo { ttft: None, e2el: None, ..*slo }),
        n_served: runs.iter().map(served).sum(),
        by_chance: by_chance(runs),
        ends: Ends::of(judged.iter().copied()),
        ttft_ms: percentiles(judged.iter().map(|o| whole(o, o.ttft()))),
        tpot_ms: percentiles(
            judged.iter().filter(|o| !o.is_whole() || o.tokens.len() > 1).map(|o| whole(o, o.tpot())),
        ),
        e2el_ms: percentiles(judged.iter().map(|o| whole(o, Some(o.e2el())))),
        concurrency_trend: trend::of_concurrency(repeated),
        ttft_trend: trend::of_ttft(repeated, slo),
    };
    let latencies = latency_findings(&judged, slo, rule);
    verdict.percentiles_passed = !judged.is_empty() && latencies.iter().all(|f| f.passed);
    verdict.findings = share_findings(&verdict, rule);
    verdict.findings.extend(latencies);
    verdict.findings.extend(trend_findings(&verdict));
    verdict.passed = verdict.findings.iter().all(|f| f.passed);
    verdict
}

/// Standard deviations that count as chance: of two, one run in forty that is idle would be refused, and a sweep has
/// several.
const BY_CHANCE: f64 = 3.0;

/// Random change of the number of requests in flight, summed over all windows, where requests come and go independently of
/// each other.
fn by_chance(runs: &[Run]) -> f64 {
    BY_CHANCE * runs.iter().map(|run| 2.0 * mean_under_way(run)).sum::<f64>().sqrt()
}

fn mean_under_way(run: &Run) -> f64 {
    let JudgedWindow { from, to } = run.window;
    let within = |o: &Outcome| o.ended.min(to).saturating_sub(o.due.max(from)).as_secs_f64();
    let seconds = run.window.seconds();
    if seconds > 0.0 { run.outcomes.iter().map(within).sum::<f64>() / seconds } else { 0.0 }
}

fn n_meeting(judged: &[&Outcome], slo: &Slo) -> u64 {
    judged.iter().filter(|o| o.meets(slo)).count() as u64
}

/// The latency of a request that ended whole; any other's is infinite.
fn whole(outcome: &Outcome, latency: Option<Duration>) -> f64 {
    match latency.filter(|_| outcome.is_whole()) {
        Some(latency) => latency.as_secs_f64() * 1e3,
        None => f64::INFINITY,
    }
}

fn percentiles(values: impl Iterator<Item = f64>) -> Percentiles {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let at = |p: f64| percentile(&values, p).filter(|v| v.is_finite());
    Percentiles { p50: at(50.0), p90: at(90.0), p99: at(99.0) }
}

/// The smallest value that at least `p` percent of the sorted values do not exceed.
fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let rank = (p / 100.0 * sorted.len() as f64 - 1e-9).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

/// Rounding error of products of shares and counts.
const EXACT: f64 = 1e-9;

fn share_findings(verdict: &RunVerdict, rule: &Rule) -> Vec<Finding> {
    let n = verdict.n_offered;
    let text = |part: u64, share: f64, least: f64| {
        format!("{part} of {n}, {:.2} %; at least {:.0} %", share * 100.0, least * 100.0)
    };
    let by_chance = format!(", less {:.1} by chance", verdict.by_chance);
    vec![
        Finding {
            rule: "attainment".to_owned(),
            passed: n > 0 && verdict.attainment() >= rule.attainment,
            found: text(verdict.n_good, verdict.attainment(), rule.attainment),
        },
        Finding {
            rule: "served".to_owned(),
            passed: n > 0 && verdict.serves(rule),
            found: text(verdict.n_served, verdict.served(), rule.served) + &by_chance,
        },
    ]
}

/// A latency, its name, and its limit in an SLO.
type Latency = (&'static str, fn(&Outcome) -> Option<Duration>, fn(&Slo) -> Option<Duration>);

/// One finding for each latency and limit: requests may have limits of their own.
fn latency_findings(judged: &[&Outcome], slo: &Slo, rule: &Rule) -> Vec<Finding> {
    let latencies: [Latency; 3] = [
        ("TTFT", Outcome::ttft, |slo| slo.ttft),
        ("TPOT", Outcome::tpot, |slo| slo.tpot),
        ("E2EL", |outcome| Some(outcome.e2el()), |slo| slo.e2el),
    ];
    let mut findings = Vec::new();
    for (name, latency, limit) in latencies {
        let mut by_limit: BTreeMap<Duration, Vec<f64>> =
            limit(slo).map(|at| (at, Vec::new())).into_iter().collect();
        for outcome in judged {
            // Of answers of one token each there is no TPOT to judge.
            if name == "TPOT" && outcome.is_whole() && outcome.tokens.len() <= 1 {
                continue;
            }
            if let Some(limit) = limit(&outcome.limits(slo)) {
                by_limit.entry(limit).or_default().push(whole(outcome, latency(outcome)));
            }
        }
        if by_limit.len() > 1 {
            by_limit.retain(|_, values| !values.is_empty());
        }
        findings
            .extend(by_limit.into_iter().map(|(limit, values)| latency_finding(name, limit, values, rule)));
    }
    findings
}

fn latency_finding(name: &str, limit: Duration, mut values: Vec<f64>, rule: &Rule) -> Finding {
    let limit = limit.as_secs_f64() * 1e3;
    values.sort_unstable_by(f64::total_cmp);
    let found = percentile(&values, rule.percentile).unwrap_or(0.0);
    let shown = if found.is_finite() { format!("{found:.1} ms") } else { "infinite".to_owned() };
    Finding {
        rule: format!("p{:.0} {name}", rule.percentile),
        passed: found <= limit,
        found: format!("{shown}; at most {limit:.1} ms"),
    }
}

/// Names of the rules on trends.
const TREND_RULES: [&str; 2] = ["concurrency does not rise", "TTFT does not rise"];

fn trend_findings(verdict: &RunVerdict) -> Vec<Finding> {
    let finding = |rule: &str, trend: &Option<Trend>| Finding {
        rule: rule.to_owned(),
        passed: trend.as_ref().is_none_or(|t| !t.rises),
        found: trend.as_ref().map_or_else(|| "too short to judge".to_owned(), Trend::to_string),
    };
    let [concurrency, ttft] = TREND_RULES;
    vec![finding(concurrency, &verdict.concurrency_trend), finding(ttft, &verdict.ttft_trend)]
}

#[cfg(test)]
mod tests;
