//! A vLLM server's `/metrics` (prometheus.io, "Exposition formats"; docs.vllm.ai, "Production Metrics"): its load, and the encoder
//! whose outputs its EC connector publishes under the proxy's keys (`services/ec/python`).

use triptych_core::{Fingerprint, Tower};

/// Gauge of the connector, whose labels describe its encoder of images.
const ENCODER: &str = "triptych_ec_encoder_info";

/// Load of a server, over all its engines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// Requests in a batch.
    pub(crate) running: u32,
    /// Requests queued.
    pub(crate) waiting: u32,
    /// Fraction of the KV blocks in use, of the fullest engine; 0 to 1.
    pub(crate) kv_usage: f32,
    /// Time at which the process started, in seconds since 1970; `None`: not told.
    pub(crate) started: Option<f64>,
}

impl Load {
    /// Reads a scrape. `None` if it has no sample of vLLM's.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut load = Self::default();
        let mut is_vllm = false;
        for (name, value) in text.lines().filter_map(sample) {
            let is_one_of_ours = match name {
                "vllm:num_requests_running" => {
                    load.running = load.running.saturating_add(count(value));
                    true
                }
                "vllm:num_requests_waiting" => {
                    load.waiting = load.waiting.saturating_add(count(value));
                    true
                }
                "vllm:kv_cache_usage_perc" => {
                    load.kv_usage = load.kv_usage.max((value as f32).clamp(0.0, 1.0));
                    true
                }
                "process_start_time_seconds" => {
                    load.started = Some(value);
                    false
                }
                _ => false,
            };
            is_vllm |= is_one_of_ours;
        }
        is_vllm.then_some(load)
    }
}

/// An encoder of images whose outputs are published under the proxy's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PublishedEncoder {
    /// Fingerprint of its outputs.
    pub(crate) fingerprint: Fingerprint,
    /// Its tower.
    pub(crate) tower: Tower,
}

impl PublishedEncoder {
    /// Reads a scrape. `None` if it has none, or engines of one server disagree.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let lines = text.lines().filter(|line| sample(line).is_some_and(|(name, _)| name == ENCODER));
        let mut found: Vec<Option<Self>> = lines.map(Self::of_line).collect();
        found.dedup();
        let [one] = found[..] else { return None };
        one
    }

    fn of_line(line: &str) -> Option<Self> {
        // Of hex digits alone, so that no value of a label holds another label.
        let digest = |name: &str| {
            let (_, rest) = line.rsplit_once(&format!("{name}=\""))?;
            Fingerprint::from_hex(rest.split_once('"')?.0)
        };
        Some(Self {
            fingerprint: digest("fingerprint")?,
            tower: Tower {
                configuration: digest("configuration")?,
                processor: digest("processor")?,
                weights: digest("weights")?,
            },
        })
    }
}

/// Name and value of a sample; `None` for a comment, or a value that is no number.
fn sample(line: &str) -> Option<(&str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let name = line.split(['{', ' ']).next()?;
    // A label's value may hold a brace or a space; the last brace ends the labels.
    let rest = line.rsplit_once('}').map_or_else(|| line.strip_prefix(name), |(_, rest)| Some(rest))?;
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name, value))
}

/// A count of requests; rounds and saturates.
fn count(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_summed_over_engines() {
        let text = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
            # TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a } b\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 7.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
            vllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
            process_start_time_seconds 1.76e+09\n";
        let expect = Load { running: 5, waiting: 7, kv_usage: 0.5, started: Some(1.76e9) };
        assert_eq!(Load::read(text), Some(expect));
    }

    #[test]
    fn a_published_encoder_is_read_where_it_is_whole_and_the_only_one() {
        let digest = |n: u8| Fingerprint::from_bytes([n; 32]);
        let tower = Tower { configuration: digest(1), processor: digest(2), weights: digest(3) };
        let line = |fingerprint: &str| {
            format!(
                "triptych_ec_encoder_info{{model_name=\"a }} b\",engine=\"0\",fingerprint=\"{fingerprint}\",\
                configuration=\"{}\",processor=\"{}\",weights=\"{}\"}} 1.0\n",
                tower.configuration, tower.processor, tower.weights
            )
        };
        let (one, other) = (line(&digest(7).to_string()), line(&digest(8).to_string()));
        let found = PublishedEncoder { fingerprint: digest(7), tower };
        let cases = [
            (one.clone(), Some(found)),
            (format!("up 1\n{one}{one}"), Some(found)),
            (format!("{one}{other}"), None),
            (line("07"), None),
            (one.replace("weights", "weight"), None),
            (format!("# {one}"), None),
            ("triptych_ec_encoder_info 1.0\n".to_owned(), None),
            (String::new(), None),
        ];
        for (text, expect) in cases {
            assert_eq!(PublishedEncoder::read(&text), expect, "{text}");
        }
    }

    #[test]
    fn numbers_of_a_hostile_server_are_clamped_and_other_texts_are_no_load() {
        let text = "vllm:num_requests_running 1e300\nvllm:num_requests_waiting -5\nvllm:kv_cache_usage_perc 7\n\
            vllm:num_requests_running NaN\nvllm:num_requests_running\n";
        let expect = Load { running: u32::MAX, waiting: 0, kv_usage: 1.0, started: None };
        assert_eq!(Load::read(text), Some(expect));
        for text in ["", "<html>", "up 1\n", "process_start_time_seconds 5"] {
            assert_eq!(Load::read(text), None, "{text}");
        }
    }
}
