//! Structured output in chat and completion bodies: OpenAI's `response_format`, vLLM's `structured_outputs`, and its older
//! fields `guided_*`.

use super::lists::ShortList;
use super::whitespace::WhitespaceOptions;
use serde::Deserialize;
use serde_json::Value;
use triptych_core::Failure;
use triptych_proto::v1;

/// OpenAI's structured output.
#[derive(Debug, Deserialize)]
pub(super) struct ResponseFormat {
    #[serde(rename = "type")]
    kind: Option<String>,
    json_schema: Option<NamedSchema>,
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

/// vLLM's structured output; exactly one is set, or options alone beside `response_format`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StructuredOutputs {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<ShortList<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    #[serde(flatten)]
    whitespace: WhitespaceOptions,
}

/// vLLM's older fields, one for each kind.
pub(super) struct Guided {
    pub(super) json: Option<Value>,
    pub(super) regex: Option<String>,
    pub(super) choice: Option<ShortList<String>>,
    pub(super) grammar: Option<String>,
    pub(super) whitespace_pattern: Option<String>,
}

impl Guided {
    /// The same as `structured_outputs`; or that, if none of these is set.
    ///
    /// # Errors
    /// [`Failure`] if both are set.
    pub(super) fn or(
        self,
        structured: Option<StructuredOutputs>,
    ) -> Result<Option<StructuredOutputs>, Failure> {
        let Self { json, regex, choice, grammar, whitespace_pattern } = self;
        let whitespace = WhitespaceOptions::pattern(whitespace_pattern);
        let guided = StructuredOutputs { json, regex, choice, grammar, whitespace, json_object: None };
        match structured {
            structured if guided.is_empty() && !guided.whitespace.is_set() => Ok(structured),
            None => Ok(Some(guided)),
            Some(_) => {
                let message = "structured_outputs and a field guided_* cannot be given together";
                Err(Failure::invalid(message).with_param("structured_outputs"))
            }
        }
    }
}

pub(super) fn constraint(
    format: Option<ResponseFormat>,
    mut structured: Option<StructuredOutputs>,
) -> Result<Option<v1::Constraint>, Failure> {
    let format = format.map(ResponseFormat::kind).transpose()?.flatten();
    let whitespace = structured.as_mut().map(|s| std::mem::take(&mut s.whitespace)).unwrap_or_default();
    let is_alone = |s: &StructuredOutputs| whitespace.is_set() && format.is_some() && s.is_empty();
    let structured = structured.filter(|s| !is_alone(s));
    let found = match (format, structured) {
        (Some(_), Some(_)) => {
            let message = "response_format and structured_outputs cannot be given together";
            return Err(Failure::invalid(message).with_param("structured_outputs"));
        }
        (kind, None) => kind,
        (None, Some(structured)) => Some(structured.kind()?),
    };
    let found = found.map(|kind| whitespace.apply(kind)).transpose()?;
    Ok(found.map(|kind| v1::Constraint { kind: Some(kind) }))
}

impl ResponseFormat {
    /// Any JSON object.
    pub(super) fn json_object() -> Self {
        Self { kind: Some("json_object".to_owned()), json_schema: None }
    }

    /// JSON of this schema.
    pub(super) fn json_schema(schema: Value) -> Self {
        Self { kind: Some("json_schema".to_owned()), json_schema: Some(NamedSchema { schema: Some(schema) }) }
    }

    fn kind(self) -> Result<Option<v1::constraint::Kind>, Failure> {
        use v1::constraint::{JsonObject, Kind};
        match self.kind.as_deref() {
            None | Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Kind::JsonObject(JsonObject {}))),
            Some("json_schema") => match self.json_schema.and_then(|s| s.schema) {
                Some(schema) => Ok(Some(Kind::JsonSchema(schema.to_string()))),
                None => {
                    Err(Failure::invalid("a response_format of type json_schema needs json_schema.schema")
                        .with_param("response_format.json_schema"))
                }
            },
            Some(other) => Err(Failure::invalid(format!(
                "response_format is of type {other:?}, allowed are text, json_object and json_schema"
            ))
            .with_param("response_format.type")),
        }
    }
}

impl StructuredOutputs {
    fn is_empty(&self) -> bool {
        let Self { json, regex, choice, grammar, json_object, whitespace: _ } = self;
        json.is_none()
            && regex.is_none()
            && choice.is_none()
            && grammar.is_none()
            && *json_object != Some(true)
    }

    fn kind(self) -> Result<v1::constraint::Kind, Failure> {
        use v1::constraint::{Choice, JsonObject, Kind};
        let kinds = [
            self.json.map(|schema| match schema {
                Value::String(text) => Kind::JsonSchema(text),
                schema => Kind::JsonSchema(schema.to_string()),
            }),
            self.regex.map(Kind::Regex),
            self.choice.map(|texts| Kind::Choice(Choice { texts: texts.0 })),
            self.grammar.map(Kind::Grammar),
            self.json_object.filter(|wanted| *wanted).map(|_| Kind::JsonObject(JsonObject {})),
        ];
        let mut kinds = kinds.into_iter().flatten();
        match (kinds.next(), kinds.next()) {
            (Some(kind), None) => Ok(kind),
            _ => {
                let message =
                    "structured_outputs needs exactly one of json, regex, choice, grammar and json_object";
                Err(Failure::invalid(message).with_param("structured_outputs"))
            }
        }
    }
}
