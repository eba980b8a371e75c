//! Limits on the text of a constraint, checked before anything is compiled.
//!
//! They refuse by name what is known to be too costly for its size: the library follows `$ref`s, rules and nested
//! values by recursion, compares every `patternProperties` with every other, and keeps one lexer state for each
//! remainder of a `multipleOf`. Each is one pass over the text and recurses no deeper than its own limit. They are no
//! bound on cost: that is the [`super::trial`]'s.

mod rules;
mod schema;

pub(super) use rules::check_rules;
pub(super) use schema::check_schema;

use std::fmt;
use triptych_core::Failure;

/// Deepest nesting of brackets. The library reads nested text by recursion.
const MAX_NESTING: usize = 64;

/// A number of something in a constraint, and its limit.
struct Counted {
    what: &'static str,
    value: usize,
    limit: usize,
}

impl Counted {
    fn check(&self, field: &'static str) -> Result<(), Failure> {
        if self.value <= self.limit {
            Ok(())
        } else {
            Err(exceeded(field, self.what, self.value, self.limit))
        }
    }
}

fn exceeded(field: &'static str, what: &str, value: impl fmt::Display, limit: usize) -> Failure {
    Failure::invalid(format!("{field} has {value} {what}, the limit is {limit}")).with_param(field)
}

/// Refuses brackets that are nested too deeply.
pub(super) fn check_nesting(text: &str, field: &'static str) -> Result<(), Failure> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            // Brackets may be escaped or in strings, so they need not match.
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    Counted { what: "brackets within one another", value: deepest, limit: MAX_NESTING }.check(field)
}
