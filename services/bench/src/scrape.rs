//! Server metrics: `/metrics` of its processes, in Prometheus' text format. Metrics of ours are read by
//! their names; for a server without them the values are `None`, not zero.

use crate::result::{ServerCounts, TimelineSample};
use std::time::Duration;
use triptych_core::metrics::{self, Metric};

/// The longest text that is read, of one process.
const MAX_BYTES: usize = 8 << 20;

/// Reader of the processes' metrics.
#[derive(Clone, Debug)]
pub struct Scraper {
    client: reqwest::Client,
    urls: Vec<String>,
}

/// The texts of all processes at one moment.
#[derive(Clone, Debug, Default)]
pub struct Scraped(Vec<String>);

impl Scraper {
    /// A reader of `/metrics` at these URLs.
    ///
    /// # Errors
    /// An error of the HTTP client.
    pub fn new(urls: Vec<String>) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build()?;
        Ok(Self { client, urls })
    }

    /// A reader without URLs.
    ///
    /// # Errors
    /// An error of the HTTP client.
    pub fn nobody() -> Result<Self, reqwest::Error> {
        Self::new(Vec::new())
    }

    /// True if there is a URL.
    pub fn asks(&self) -> bool {
        !self.urls.is_empty()
    }

    /// Asks all of them at once; one that does not answer is left out.
    pub async fn scrape(&self) -> Scraped {
        let texts = self.urls.iter().map(|url| self.one(url));
        Scraped(futures::future::join_all(texts).await.into_iter().flatten().collect())
    }

    async fn one(&self, url: &str) -> Option<String> {
        let mut response = self.client.get(url).send().await.ok()?.error_for_status().ok()?;
        let mut text = Vec::new();
        while let Some(bytes) = response.chunk().await.ok()? {
            text.extend_from_slice(&bytes);
            if text.len() > MAX_BYTES {
                return None;
            }
        }
        String::from_utf8(text).ok()
    }
}

impl Scraped {
    /// Sum of a series over all processes and labels. `None`: no process has it.
    fn sum(&self, metric: Metric, suffix: &str) -> Option<f64> {
        self.values(metric, suffix, "").reduce(|a, b| a + b)
    }

    fn values<'a>(&'a self, metric: Metric, suffix: &str, label: &'a str) -> impl Iterator<Item = f64> + 'a {
        let unit = if metric.unit.is_empty() { String::new() } else { format!("_{}", metric.unit) };
        let name = format!("triptych_{}{unit}{suffix}", metric.name);
        let lines = self.0.iter().flat_map(|text| text.lines());
        lines.filter_map(move |line| {
            let rest = line.strip_prefix(&name)?.strip_prefix(['{', ' ']).filter(|r| r.contains(label))?;
            rest.rsplit([' ', '}']).next()?.parse::<f64>().ok().filter(|v| v.is_finite())
        })
    }

    /// The current values as a sample of a timeline.
    pub fn sample(&self, t: Duration, in_flight: u64) -> TimelineSample {
        // Workers of both kinds say how much they have running; only an engine says what waits in it.
        let by_role = |engine: bool| {
            let own = self.0.iter().filter(|text| text.contains("triptych_kv_cache_usage") == engine);
            Self(own.filter(|t| engine || t.contains("triptych_encode_queue_time")).cloned().collect())
        };
        let engines = by_role(true);
        let encoders = by_role(false);
        let usage = self.values(metrics::KV_USAGE, "", "").reduce(f64::max);
        TimelineSample {
            t_s: t.as_secs_f64(),
            in_flight,
            encoding: encoders.sum(metrics::REQUESTS_RUNNING, ""),
            running: engines.sum(metrics::REQUESTS_RUNNING, ""),
            waiting: self.sum(metrics::REQUESTS_WAITING, ""),
            kv_usage: usage,
        }
    }

    /// Requests that are running or waiting.
    pub fn n_busy(&self) -> Option<f64> {
        self.sum(metrics::REQUESTS_RUNNING, "")
    }

    /// Differences since `before`. `None`: neither has a metric of ours.
    pub fn since(&self, before: &Self) -> Option<ServerCounts> {
        let counted = |metric, suffix| {
            // A process that was replaced begins at zero again: what it lost is not known, and not negative.
            self.sum(metric, suffix).map(|now| (now - before.sum(metric, suffix).unwrap_or(0.0)).max(0.0))
        };
        let mean_ms = |metric| {
            let n = counted(metric, "_count")?;
            (n > 0.0).then_some(counted(metric, "_sum")? / n * 1e3)
        };
        let counts = ServerCounts {
            encodes: counted(metrics::ENCODES, "_total"),
            encode_queue_ms: mean_ms(metrics::ENCODE_QUEUE_TIME),
            encode_ms: mean_ms(metrics::ENCODE_TIME),
            ec_hits: counted(metrics::EC_HITS, "_total"),
            ec_misses: counted(metrics::EC_MISSES, "_total"),
            cached_tokens: counted(metrics::CACHED_TOKENS, "_total"),
            preemptions: counted(metrics::PREEMPTIONS, "_total"),
            step_ms: mean_ms(metrics::STEP_TIME),
        };
        (counts != ServerCounts::default()).then_some(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENCODER: &str = "# TYPE x counter\ntriptych_encodes_total{modality=\"image\"} 7\n\
        triptych_encodes_total{modality=\"audio\"} 3\ntriptych_encode_queue_time_seconds_sum{modality=\"image\"} 0.5\n\
        triptych_encode_queue_time_seconds_count{modality=\"image\"} 10\ntriptych_requests_running 2\n";
    const ENGINE: &str = "triptych_requests_running 5\ntriptych_requests_waiting 4\n\
        triptych_kv_cache_usage_ratio{pool=\"self\"} 0.25\ntriptych_preemptions_total 1\n";

    #[test]
    fn counters_are_summed_and_subtracted() {
        let before = Scraped(vec![ENCODER.replace(" 7\n", " 2\n"), ENGINE.to_owned()]);
        let after =
            Scraped(vec![ENCODER.replace(" 0.5\n", " 1.5\n").replace(" 10\n", " 20\n"), ENGINE.into()]);
        let counts = after.since(&before).expect("ours");
        assert_eq!(
            (counts.encodes, counts.encode_queue_ms, counts.preemptions),
            (Some(5.0), Some(100.0), Some(0.0))
        );
        assert_eq!((counts.ec_hits, counts.step_ms), (None, None), "what nobody has is not zero");
    }

    #[test]
    fn a_sample_tells_encoders_from_engines() {
        let sample = Scraped(vec![ENCODER.into(), ENGINE.into()]).sample(Duration::from_secs(3), 9);
        assert_eq!((sample.encoding, sample.running, sample.waiting), (Some(2.0), Some(5.0), Some(4.0)));
        assert_eq!((sample.kv_usage, sample.in_flight), (Some(0.25), 9));
    }

    #[test]
    fn a_server_without_our_metrics_says_nothing() {
        let foreign = Scraped(vec!["vllm:num_requests_running 3\n".into()]);
        assert_eq!(foreign.since(&Scraped::default()), None);
        assert_eq!(foreign.sample(Duration::ZERO, 0).running, None);
    }
}
