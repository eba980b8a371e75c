//! Calls of tools in tags, in a text that comes in pieces: those of Qwen3-Coder and of GLM.
//!
//! ```text
//! <tool_call>                          <tool_call>weather
//! <function=weather>                   <arg_key>days</arg_key>
//! <parameter=days>                     <arg_value>3</arg_value>
//! 3                                    </tool_call>
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Values have no types of their own, so those of the tool's schema decide: what may be a text is one, anything else is JSON
//! if it can be. A call is held until it ends, at most [`MAX_HELD`] bytes; what does not become one is text.

use super::markers::{CALL, END_OF_CALL};
use super::parser::MAX_HELD;
use super::{AnswerPiece, add};
use serde_json::{Map, Value};
use std::sync::Arc;
use triptych_core::prompt::ToolSyntax;

/// Reads the calls of one answer.
#[derive(Clone, Debug)]
pub(super) struct TaggedParser {
    syntax: ToolSyntax,
    /// Schemas of the tools' arguments, by name.
    schemas: Arc<[(String, Value)]>,
    /// Text that is not decided.
    held: String,
    is_inside: bool,
    /// True if white space that is held belongs to no text, should a call follow.
    between: bool,
    n_calls: u32,
}

impl TaggedParser {
    pub(super) fn new(syntax: ToolSyntax, schemas: Arc<[(String, Value)]>) -> Self {
        Self { syntax, schemas, held: String::new(), is_inside: false, between: true, n_calls: 0 }
    }

    /// Calls so far.
    pub(super) fn n_calls(&self) -> u32 {
        self.n_calls
    }

    /// Adds text. Returns what became certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        text.chars().for_each(|c| self.step(c, &mut pieces));
        pieces
    }

    /// Ends the text. A call that has not ended is text.
    pub(super) fn finish(&mut self) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        let rest = std::mem::take(&mut self.held);
        let is_gap = !self.is_inside && self.between && self.n_calls > 0 && rest.trim().is_empty();
        if !rest.is_empty() && !is_gap {
            add(&mut pieces, AnswerPiece::Text(rest));
        }
        pieces
    }

    fn step(&mut self, c: char, pieces: &mut Vec<AnswerPiece>) {
        self.held.push(c);
        if !self.is_inside {
            return self.outside(pieces);
        }
        if self.held.ends_with(END_OF_CALL) {
            let held = std::mem::take(&mut self.held);
            self.is_inside = false;
            match self.read(&held) {
                Some((name, arguments)) => {
                    let index = self.n_calls;
                    self.n_calls += 1;
                    self.between = true;
                    pieces.push(AnswerPiece::Call { index, name });
                    pieces.push(AnswerPiece::Arguments { index, text: Value::Object(arguments).to_string() });
                }
                None => self.give_up(held, pieces),
            }
        } else if self.held.len() > MAX_HELD {
            let held = std::mem::take(&mut self.held);
            self.is_inside = false;
            self.give_up(held, pieces);
        }
    }

    /// Looks for the marker of a call.
    fn outside(&mut self, pieces: &mut Vec<AnswerPiece>) {
        const MAX_SPACE: usize = 256;
        loop {
            let rest = if self.between { self.held.trim_start() } else { &self.held };
            if rest == CALL {
                self.is_inside = true;
                return;
            }
            if CALL.starts_with(rest) && self.held.len() - rest.len() <= MAX_SPACE {
                return;
            }
            let first = self.held.remove(0);
            self.between &= first.is_whitespace() && self.held.len() < MAX_SPACE;
            add(pieces, AnswerPiece::Text(first.into()));
        }
    }

    fn give_up(&mut self, held: String, pieces: &mut Vec<AnswerPiece>) {
        self.between = false;
        add(pieces, AnswerPiece::Text(held));
    }

    /// Name and arguments of a whole call, with its markers.
    fn read(&self, held: &str) -> Option<(String, Map<String, Value>)> {
        let body = held.trim_start().strip_prefix(CALL)?.strip_suffix(END_OF_CALL)?.trim();
        let (name, pairs) = match self.syntax {
            ToolSyntax::Qwen3Coder => functions(body)?,
            _ => keys_and_values(body)?,
        };
        let schema = self.schemas.iter().find(|(tool, _)| tool == name).map(|(_, schema)| schema);
        let typed = |(key, text): (&str, &str)| (key.to_owned(), value(schema, key, text));
        Some((name.to_owned(), pairs.into_iter().map(typed).collect()))
    }
}

/// Name, and pairs of keys and values.
type Call<'a> = (&'a str, Vec<(&'a str, &'a str)>);

/// `<function=NAME>`, then `<parameter=KEY>`, a line break, the value, a line break and `</parameter>` for each.
fn functions(body: &str) -> Option<Call<'_>> {
    let (name, mut rest) = body.strip_prefix("<function=")?.strip_suffix("</function>")?.split_once('>')?;
    let mut pairs = Vec::new();
    while !rest.trim().is_empty() {
        let (key, behind) = rest.trim_start().strip_prefix("<parameter=")?.split_once('>')?;
        let (text, behind) = behind.split_once("</parameter>")?;
        let text = text.strip_prefix('\n').unwrap_or(text);
        pairs.push((key.trim(), text.strip_suffix('\n').unwrap_or(text)));
        rest = behind;
    }
    is_name(name.trim()).then_some((name.trim(), pairs))
}

