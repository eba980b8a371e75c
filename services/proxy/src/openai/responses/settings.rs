//! Settings of a responses request that the response repeats: tools, the choice among them, reasoning and the format of
//! text.

use super::super::structured::ResponseFormat;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use triptych_core::Failure;
use triptych_core::prompt::{Tool, ToolChoice};

/// The settings, as the response has them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Settings {
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) max_tool_calls: Option<u32>,
    pub(super) metadata: Map<String, Value>,
    pub(super) parallel_tool_calls: bool,
    pub(super) prompt_cache_key: Option<String>,
    pub(super) reasoning: ReasoningSettings,
    pub(super) safety_identifier: Option<String>,
    pub(super) temperature: Option<f32>,
    pub(super) text: TextSettings,
    pub(super) tool_choice: RawChoice,
    pub(super) tools: Vec<RawTool>,
    pub(super) top_logprobs: u32,
    pub(super) top_p: Option<f32>,
    pub(super) user: Option<String>,
}

/// Settings of a model that thinks.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct ReasoningSettings {
    pub(super) effort: Option<String>,
    /// Reasoning is not summarized: its text is in the response.
    #[serde(skip_deserializing)]
    summary: Option<&'static str>,
}

/// Settings of the text.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct TextSettings {
    #[serde(default)]
    format: Option<TextFormat>,
}

/// Format of the text: OpenAI's structured output, without the level that chat has around the schema.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct TextFormat {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<Value>,
}

impl TextSettings {
    /// The format, as chat has it.
    ///
    /// # Errors
    /// [`Failure`] for another type, or for a schema that is missing.
    pub(super) fn format(self) -> Result<Option<ResponseFormat>, Failure> {
        let Some(format) = self.format else { return Ok(None) };
        match (format.kind.as_deref(), format.schema) {
            (None | Some("text"), _) => Ok(None),
            (Some("json_object"), _) => Ok(Some(ResponseFormat::json_object())),
            (Some("json_schema"), Some(schema)) => Ok(Some(ResponseFormat::json_schema(schema))),
            (Some("json_schema"), None) => Err(Failure::invalid("a format of type json_schema needs schema")
                .with_param("text.format.schema")),
            (Some(other), _) => {
                let message = format!("type is {other:?}, allowed are text, json_object and json_schema");
                Err(Failure::invalid(message).with_param("text.format.type"))
            }
        }
    }
}

/// A tool: a function, without the level that chat has around it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct RawTool {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

impl RawTool {
    /// The tool; `i` is its place in the list.
    pub(super) fn into_tool(self, i: usize) -> Result<Tool, Failure> {
        let at = |field: &str| format!("tools[{i}].{field}");
        if self.kind.as_deref() != Some("function") {
            let is = self.kind.map_or("missing".to_owned(), |kind| format!("{kind:?}"));
            let message = format!("type is {is}, allowed is function: this server runs no tools");
            return Err(Failure::invalid(message).with_param(at("type")));
        }
        let missing = || Failure::invalid(format!("{} is missing", at("name"))).with_param(at("name"));
        Ok(Tool {
            name: self.name.ok_or_else(missing)?,
            description: self.description,
            parameters: self.parameters.filter(|schema| !schema.is_null()).map(|schema| schema.to_string()),
            is_strict: self.strict.unwrap_or(false),
        })
    }
}

/// A word, or a tool by name.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged, expecting = "\"auto\", \"none\", \"required\", or an object with a function's name")]
pub(super) enum RawChoice {
    Word(String),
    Object {
        #[serde(rename = "type")]
        kind: Option<String>,
        name: Option<String>,
    },
}

impl Default for RawChoice {
    fn default() -> Self {
        Self::Word("auto".to_owned())
    }
}

impl RawChoice {
    /// The choice.
    pub(super) fn into_choice(self) -> Result<ToolChoice, Failure> {
        let refused = |is: &str| {
            let message = format!("tool_choice is {is}, allowed are auto, none, required and a function");
            Err(Failure::invalid(message).with_param("tool_choice"))
        };
        match self {
            Self::Word(word) => match &*word {
                "auto" => Ok(ToolChoice::Auto),
                "none" => Ok(ToolChoice::None),
                "required" => Ok(ToolChoice::Required),
                other => refused(&format!("{other:?}")),
            },
            Self::Object { kind, name } => match (kind.as_deref(), name) {
                (Some("function"), Some(name)) => Ok(ToolChoice::Named(name)),
                (Some("function"), None) => {
                    Err(Failure::invalid("tool_choice.name is missing").with_param("tool_choice.name"))
                }
                (kind, _) => refused(&format!("of type {:?}", kind.unwrap_or("none"))),
            },
        }
    }
}
