//! Load of a cluster between two readings of its proxy's metrics.

use super::exposition::{Exposition, NotMetrics};
use std::collections::BTreeMap;
use std::time::Duration;
use triptych_bench::slo::Slo;

/// The proxy's counters at a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Requests that ended, by outcome.
    outcomes: BTreeMap<String, f64>,
    /// Requests by their items.
    by_items: BTreeMap<String, f64>,
    /// Items by where their outputs came from.
    sources: BTreeMap<String, f64>,
    item_tokens: Vec<(f64, f64)>,
    text_tokens: Vec<(f64, f64)>,
    output_tokens: Vec<(f64, f64)>,
    ttft: Vec<(f64, f64)>,
    tpot: Vec<(f64, f64)>,
}

/// Load and its outcome between two readings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that ended, a second; refused ones too, since they were offered.
    pub rate: f64,
    /// Part of them that was not answered whole.
    pub failed: f64,
    /// Requests by number of items, as counts.
    pub by_items: BTreeMap<usize, f64>,
    /// Part of the items that no encoder had to compute.
    pub reused: f64,
    /// Output tokens of items: upper bounds and how many are in each bucket.
    pub item_tokens: Vec<(f64, f64)>,
    /// Tokens of text, alike.
    pub text_tokens: Vec<(f64, f64)>,
    /// Tokens that were written, alike.
    pub output_tokens: Vec<(f64, f64)>,
    /// Time to the first token in seconds, alike.
    pub ttft: Vec<(f64, f64)>,
    /// Time of each further token in seconds, alike.
    pub tpot: Vec<(f64, f64)>,
}

impl Reading {
    /// Parses a `/metrics`, or those of several proxies one after another, which are added.
    ///
    /// # Errors
    /// [`NotMetrics`].
    pub fn of(text: &str) -> Result<Self, NotMetrics> {
        let read = Exposition::read(text)?;
        Ok(Self {
            outcomes: read.by("triptych_requests_total", "outcome"),
            by_items: read.by("triptych_requests_by_items_total", "items"),
            sources: read.by("triptych_item_source_total", "source"),
            item_tokens: read.histogram("triptych_item_tokens"),
            text_tokens: read.histogram("triptych_request_text_tokens"),
            output_tokens: read.histogram("triptych_request_output_tokens"),
            ttft: read.histogram("triptych_time_to_first_token_seconds"),
            tpot: read.histogram("triptych_time_per_output_token_seconds"),
        })
    }

    /// The load since an earlier reading; `None` if no request ended, or the proxy was restarted.
    pub fn since(&self, before: &Self, took: Duration) -> Option<Load> {
        let outcomes = difference(&self.outcomes, &before.outcomes)?;
        let ended: f64 = outcomes.values().sum();
        if ended <= 0.0 || took.is_zero() {
            return None;
        }
        let by_items = difference(&self.by_items, &before.by_items)?;
        let sources = difference(&self.sources, &before.sources)?;
        let (items, encoded): (f64, f64) =
            (sources.values().sum(), sources.get("encoded").copied().unwrap_or(0.0));
        Some(Load {
            rate: ended / took.as_secs_f64(),
            failed: 1.0 - outcomes.get("ok").copied().unwrap_or(0.0) / ended,
            by_items: by_items.into_iter().filter_map(|(n, count)| Some((n.parse().ok()?, count))).collect(),
            reused: if items > 0.0 { 1.0 - encoded / items } else { 0.0 },
            item_tokens: buckets(&self.item_tokens, &before.item_tokens),
            text_tokens: buckets(&self.text_tokens, &before.text_tokens),
            output_tokens: buckets(&self.output_tokens, &before.output_tokens),
            ttft: buckets(&self.ttft, &before.ttft),
            tpot: buckets(&self.tpot, &before.tpot),
        })
    }
}

impl Load {
    /// Upper bound of the SLO attainment: each limit by itself, interpolated within its bucket in
    /// proportion; failed requests meet none.
    pub fn attainment(&self, slo: &Slo) -> f64 {
        let within = |buckets: &[(f64, f64)], limit: Option<Duration>| {
            limit.map_or(1.0, |limit| share_within(buckets, limit.as_secs_f64()))
        };
        let met = within(&self.ttft, slo.ttft).min(within(&self.tpot, slo.tpot));
        met * (1.0 - self.failed)
    }
}

