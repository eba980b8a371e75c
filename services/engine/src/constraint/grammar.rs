//! A request's constraint as a grammar of llguidance.

use super::limits::{check_nesting, check_rules, check_schema};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};
use triptych_core::Failure;
use triptych_core::sampling::Constraint;

/// White space between two parts of a JSON text, each time at most once: one space, or a line break with indentation.
/// The library's own default has no bound, and small models write white space until `max_tokens`.
const WHITESPACE: &str = r" |\r?\n( {0,20}|\t{0,5})";
/// The library's options within a schema: separators, white space, leniency.
const OPTIONS: &str = "x-guidance";

/// Grammar of a constraint. `drops_first_space`: the model's texts begin with a space that is no part of them,
/// which the grammar then allows for.
///
/// # Errors
/// Invalid: the constraint is no JSON, or exceeds a limit on its text.
pub(super) fn grammar(constraint: &Constraint, drops_first_space: bool) -> Result<TopLevelGrammar, Failure> {
    let field = constraint.field();
    let mut answer = match constraint {
        Constraint::JsonObject => {
            GrammarWithLexer::from_json_schema(with_bounded_whitespace(json!({"type": "object"})))
        }
        Constraint::JsonSchema(text) => {
            let schema = schema(text, field)?;
            check_schema(&schema, field)?;
            GrammarWithLexer::from_json_schema(with_bounded_whitespace(schema))
        }
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
            check_rules(text, field)?;
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

/// Bounds the white space of a schema that has no word on it. `whitespace_flexible: false` is such a word: none at all.
fn with_bounded_whitespace(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        // Nothing follows of `false`, and it has no place for options.
        Value::Bool(false) => return schema,
        _ => Map::new(),
    };
    let options = schema.entry(OPTIONS).or_insert_with(|| json!({}));
    if let Value::Object(options) = options
        && options.get("whitespace_flexible") != Some(&Value::Bool(false))
        && options.get("whitespace_pattern").is_none_or(Value::is_null)
    {
        options.insert("whitespace_pattern".to_owned(), WHITESPACE.into());
    }
    Value::Object(schema)
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
