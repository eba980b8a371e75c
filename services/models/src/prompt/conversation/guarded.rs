//! The JSON of a conversation (tools, arguments of calls, documents, variables), and its texts with marks against control
//! tokens.

use crate::error::PromptError;
use crate::tokenization::ControlTokenGuard;
use serde_json::{Map, Value, json};
use triptych_core::prompt::{Chat, MessagePart, Tool};

/// The JSON values of a conversation, as templates see them.
pub(super) struct GuardedJson<'a> {
    /// Each as `{type: "function", function}`.
    pub(super) tools: Vec<Value>,
    /// Of each call in the messages, in order.
    pub(super) arguments: Vec<Value>,
    pub(super) documents: Option<Value>,
    pub(super) variables: Map<String, Value>,
    /// Ids and names of calls.
    names: Vec<&'a str>,
}

impl<'a> GuardedJson<'a> {
    /// Reads the JSON of a conversation.
    ///
    /// # Errors
    /// [`PromptError::Invalid`] for a text that is no JSON of the kind it has to be.
    pub(super) fn read(chat: &'a Chat) -> Result<Self, PromptError> {
        let (mut arguments, mut names) = (Vec::new(), Vec::new());
        for part in chat.messages.iter().flat_map(|message| &message.parts) {
            match part {
                MessagePart::ToolCall(call) => {
                    let text = if call.arguments.is_empty() { "{}" } else { &call.arguments };
                    arguments.push(parse(text, "the arguments of a call", Value::is_object)?);
                    names.extend([call.id.as_str(), &call.name]);
                }
                MessagePart::ResultOf(call) => names.extend([call.id.as_str(), &call.name]),
                MessagePart::Text(_) | MessagePart::Item(_) | MessagePart::Reasoning(_) => {}
            }
        }
        let documents = chat.documents.as_deref().map(|text| parse(text, "documents", Value::is_array));
        let variables = match chat.template_kwargs.as_deref() {
            None => Map::new(),
            Some(text) => match parse(text, "chat_template_kwargs", Value::is_object)? {
                Value::Object(variables) => variables,
                _ => Map::new(),
            },
        };
        Ok(Self {
            tools: chat.tools.iter().map(tool_value).collect::<Result<_, _>>()?,
            arguments,
            documents: documents.transpose()?,
            variables,
            names,
        })
    }

    /// Every text in it, keys included.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> + Clone + use<'_, 'a> {
        let mut texts = self.names.clone();
        self.tools.iter().for_each(|value| collect(value, &mut texts));
        self.arguments.iter().for_each(|value| collect(value, &mut texts));
        self.documents.iter().for_each(|value| collect(value, &mut texts));
        self.variables.values().for_each(|value| collect(value, &mut texts));
        texts.into_iter()
    }

    /// The same with marks in every text.
    pub(super) fn apply(self, guard: &ControlTokenGuard) -> Self {
        let marked = |value: Value| mark(value, guard);
        Self {
            tools: self.tools.into_iter().map(marked).collect(),
            arguments: self.arguments.into_iter().map(marked).collect(),
            documents: self.documents.map(marked),
            // Their names are variables of the template.
            variables: self.variables.into_iter().map(|(name, value)| (name, marked(value))).collect(),
            names: self.names,
        }
    }
}

/// A tool with the keys in the order of OpenAI's clients.
fn tool_value(tool: &Tool) -> Result<Value, PromptError> {
    let mut function = Map::new();
    function.insert("name".to_owned(), tool.name.as_str().into());
    if let Some(description) = &tool.description {
        function.insert("description".to_owned(), description.as_str().into());
    }
    if let Some(text) = &tool.parameters {
        let parameters = parse(text, "the parameters of a tool", Value::is_object)?;
        function.insert("parameters".to_owned(), parameters);
    }
    Ok(json!({"type": "function", "function": function}))
}

fn parse(text: &str, name: &str, is_right: fn(&Value) -> bool) -> Result<Value, PromptError> {
    let value: Option<Value> = serde_json::from_str(text).ok().filter(is_right);
    value.ok_or_else(|| PromptError::Invalid(format!("{name}: no JSON of the right kind")))
}

/// Adds the texts of a value; the JSON reader has bounded its depth.
fn collect<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(values) => values.iter().for_each(|value| collect(value, texts)),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            texts.push(key);
            collect(value, texts);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn mark(value: Value, guard: &ControlTokenGuard) -> Value {
    match value {
        Value::String(text) => Value::String(guard.apply(&text)),
        Value::Array(values) => values.into_iter().map(|value| mark(value, guard)).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (guard.apply(&key), mark(value, guard))).collect()
        }
        other => other,
    }
}