/// Differences of counters; `None` if one fell.
fn difference(now: &BTreeMap<String, f64>, before: &BTreeMap<String, f64>) -> Option<BTreeMap<String, f64>> {
    let grown = |(name, n): (&String, &f64)| {
        let more = n - before.get(name).copied().unwrap_or(0.0);
        (more >= 0.0).then(|| (name.clone(), more))
    };
    now.iter().map(grown).collect()
}

/// Bucket counts between two readings of cumulative counts.
fn buckets(now: &[(f64, f64)], before: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let earlier = |bound: f64| before.iter().find(|(b, _)| *b == bound).map_or(0.0, |(_, n)| *n);
    let mut last = 0.0;
    let mut buckets = Vec::new();
    for (bound, n) in now {
        let up_to = n - earlier(*bound);
        buckets.push((*bound, (up_to - last).max(0.0)));
        last = up_to;
    }
    buckets
}

fn share_within(buckets: &[(f64, f64)], limit: f64) -> f64 {
    let all: f64 = buckets.iter().map(|(_, n)| n).sum();
    let mut below = 0.0;
    let mut from = 0.0;
    for (bound, n) in buckets {
        below += match limit {
            _ if *bound <= limit => *n,
            _ if from < limit && bound.is_finite() => n * (limit - from) / (bound - from),
            _ => 0.0,
        };
        from = *bound;
    }
    if all > 0.0 { below / all } else { 1.0 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A proxy that answered `n` requests, each with one item of about 100 tokens, half of them encoded.
    pub(in super::super) fn metrics(n: u32) -> String {
        format!(
            "# HELP triptych_requests R.\n\
             triptych_requests_total{{model=\"m\",outcome=\"ok\"}} {n}\n\
             triptych_requests_by_items_total{{model=\"m\",items=\"1\"}} {n}\n\
             triptych_item_source_total{{source=\"encoded\"}} {half}\n\
             triptych_item_source_total{{source=\"cached\"}} {half}\n\
             triptych_item_tokens_bucket{{le=\"64.0\"}} 0\n\
             triptych_item_tokens_bucket{{le=\"128.0\"}} {n}\n\
             triptych_item_tokens_bucket{{le=\"+Inf\"}} {n}\n\
             triptych_request_text_tokens_bucket{{le=\"32.0\"}} {n}\n\
             triptych_request_text_tokens_bucket{{le=\"+Inf\"}} {n}\n\
             triptych_request_output_tokens_bucket{{le=\"16.0\"}} {n}\n\
             triptych_request_output_tokens_bucket{{le=\"+Inf\"}} {n}\n\
             triptych_time_to_first_token_seconds_bucket{{le=\"0.1\"}} {half}\n\
             triptych_time_to_first_token_seconds_bucket{{le=\"0.2\"}} {n}\n\
             triptych_time_to_first_token_seconds_bucket{{le=\"+Inf\"}} {n}\n",
            half = n / 2
        )
    }

    #[test]
    fn a_load_is_what_happened_between_two_readings() {
        let at = |n| Reading::of(&metrics(n)).unwrap();
        let load = at(300).since(&at(100), Duration::from_secs(10)).unwrap();
        assert_eq!((load.rate, load.failed, load.reused), (20.0, 0.0, 0.5));
        assert_eq!(load.by_items[&1], 200.0);
        assert_eq!(load.item_tokens[1], (128.0, 200.0));
        let attainment = |slo: &str| load.attainment(&slo.parse().unwrap());
        assert!(
            (attainment("ttft=200ms") - 1.0).abs() < 1e-9 && (attainment("ttft=100ms") - 0.5).abs() < 1e-9
        );
        assert!((attainment("ttft=150ms") - 0.75).abs() < 1e-9);
    }

    #[test]
    fn what_several_proxies_count_is_added_up() {
        let both = |n, m| Reading::of(&format!("{}\n{}", metrics(n), metrics(m))).unwrap();
        let load = both(300, 100).since(&both(100, 0), Duration::from_secs(10)).unwrap();
        assert_eq!((load.rate, load.by_items[&1], load.item_tokens[1]), (30.0, 300.0, (128.0, 300.0)));
    }

    #[test]
    fn a_proxy_that_was_started_anew_or_had_nothing_to_do_tells_nothing() {
        let at = |n| Reading::of(&metrics(n)).unwrap();
        assert_eq!(at(100).since(&at(300), Duration::from_secs(10)), None);
        assert_eq!(at(100).since(&at(100), Duration::from_secs(10)), None);
        assert_eq!(at(300).since(&at(100), Duration::ZERO), None);
    }
}
