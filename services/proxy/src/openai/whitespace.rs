//! vLLM's options on the white space of JSON output, as options within the schema that PD workers read.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use triptych_core::Failure;
use triptych_proto::v1::constraint::Kind;

/// Key of a schema under which the grammar library takes options (llguidance).
const OPTIONS: &str = "x-guidance";

/// White space between the parts of a JSON text. By default at most one space, or a line break with indentation.
#[derive(Debug, Default, Deserialize)]
pub(super) struct WhitespaceOptions {
    /// No white space at all.
    disable_any_whitespace: Option<bool>,
    /// Regular expression of the white space between two parts.
    whitespace_pattern: Option<String>,
}

impl WhitespaceOptions {
    /// White space that a regular expression allows, if there is one.
    pub(super) fn pattern(whitespace_pattern: Option<String>) -> Self {
        Self { disable_any_whitespace: None, whitespace_pattern }
    }

    /// True if there is anything to apply.
    pub(super) fn is_set(&self) -> bool {
        self.disable_any_whitespace == Some(true) || self.whitespace_pattern.is_some()
    }

    /// The constraint with these options.
    ///
    /// # Errors
    /// The constraint is not JSON.
    pub(super) fn apply(self, kind: Kind) -> Result<Kind, Failure> {
        if !self.is_set() {
            return Ok(kind);
        }
        let schema = match &kind {
            Kind::JsonObject(_) => Some(json!({"type": "object"})),
            // The PD worker refuses a text that is no JSON, and says why.
            Kind::JsonSchema(text) => serde_json::from_str(text).ok(),
            Kind::Regex(_) | Kind::Choice(_) | Kind::Grammar(_) => {
                let message = "disable_any_whitespace and whitespace_pattern are for json and json_object";
                return Err(Failure::invalid(message).with_param("structured_outputs"));
            }
        };
        let mut schema = match schema {
            Some(Value::Object(schema)) => schema,
            Some(Value::Bool(true)) => Map::new(),
            _ => return Ok(kind),
        };
        // Options that are no object stay for the PD worker to refuse.
        if let Value::Object(options) = schema.entry(OPTIONS).or_insert_with(|| json!({})) {
            if self.disable_any_whitespace == Some(true) {
                options.remove("whitespace_pattern");
                options.insert("whitespace_flexible".to_owned(), false.into());
            } else {
                options.insert("whitespace_pattern".to_owned(), self.whitespace_pattern.into());
            }
        }
        Ok(Kind::JsonSchema(Value::Object(schema).to_string()))
    }
}
