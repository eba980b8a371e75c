//! OpenMetrics text, as far as a planner needs it: sums of counters, and histograms, over the series that have a label.

use std::collections::BTreeMap;
use thiserror::Error;

/// Larger texts are not read.
const MAX_BYTES: usize = 16 << 20;

/// Lines of a `/metrics`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposition {
    series: Vec<Series>,
}

#[derive(Clone, Debug, PartialEq)]
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// A text that is no exposition.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotMetrics {
    /// A line that cannot be read.
    #[error("line {line} is no metric: {text:?}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// Its beginning.
        text: String,
    },
    /// Too much.
    #[error("{actual} bytes of metrics, {MAX_BYTES} are read")]
    TooLong {
        /// Bytes of the text.
        actual: usize,
    },
    /// Metrics of another server.
    #[error("there is no `triptych_requests` in these metrics; is this a proxy's /metrics?")]
    NoProxy,
}

impl Exposition {
    /// Parses a text.
    ///
    /// # Errors
    /// [`NotMetrics`].
    pub fn read(text: &str) -> Result<Self, NotMetrics> {
        if text.len() > MAX_BYTES {
            return Err(NotMetrics::TooLong { actual: text.len() });
        }
        let lines = text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#'));
        let series = lines.map(|(i, line)| {
            let unreadable = || NotMetrics::Line { line: i + 1, text: line.chars().take(60).collect() };
            series(line).ok_or_else(unreadable)
        });
        let read = Self { series: series.collect::<Result<_, _>>()? };
        // The name is announced before the first request, too.
        match text.contains("triptych_requests") {
            true => Ok(read),
            false => Err(NotMetrics::NoProxy),
        }
    }

    fn of<'a>(&'a self, name: &'a str, with: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Series> {
        let has = move |s: &&Series| with.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|l| l == v));
        self.series.iter().filter(move |s| s.name == name).filter(has)
    }

    /// Sum of a counter's series that have the labels.
    pub fn sum(&self, name: &str, with: &[(&str, &str)]) -> f64 {
        self.of(name, with).map(|s| s.value).sum()
    }

    /// Sums of a counter by a label's value.
    pub fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for series in self.of(name, &[]) {
            if let Some(value) = series.labels.get(label) {
                *sums.entry(value.clone()).or_default() += series.value;
            }
        }
        sums
    }

    /// Counts of a histogram up to each bound, all series together, ascending; the last bound is infinite.
    pub fn histogram(&self, name: &str) -> Vec<(f64, f64)> {
        let mut counts: Vec<(f64, f64)> = Vec::new();
        let bucket = format!("{name}_bucket");
        for series in self.of(&bucket, &[]) {
            let Some(bound) = series.labels.get("le").and_then(|le| number(le)) else { continue };
            match counts.iter_mut().find(|(b, _)| *b == bound) {
                Some((_, n)) => *n += series.value,
                None => counts.push((bound, series.value)),
            }
        }
        counts.sort_by(|a, b| a.0.total_cmp(&b.0));
        counts
    }
}

/// `name{label="value",…} 1.0 [timestamp] [# exemplar]`.
fn series(line: &str) -> Option<Series> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    let mut rest = rest;
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(label.trim_start_matches(',').trim().to_owned(), value);
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = number(rest.split_whitespace().next()?)?;
    Some(Series { name: name.to_owned(), labels, value })
}

/// Up to the closing quote, escapes undone.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((i, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[i + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        text => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "# HELP triptych_requests Requests.\n\
        triptych_requests_total{model=\"m\",outcome=\"ok\"} 3 # {trace_id=\"x\"} 1\n\
        triptych_requests_total{outcome=\"ok\",model=\"a\\\"b}\"} 4\n\
        triptych_requests_total{model=\"m\",outcome=\"internal\"} 1\n\
        t_bucket{le=\"1.0\"} 2\nt_bucket{le=\"+Inf\"} 5\nt_bucket{le=\"1.0\",x=\"y\"} 1\nplain 7\n# EOF\n";

    #[test]
    fn counters_are_added_up_and_histograms_put_in_order() {
        let read = Exposition::read(TEXT).unwrap();
        assert_eq!(read.sum("triptych_requests_total", &[("outcome", "ok")]), 7.0);
        assert_eq!(read.by("triptych_requests_total", "model")["a\"b}"], 4.0);
        assert_eq!(read.histogram("t"), [(1.0, 3.0), (f64::INFINITY, 5.0)]);
        assert_eq!(read.sum("plain", &[]), 7.0);
    }

    #[test]
    fn what_is_no_metrics_is_told_with_its_line() {
        let error = |text: &str| Exposition::read(text).unwrap_err().to_string();
        assert!(error("triptych_requests 1\nwhat is this").contains("line 2"));
        assert!(error("up 1\n").contains("is this a proxy's /metrics?"));
        assert!(error("a{b=\"c").contains("line 1"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z{}=\",# \\\\0-9\n]*") {
            let _ = Exposition::read(&text);
        }
    }
}
