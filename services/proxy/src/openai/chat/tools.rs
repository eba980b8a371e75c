//! Tools of a chat request, the choice among them, and the calls in its messages.

use super::super::lists::ShortList;
use serde::Deserialize;
use serde_json::Value;
use triptych_core::Failure;
use triptych_core::prompt::{Tool, ToolCall, ToolChoice};

/// A tool, as parsed.
#[derive(Debug, Deserialize)]
pub(super) struct RawTool {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<RawFunction>,
}

#[derive(Debug, Deserialize)]
struct RawFunction {
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

/// A call in a message of the assistant, as parsed.
#[derive(Debug, Deserialize)]
pub(super) struct RawCall {
    id: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<RawCalled>,
}

#[derive(Debug, Deserialize)]
struct RawCalled {
    name: Option<String>,
    arguments: Option<Arguments>,
}

/// Arguments of a call: JSON as a text, as OpenAI's clients send them, or an object.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string of JSON, or an object")]
enum Arguments {
    Text(String),
    Object(serde_json::Map<String, Value>),
}

/// A word, or a tool by name.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "\"auto\", \"none\", \"required\", or an object with a function")]
pub(super) enum RawChoice {
    Word(String),
    Object {
        #[serde(rename = "type")]
        kind: Option<String>,
        function: Option<RawNamed>,
    },
}

#[derive(Debug, Deserialize)]
pub(super) struct RawNamed {
    name: Option<String>,
}

fn check_kind(kind: Option<&str>, at: &str) -> Result<(), Failure> {
    match kind {
        None | Some("function") => Ok(()),
        Some(other) => Err(Failure::invalid(format!("type is {other:?}, allowed is function"))
            .with_param(format!("{at}.type"))),
    }
}

fn missing(param: String) -> Failure {
    Failure::invalid(format!("{param} is missing")).with_param(param)
}

/// The tools.
pub(super) fn tools(raw: Option<ShortList<RawTool>>) -> Result<Vec<Tool>, Failure> {
    let tool = |(i, tool): (usize, RawTool)| {
        let at = format!("tools[{i}]");
        check_kind(tool.kind.as_deref(), &at)?;
        let function = tool.function.ok_or_else(|| missing(format!("{at}.function")))?;
        Ok(Tool {
            name: function.name.ok_or_else(|| missing(format!("{at}.function.name")))?,
            description: function.description,
            parameters: function.parameters.map(|schema| schema.to_string()),
            is_strict: function.strict.unwrap_or(false),
        })
    };
    raw.map(|list| list.0).unwrap_or_default().into_iter().enumerate().map(tool).collect()
}

/// The choice among them.
pub(super) fn choice(raw: Option<RawChoice>) -> Result<ToolChoice, Failure> {
    match raw {
        None => Ok(ToolChoice::Auto),
        Some(RawChoice::Word(word)) => match &*word {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            other => {
                let message =
                    format!("tool_choice is {other:?}, allowed are auto, none, required and a function");
                Err(Failure::invalid(message).with_param("tool_choice"))
            }
        },
        Some(RawChoice::Object { kind, function }) => {
            check_kind(kind.as_deref(), "tool_choice")?;
            let name = function.and_then(|function| function.name);
            name.map(ToolChoice::Named).ok_or_else(|| missing("tool_choice.function.name".into()))
        }
    }
}

impl RawCall {
    /// The call; `at` is its path in the body.
    pub(super) fn into_call(self, at: &str) -> Result<ToolCall, Failure> {
        check_kind(self.kind.as_deref(), at)?;
        let called = self.function.ok_or_else(|| missing(format!("{at}.function")))?;
        Ok(ToolCall {
            id: self.id.unwrap_or_default(),
            name: called.name.ok_or_else(|| missing(format!("{at}.function.name")))?,
            arguments: match called.arguments {
                None => String::new(),
                Some(Arguments::Text(text)) => text,
                Some(Arguments::Object(fields)) => Value::Object(fields).to_string(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(list: Value) -> Result<Vec<Tool>, Failure> {
        tools(Some(serde_json::from_value(list).unwrap()))
    }

    #[test]
    fn a_schema_keeps_the_order_of_its_keys() {
        let text = r#"[{"type":"function","function":{"name":"f","description":"d","strict":true,
            "parameters":{"type":"object","properties":{"z":{},"a":{}}}}}]"#;
        let tools = tools(Some(serde_json::from_str(text).unwrap())).unwrap();
        let parameters = r#"{"type":"object","properties":{"z":{},"a":{}}}"#.to_owned();
        let expect = Tool {
            name: "f".into(),
            description: Some("d".into()),
            parameters: Some(parameters),
            is_strict: true,
        };
        assert_eq!(tools, [expect]);
    }

    #[test]
    fn a_choice_is_a_word_or_a_tool() {
        let read = |value: Value| choice(serde_json::from_value(value).unwrap());
        assert_eq!(read(json!(null)).unwrap(), ToolChoice::Auto);
        assert_eq!(read(json!("required")).unwrap(), ToolChoice::Required);
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(read(named).unwrap(), ToolChoice::Named("f".into()));
        for (value, param) in [
            (json!("any"), "tool_choice"),
            (json!({"type": "allowed_tools"}), "tool_choice.type"),
            (json!({"type": "function"}), "tool_choice.function.name"),
        ] {
            assert_eq!(read(value).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn an_error_names_the_field() {
        for (list, param) in [
            (json!([{"type": "web_search"}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].function"),
            (json!([{"function": {"name": "f"}}, {"function": {}}]), "tools[1].function.name"),
        ] {
            assert_eq!(read(list).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
