//! The grammar of an answer that has to call tools, in the syntax of the model.
//!
//! Each call is one of the request's tools, with arguments that fit its schema. The grammar is in llguidance's Lark dialect;
//! PD workers compile it as that of any other constraint.

use super::markers::{ARGS, TOOL_CALLS};
use serde_json::{Value, json};
use triptych_core::prompt::{ChatFormat, Tool, ToolSyntax};

/// Key of a schema under which the grammar library takes options.
const OPTIONS: &str = "x-guidance";
/// White space between two parts of the arguments: none or one space, as published models write.
const WHITESPACE: &str = " ?";
/// Most calls of an answer that must make some.
const MAX_CALLS: usize = 16;

/// The grammar of calls of `tools`, one at least and, with `has_single_call`, at most.
///
/// `format`: that of the model; one without a syntax of its own is held to Llama 3's, which has no markers.
pub fn call_grammar(format: ChatFormat, tools: &[&Tool], has_single_call: bool) -> String {
    let shape = Shape::of(format);
    let more = if has_single_call { String::new() } else { more_calls(shape.between) };
    let (before, after) = (quoted(shape.before), quoted(shape.after));
    format!("start: {before} call{more} {after}\n{}", call_rules(&shape, tools))
}

/// The grammar of a text in which every call is one of `tools`; there may be none.
///
/// The marker of a call ends text at once (a lazy lexeme), and behind it nothing but a call may stand.
pub fn strict_grammar(format: ChatFormat, tools: &[&Tool]) -> String {
    let shape = Shape::of(format);
    let free = "start: segment* REST\nREST: /(?s:.*)/\n";
    let start = match format.tool_syntax {
        Some(ToolSyntax::Hermes) => format!(
            "{free}segment: opening WS call END\nopening[lazy]: /(?s:.*)<tool_call>/\nWS: /\\s{{0,2}}/\n\
             END: /\\s{{0,2}}<\\/tool_call>/\n"
        ),
        Some(ToolSyntax::Mistral) => {
            let calls = match format.has_named_args {
                true => "call".to_owned(),
                false => format!("/ ?/ \"[\" call{} \"]\"", more_calls(shape.between)),
            };
            format!("{free}segment: opening {calls}\nopening[lazy]: /(?s:.*)\\[TOOL_CALLS\\]/\n")
        }
        // A call begins the answer, and no other answer begins as one.
        Some(ToolSyntax::Llama3Json | ToolSyntax::Qwen3Coder | ToolSyntax::Glm45) | None => format!(
            "start: (opening? call{}) | REST\nopening[lazy]: /<\\|python_tag\\|>/\nREST: /([^{{](?s:.*))?/\n",
            more_calls(shape.between)
        ),
    };
    start + &call_rules(&shape, tools)
}

/// The grammar of an answer that is JSON of a schema or calls of `tools`, for a syntax whose calls begin with a mark of
/// their own.
pub fn calls_or_json_grammar(
    format: ChatFormat,
    tools: &[&Tool],
    has_single_call: bool,
    schema: &Value,
) -> String {
    let calls = call_grammar(format, tools, has_single_call);
    // The rule of the calls gets a name of its own, for they are one of two.
    let calls = calls.strip_prefix("start: ").unwrap_or(&calls);
    format!("start: calls | answer\nanswer: %json {schema}\ncalls: {calls}")
}

/// Further calls, as many as an answer may have.
fn more_calls(between: &str) -> String {
    format!(" ({} call){{0,{}}}", quoted(between), MAX_CALLS - 1)
}

/// The rule `call`: one of the tools with arguments that fit its schema.
fn call_rules(shape: &Shape, tools: &[&Tool]) -> String {
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let rule = |(i, tool): (usize, &&Tool)| {
        let [before, after] = (shape.around)(&tool.name).map(|text| quoted(&text));
        let schema = schema(tool);
        format!("call_{i}: {before} arguments_{i} {after}\narguments_{i}: %json {schema}\n")
    };
    let rules: String = tools.iter().enumerate().map(rule).collect();
    format!("call: {}\n{rules}", names.join(" | "))
}

/// The texts around calls and their arguments.
struct Shape {
    before: &'static str,
    between: &'static str,
    after: &'static str,
    around: fn(&str) -> [String; 2],
}

impl Shape {
    fn of(format: ChatFormat) -> Self {
        match format.tool_syntax {
            Some(ToolSyntax::Hermes) => Self {
                before: "<tool_call>\n",
                between: "\n</tool_call>\n<tool_call>\n",
                after: "\n</tool_call>",
                around: |name| object(name, "arguments"),
            },
            Some(ToolSyntax::Mistral) if format.has_named_args => Self {
                before: TOOL_CALLS,
                between: TOOL_CALLS,
                after: "",
                around: |name| [format!("{name}{ARGS}"), String::new()],
            },
            Some(ToolSyntax::Mistral) => Self {
                before: "[TOOL_CALLS][",
                between: ", ",
                after: "]",
                around: |name| object(name, "arguments"),
            },
            // Tags have no grammar: a constrained answer is held to Llama 3's syntax.
            Some(ToolSyntax::Llama3Json | ToolSyntax::Qwen3Coder | ToolSyntax::Glm45) | None => {
                Self { before: "", between: "; ", after: "", around: |name| object(name, "parameters") }
            }
        }
    }
}

/// A call as an object, without the arguments.
fn object(name: &str, key: &str) -> [String; 2] {
    [format!("{{\"name\": {}, \"{key}\": ", Value::from(name)), "}".to_owned()]
}

/// A text as a literal of the grammar.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The schema of a tool's arguments. One that is not strict may have keywords that the grammar library does not know.
fn schema(tool: &Tool) -> Value {
    let text = tool.parameters.as_deref().unwrap_or(r#"{"type": "object", "additionalProperties": false}"#);
    // The request was checked to have objects here.
    let mut schema = serde_json::from_str(text).unwrap_or_else(|_| json!({"type": "object"}));
    if let Value::Object(fields) = &mut schema {
        fields.entry("type").or_insert_with(|| "object".into());
        let mut options = json!({"whitespace_pattern": WHITESPACE});
        if !tool.is_strict {
            options["lenient"] = true.into();
        }
        fields.entry(OPTIONS).or_insert(options);
    }
    schema
}

#[cfg(test)]
mod tests;