/// The name, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each.
fn keys_and_values(body: &str) -> Option<Call<'_>> {
    let (name, mut rest) = body.split_at(body.find("<arg_key>").unwrap_or(body.len()));
    let mut pairs = Vec::new();
    while !rest.trim().is_empty() {
        let (key, behind) = rest.trim_start().strip_prefix("<arg_key>")?.split_once("</arg_key>")?;
        let (text, behind) = behind.trim_start().strip_prefix("<arg_value>")?.split_once("</arg_value>")?;
        pairs.push((key.trim(), text));
        rest = behind;
    }
    is_name(name.trim()).then_some((name.trim(), pairs))
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
}

/// The value of an argument, as the schema of its tool has it.
fn value(schema: Option<&Value>, key: &str, text: &str) -> Value {
    let property = schema.and_then(|schema| schema.get("properties")?.get(key));
    let may_be_text = match property.and_then(|property| property.get("type")) {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        // Neither a property that the schema has not, nor one of several forms, says what it is.
        _ => property.is_none_or(|property| property.get("enum").is_some()),
    };
    let as_text = || Value::String(text.to_owned());
    if may_be_text { as_text() } else { serde_json::from_str(text.trim()).unwrap_or_else(|_| as_text()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parser(syntax: ToolSyntax) -> TaggedParser {
        let schema = json!({"properties": {"days": {"type": "integer"}, "city": {"type": "string"},
            "deep": {"type": "object"}, "code": {"type": ["string", "null"]}}});
        TaggedParser::new(syntax, Arc::from([("weather".to_owned(), schema)]))
    }

    /// Text and calls of an answer that comes in pieces of so many characters.
    fn read(syntax: ToolSyntax, text: &str, n: usize) -> (String, Vec<(String, Value)>) {
        let mut parser = parser(syntax);
        let chars: Vec<char> = text.chars().collect();
        let mut pieces = Vec::new();
        for cut in chars.chunks(n) {
            pieces.extend(parser.push(&cut.iter().collect::<String>()));
        }
        pieces.extend(parser.finish());
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                AnswerPiece::Text(more) => text.push_str(&more),
                AnswerPiece::Call { name, .. } => calls.push((name, Value::Null)),
                AnswerPiece::Arguments { text, .. } => {
                    calls.last_mut().unwrap().1 = serde_json::from_str(&text).unwrap();
                }
                AnswerPiece::Reasoning(_) => panic!("reasoning"),
            }
        }
        (text, calls)
    }

    #[track_caller]
    fn check(syntax: ToolSyntax, text: &str, expect: (&str, Vec<(&str, Value)>)) {
        let calls = expect.1.into_iter().map(|(name, arguments)| (name.to_owned(), arguments)).collect();
        let expect = (expect.0.to_owned(), calls);
        for n in [1, 2, 7, text.len().max(1)] {
            assert_eq!(read(syntax, text, n), expect, "{n} at a time");
        }
    }

    const CODER: &str = "I look.\n<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n\
        <parameter=city>\n12\n</parameter>\n<parameter=code>\nif a < b:\n  c\n</parameter>\n</function>\n</tool_call>";

    #[test]
    fn values_have_the_types_of_the_schema() {
        let arguments = json!({"days": 3, "city": "12", "code": "if a < b:\n  c"});
        check(ToolSyntax::Qwen3Coder, CODER, ("I look.\n", vec![("weather", arguments)]));
        let glm = "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n\
            <arg_value>{\"a\": [1]}</arg_value>\n<arg_key>other</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n\
            <tool_call>now\n</tool_call>";
        let arguments = json!({"days": 3, "deep": {"a": [1]}, "other": "7"});
        check(ToolSyntax::Glm45, glm, ("", vec![("weather", arguments), ("now", json!({}))]));
        let wrong = "<tool_call>weather<arg_key>days</arg_key><arg_value>soon</arg_value></tool_call>";
        check(ToolSyntax::Glm45, wrong, ("", vec![("weather", json!({"days": "soon"}))]));
    }

    #[test]
    fn what_is_no_call_stays_text_every_byte_of_it() {
        for text in [
            "a <tool_cal b",
            "<tool_call>\n<function=weather>\n<parameter=days>\n3",
            "<tool_call>{\"name\": \"weather\"}</tool_call> and more",
            "<tool_call>\n<function=weather>\nthree\n</function>\n</tool_call>",
            "  ",
        ] {
            check(ToolSyntax::Qwen3Coder, text, (text, vec![]));
        }
        let long = format!("<tool_call>{}", "x".repeat(MAX_HELD + 10));
        check(ToolSyntax::Glm45, &long, (&long, vec![]));
    }
}
