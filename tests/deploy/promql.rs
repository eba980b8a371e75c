//! Series that a PromQL expression reads: names, and the labels that it matches or groups by.
//!
//! Not a parser: `promtool` validates expressions. Tokens are classified by their neighbours.

use std::collections::BTreeSet;

/// Series and labels of an expression.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct QueryReads {
    /// Selectors, in order.
    pub series: Vec<Series>,
    /// Labels of `by`, `on`, `without` and `ignoring`.
    pub grouped: BTreeSet<String>,
}

/// A selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// Name of the metric.
    pub name: String,
    /// Label and values of each matcher; a pattern is split at `|`.
    pub labels: Vec<(String, Vec<String>)>,
}

const KEYWORDS: [&str; 12] = [
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "offset",
    "bool",
    "inf",
];

/// Keywords that are followed by a list of labels.
const GROUPING: [&str; 4] = ["by", "without", "on", "ignoring"];

/// Scans an expression; it may have dashboard variables in quotes and brackets.
pub fn asked(expression: &str) -> QueryReads {
    let mut asked = QueryReads::default();
    let mut rest = expression;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic() || "_\"'[".contains(c)) {
        // A digit before a letter: `5m`, `1e3`.
        let in_number = rest[..start].ends_with(|c: char| c.is_ascii_digit());
        rest = &rest[start..];
        if let Some(quote) = rest.chars().next().filter(|c| "\"'[".contains(*c)) {
            let end = if quote == '[' { ']' } else { quote };
            rest = rest[1..].split_once(end).map_or("", |(_, rest)| rest);
            continue;
        }
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c))).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        let next = after.trim_start();
        if in_number {
            continue;
        }
        if KEYWORDS.contains(&word) {
            let list = next.strip_prefix('(').and_then(|list| list.split_once(')'));
            if let (true, Some((labels, after))) = (GROUPING.contains(&word), list) {
                let labels = labels.split(',').map(str::trim).filter(|l| !l.is_empty());
                asked.grouped.extend(labels.map(str::to_owned));
                rest = after;
            }
        } else if !next.starts_with('(') && !is_aggregation(word, next) {
            let inside = next.strip_prefix('{').and_then(closed);
            rest = inside.map_or(after, |(_, after)| after);
            let labels = inside.map(|(inside, _)| matchers(inside)).unwrap_or_default();
            asked.series.push(Series { name: word.to_owned(), labels });
        }
    }
    asked
}

/// True for an aggregation with its grouping first: `sum by (…) (…)`.
fn is_aggregation(word: &str, next: &str) -> bool {
    let grouped = ["by", "without"]
        .iter()
        .any(|k| next.strip_prefix(k).is_some_and(|r| r.trim_start().starts_with('(')));
    grouped && !word.contains(':')
}

/// The text before the closing brace, and the rest.
fn closed(text: &str) -> Option<(&str, &str)> {
    let mut quoted = false;
    let end = text.find(|c| {
        quoted ^= c == '"';
        !quoted && c == '}'
    })?;
    Some((&text[..end], &text[end + 1..]))
}

fn matchers(inside: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = inside;
    while let Some((name, after)) = rest.split_once(['=', '!']) {
        let pattern = after.starts_with('~');
        let Some((value, after)) = after.split_once('"').and_then(|(_, quoted)| quoted.split_once('"'))
        else {
            break;
        };
        let values =
            if pattern { value.split('|').map(str::to_owned).collect() } else { vec![value.to_owned()] };
        found.push((name.trim_matches([',', ' ', '\n']).to_owned(), values));
        rest = after;
    }
    found
}

#[test]
fn names_matchers_and_groups_are_found() {
    let read = |text: &str| {
        let asked = asked(text);
        let series: Vec<_> = asked.series.iter().map(|s| (s.name.clone(), s.labels.clone())).collect();
        (series, asked.grouped.into_iter().collect::<Vec<_>>())
    };
    let label =
        |name: &str, values: &[&str]| (name.to_owned(), values.iter().map(|v| (*v).to_owned()).collect());
    assert_eq!(
        read(
            "histogram_quantile(0.9, sum by (le, x) (rate(a_bucket{j=\"p\",o=~\"b|c\"}[$__rate_interval]))) > 1e3"
        ),
        (
            vec![("a_bucket".into(), vec![label("j", &["p"]), label("o", &["b", "c"])])],
            vec!["le".into(), "x".into()]
        )
    );
    assert_eq!(
        read("sum(a:b:c5m) / on (z) c unless c offset 5m > 14.4 * (1 - scalar(d)) or vector(0)"),
        (["a:b:c5m", "c", "c", "d"].map(|n| (n.to_owned(), Vec::new())).to_vec(), vec!["z".into()])
    );
    assert_eq!(
        read("max(up{a!=\"}\", b != \"\"}) by (c) == 0"),
        (vec![("up".into(), vec![label("a", &["}"]), label("b", &[""])])], vec!["c".into()])
    );
}
