//! A request's constraint as a grammar of llguidance.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};
use triptych_core::Failure;
use triptych_core::sampling::Constraint;

/// Deepest nesting of brackets. The library reads nested text by recursion.
const MAX_NESTING: usize = 64;

/// Grammar of a constraint. `drops_first_space`: the model's texts begin with a space that is no part of them,
/// which the grammar then allows for.
///
/// # Errors
/// Invalid: the constraint is no JSON, or nested too deeply.
pub(super) fn grammar(constraint: &Constraint, drops_first_space: bool) -> Result<TopLevelGrammar, Failure> {
    let field = constraint.field();
    let mut answer = match constraint {
        Constraint::JsonObject => GrammarWithLexer::from_json_schema(json!({"type": "object"})),
        Constraint::JsonSchema(text) => GrammarWithLexer::from_json_schema(schema(text, field)?),
        Constraint::Regex(text) => {
            check_nesting(text, field)?;
            GrammarWithLexer::from_regex(text)
        }
        Constraint::Choice(choices) => {
            let escaped: Vec<String> = choices.iter().map(|choice| escape(choice)).collect();
            GrammarWithLexer::from_regex(&escaped.join("|"))
        }
        Constraint::Grammar(text) => {
            check_nesting(text, field)?;
            GrammarWithLexer::from_lark(text.clone())
        }
    };
    if !drops_first_space {
        return Ok(TopLevelGrammar::from_grammar(answer));
    }
    answer.name = Some("answer".to_owned());
    let text = GrammarWithLexer::from_lark("start: \" \"? @answer".to_owned());
    Ok(TopLevelGrammar { grammars: vec![text, answer], max_tokens: None })
}

fn schema(text: &str, field: &'static str) -> Result<Value, Failure> {
    // The JSON parser has its own bound on nesting.
    let refused = |what: String| Failure::invalid(what).with_param(field);
    let schema: Value =
        serde_json::from_str(text).map_err(|e| refused(format!("{field} is no JSON: {e}")))?;
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(schema),
        _ => Err(refused(format!("{field} is neither an object nor true or false"))),
    }
}

fn check_nesting(text: &str, field: &'static str) -> Result<(), Failure> {
    let mut depth = 0_usize;
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            // Brackets may be escaped or in strings, so they need not match.
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            let text = format!("{field} opens more than {MAX_NESTING} brackets within one another");
            return Err(Failure::invalid(text).with_param(field));
        }
    }
    Ok(())
}

/// A regular expression that only `text` matches.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
