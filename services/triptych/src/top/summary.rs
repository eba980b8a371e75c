//! Two looks at a proxy, and what happened between them. Pure.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;
use triptych_bench::slo::Slo;
use triptych_plan::online::Exposition;

/// A look at a proxy.
#[derive(Clone, Debug)]
pub struct Look {
    /// Its time.
    pub at: Instant,
    /// The proxy's metrics.
    pub metrics: Exposition,
    /// Its workers; `None` where the admin API is not open.
    pub workers: Option<Workers>,
}

/// The admin API's list of workers, as far as it is shown.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Workers {
    /// In the order of their names.
    pub workers: Vec<Worker>,
}

/// A worker.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Worker {
    /// Role and address.
    pub id: String,
    /// Its health.
    pub health: String,
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Milliseconds of encoding that wait.
    pub queued_ms: u64,
    /// Share of the KV cache in use.
    pub kv_usage: f64,
}

/// Latencies of the requests that ended, in milliseconds: upper bounds of their histogram's buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50_ms: Option<f64>,
    /// p95.
    pub p95_ms: Option<f64>,
}

/// The difference between two looks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Seconds between the looks.
    pub seconds: f64,
    /// Requests in progress.
    pub running: f64,
    /// Requests that ended, a second, by outcome.
    pub requests_per_s: BTreeMap<String, f64>,
    /// Rate of answers, times the share of them within the SLO: an upper bound, since those that miss either target may be
    /// the same or others. `None` without an SLO.
    pub goodput_per_s: Option<f64>,
    /// Prompt tokens a second.
    pub prompt_tokens_per_s: f64,
    /// Generated tokens a second.
    pub generation_tokens_per_s: f64,
    /// Time to the first token.
    pub ttft: Quantiles,
    /// Time per output token.
    pub tpot: Quantiles,
    /// Items by source, of those between the looks.
    pub items: BTreeMap<String, f64>,
    /// Share of items that were not encoded for their request.
    pub hit_rate: Option<f64>,
    /// Workers by role and health.
    pub pools: BTreeMap<String, BTreeMap<String, f64>>,
    /// Each worker; `None` where the admin API is not open.
    pub workers: Option<Vec<Worker>>,
}

const TTFT: &str = "triptych_time_to_first_token_seconds";
const TPOT: &str = "triptych_time_per_output_token_seconds";
const E2E: &str = "triptych_e2e_request_latency_seconds";
const ITEMS: &str = "triptych_item_source_total";
const REQUESTS: &str = "triptych_requests_total";

impl Summary {
    /// The difference of two looks.
    pub fn between(before: &Look, now: &Look, slo: Option<&Slo>) -> Self {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
        let (old, new) = (&before.metrics, &now.metrics);
        let rate = |name: &str| positive(new.sum(name, &[]) - old.sum(name, &[])) / seconds;
        let requests = increase(old, new, REQUESTS, "outcome");
        let (ttft, tpot) = (histogram(old, new, TTFT), histogram(old, new, TPOT));
        let items = increase(old, new, ITEMS, "source");
        let n_items: f64 = items.values().sum();
        let encoded = items.get("encoded").copied().unwrap_or_default();
        let ok = requests.get("ok").copied().unwrap_or_default() / seconds;
        let goodput = slo.map(|slo| {
            let within =
                |counts: &[(f64, f64)], limit: Option<f64>| limit.map_or(1.0, |s| share_within(counts, s));
            let whole = histogram(old, new, E2E);
            let limits = [(&ttft, slo.ttft), (&tpot, slo.tpot), (&whole, slo.e2el)];
            let shares = limits.map(|(counts, limit)| within(counts, limit.map(|limit| limit.as_secs_f64())));
            shares.into_iter().fold(1.0, f64::min) * ok
        });
        Self {
            seconds,
            running: new.sum("triptych_requests_running", &[]),
            requests_per_s: requests.into_iter().map(|(outcome, n)| (outcome, n / seconds)).collect(),
            goodput_per_s: goodput,
            prompt_tokens_per_s: rate("triptych_prompt_tokens_total"),
            generation_tokens_per_s: rate("triptych_generation_tokens_total"),
            ttft: quantiles(&ttft),
            tpot: quantiles(&tpot),
            hit_rate: (n_items > 0.0).then(|| 1.0 - encoded / n_items),
            items,
            pools: pools(new),
            workers: now.workers.clone().map(|all| all.workers),
        }
    }
}

/// A counter that starts anew with its process has not gone back.
fn positive(n: f64) -> f64 {
    if n.is_finite() { n.max(0.0) } else { 0.0 }
}

