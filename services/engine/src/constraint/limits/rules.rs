//! Limits on the rules of a Lark grammar.

use super::Counted;
use std::collections::{HashMap, HashSet};
use triptych_core::Failure;

/// Most rules and terminals.
const MAX_RULES: usize = 1_000;
/// Longest chain of rules, each named first by the one before.
const MAX_CHAIN: usize = 250;

/// Refuses a Lark grammar of too many rules, or of rules that name one another in too long a chain.
pub(crate) fn check_rules(text: &str, field: &'static str) -> Result<(), Failure> {
    let rules = rules(text);
    Counted { what: "rules", value: rules.len(), limit: MAX_RULES }.check(field)?;
    Counted { what: "rules in one chain", value: longest_chain(&rules), limit: MAX_CHAIN }.check(field)
}

/// The names in the body of each rule. Words of strings and comments are names here too, which matters only for one
/// that is also a rule's.
fn rules(text: &str) -> HashMap<&str, Vec<&str>> {
    let mut rules: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut current = "";
    for line in text.lines() {
        let body = match head(line) {
            Some((name, body)) => {
                current = name;
                body
            }
            None => line,
        };
        if !current.is_empty() {
            let names = body.split(|c: char| !is_name(c)).filter(|name| !name.is_empty());
            rules.entry(current).or_default().extend(names);
        }
    }
    rules
}

/// Name and body of a rule that starts on this line: `name: body`, with modifiers before and a priority or parameters
/// after the name.
fn head(line: &str) -> Option<(&str, &str)> {
    let (head, body) = line.split_once(':')?;
    let head = head.trim_start().trim_start_matches(['?', '!']);
    let name = head.split(|c: char| !is_name(c)).next()?;
    let rest = head.get(name.len()..)?.trim();
    let is_head = !name.is_empty() && (rest.is_empty() || rest.starts_with(['.', '[', '{']));
    is_head.then_some((name, body))
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Rules on the longest path along which the library reaches rules for the first time.
fn longest_chain(rules: &HashMap<&str, Vec<&str>>) -> usize {
    let mut seen = HashSet::new();
    let mut longest = 0;
    let mut stack = vec![("start", 1)];
    while let Some((name, depth)) = stack.pop() {
        let Some(names) = rules.get(name).filter(|_| seen.insert(name)) else { continue };
        longest = longest.max(depth);
        stack.extend(names.iter().rev().map(|name| (*name, depth + 1)));
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(n: usize) -> String {
        let rules: String = (0..n).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
        format!("start: r0\n{rules}r{n}: /b/\n")
    }

    #[test]
    fn a_chain_is_as_long_as_its_rules_and_a_circle_ends() {
        assert_eq!(longest_chain(&rules(&chain(10))), 12);
        assert_eq!(longest_chain(&rules("start: a\n?a: b\n  | \"x\" a\n!b.2: a? \"y\"\nc[x]: b")), 3);
        assert_eq!(longest_chain(&rules("")), 0);
    }

    #[test]
    fn too_many_rules_and_too_long_a_chain_are_refused_by_value_and_limit() {
        assert_eq!(check_rules(&chain(100), "grammar"), Ok(()));
        let failure = check_rules(&chain(500), "grammar").unwrap_err();
        assert_eq!(failure.message, "grammar has 502 rules in one chain, the limit is 250");
        let failure = check_rules(&chain(5_000), "grammar").unwrap_err();
        assert_eq!(failure.message, "grammar has 5002 rules, the limit is 1000");
    }
}