/// Growth of a counter by a label's value.
fn increase(old: &Exposition, new: &Exposition, name: &str, label: &str) -> BTreeMap<String, f64> {
    let before = old.by(name, label);
    let grown = new.by(name, label).into_iter().map(|(value, n)| {
        let then = before.get(&value).copied().unwrap_or_default();
        (value, positive(n - then))
    });
    grown.filter(|(_, n)| *n > 0.0).collect()
}

/// Counts up to each bound of the observations between two looks.
fn histogram(old: &Exposition, new: &Exposition, name: &str) -> Vec<(f64, f64)> {
    let before = old.histogram(name);
    let then = |bound: f64| before.iter().find(|(b, _)| *b == bound).map_or(0.0, |(_, n)| *n);
    new.histogram(name).into_iter().map(|(bound, n)| (bound, positive(n - then(bound)))).collect()
}

fn quantiles(counts: &[(f64, f64)]) -> Quantiles {
    let total = counts.last().map_or(0.0, |(_, n)| *n);
    let at = |share: f64| {
        let found = counts.iter().find(|(_, n)| total > 0.0 && *n >= share * total);
        found.map(|(bound, _)| bound * 1e3).filter(|ms| ms.is_finite())
    };
    Quantiles { p50_ms: at(0.5), p95_ms: at(0.95) }
}

/// Share of the observations in buckets up to a limit; 1 where nothing was observed.
fn share_within(counts: &[(f64, f64)], limit: f64) -> f64 {
    let total = counts.last().map_or(0.0, |(_, n)| *n);
    let within = counts.iter().rev().find(|(bound, _)| *bound <= limit).map_or(0.0, |(_, n)| *n);
    if total > 0.0 { within / total } else { 1.0 }
}

/// Workers by role and health.
fn pools(metrics: &Exposition) -> BTreeMap<String, BTreeMap<String, f64>> {
    const WORKERS: &str = "triptych_fleet_workers";
    let roles = metrics.by(WORKERS, "role").into_keys();
    roles
        .map(|role| {
            let states = metrics.by(WORKERS, "state").into_keys();
            let n = |state: &str| metrics.sum(WORKERS, &[("role", &role), ("state", state)]);
            let counts: BTreeMap<_, _> =
                states.map(|state| (state.clone(), n(&state))).filter(|(_, n)| *n > 0.0).collect();
            (role.clone(), counts)
        })
        .filter(|(_, counts)| !counts.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn look(at: Instant, n: u32) -> Look {
        let text = format!(
            "triptych_requests_total{{outcome=\"ok\",model=\"m\"}} {ok}\n\
             triptych_requests_total{{outcome=\"overloaded\",model=\"\"}} {n}\n\
             triptych_requests_running 3\n\
             triptych_generation_tokens_total{{model=\"m\"}} {tokens}\n\
             {TTFT}_bucket{{le=\"0.1\"}} {ok}\n{TTFT}_bucket{{le=\"0.5\"}} {slower}\n{TTFT}_bucket{{le=\"+Inf\"}} {slower}\n\
             {ITEMS}{{source=\"encoded\"}} {n}\n{ITEMS}{{source=\"cached\"}} {cached}\n\
             triptych_fleet_workers{{role=\"pd\",state=\"ready\"}} 2\ntriptych_fleet_workers{{role=\"pd\",state=\"down\"}} 0\n",
            ok = n * 8,
            slower = n * 10,
            tokens = n * 100,
            cached = n * 3,
        );
        Look { at, metrics: Exposition::read(&text).unwrap(), workers: None }
    }

    #[test]
    fn rates_and_quantiles_are_of_the_time_between_two_looks() {
        let start = Instant::now();
        let (before, now) = (look(start, 10), look(start + Duration::from_secs(2), 20));
        let summary = Summary::between(&before, &now, Some(&"ttft=200ms".parse().unwrap()));
        assert_eq!((summary.requests_per_s["ok"], summary.requests_per_s["overloaded"]), (40.0, 5.0));
        assert_eq!((summary.running, summary.generation_tokens_per_s), (3.0, 500.0));
        assert_eq!(summary.ttft, Quantiles { p50_ms: Some(100.0), p95_ms: Some(500.0) });
        assert_eq!((summary.tpot, summary.hit_rate), (Quantiles::default(), Some(0.75)));
        assert_eq!(summary.goodput_per_s, Some(32.0), "eight of ten are within the SLO");
        assert_eq!(summary.pools["pd"], BTreeMap::from([("ready".to_owned(), 2.0)]));
    }

    #[test]
    fn a_proxy_that_started_anew_has_no_negative_rates() {
        let start = Instant::now();
        let summary = Summary::between(&look(start, 20), &look(start + Duration::from_secs(2), 1), None);
        assert!(summary.requests_per_s.is_empty() && summary.items.is_empty());
        assert_eq!((summary.generation_tokens_per_s, summary.hit_rate), (0.0, None));
    }
}
