//! Conversations as vLLM's messages. Calls of tools are read from the answer's text by the proxy, so `tool_choice` is always none:
//! the template shows tools to the model all the same.

use crate::failure::no_field;
use crate::items::AskedItem;
use serde_json::{Map, Value, json};
use triptych_core::Failure;
use triptych_core::prompt::{Chat, ChatEnding, Message, MessagePart, Tool};

/// Writes a conversation about these items for a model.
///
/// # Errors
/// InvalidArgument that names an item, or a field that is no JSON.
pub(super) fn put(
    chat: Chat,
    (model, items): (&str, &[AskedItem]),
    body: &mut Map<String, Value>,
) -> Result<(), Failure> {
    let messages = chat.messages.into_iter().map(|message| self::message(message, (model, items)));
    body.insert("messages".into(), messages.collect::<Result<Vec<_>, _>>()?.into());
    if !chat.tools.is_empty() {
        let tools = chat.tools.into_iter().map(tool).collect::<Result<Vec<_>, _>>()?;
        body.insert("tools".into(), tools.into());
        body.insert("tool_choice".into(), "none".into());
    }
    match chat.ending {
        ChatEnding::GenerationPrompt => {}
        ending => {
            body.insert("add_generation_prompt".into(), false.into());
            body.insert("continue_final_message".into(), (ending == ChatEnding::OpenMessage).into());
        }
    }
    for (name, text) in [("documents", chat.documents), ("chat_template_kwargs", chat.template_kwargs)] {
        if let Some(text) = text {
            body.insert(name.into(), json_of(&text, name)?);
        }
    }
    if let Some(template) = chat.template {
        body.insert("chat_template".into(), template.into());
    }
    Ok(())
}

fn message(message: Message, (model, items): (&str, &[AskedItem])) -> Result<Value, Failure> {
    let mut fields = Map::from_iter([("role".to_owned(), message.role.as_str().into())]);
    let (mut content, mut calls) = (Vec::new(), Vec::new());
    let mut reasoning = String::new();
    for part in message.parts {
        match part {
            MessagePart::Text(text) => content.push(json!({"type": "text", "text": text})),
            MessagePart::Item(idx) => {
                let name = format!("items[{}]", idx.0);
                let item = items.get(idx.0 as usize);
                let item = item.ok_or_else(|| no_field(&name, "an item that is not there"))?;
                content.push(item.part(model).map_err(|failure| failure.with_param(name))?);
            }
            MessagePart::Reasoning(text) => reasoning.push_str(&text),
            MessagePart::ToolCall(call) => calls.push(json!({
                "id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            })),
            MessagePart::ResultOf(call) => {
                fields.insert("tool_call_id".into(), call.id.into());
                if !call.name.is_empty() {
                    fields.insert("name".into(), call.name.into());
                }
            }
        }
    }
    fields.insert("content".into(), self::content(content, !calls.is_empty()));
    if !reasoning.is_empty() {
        fields.insert("reasoning".into(), reasoning.into());
    }
    if !calls.is_empty() {
        fields.insert("tool_calls".into(), calls.into());
    }
    Ok(fields.into())
}

/// One text is itself, so that a template which reads texts alone gets one; no part beside calls is null.
fn content(mut parts: Vec<Value>, has_calls: bool) -> Value {
    match parts.as_mut_slice() {
        [] if has_calls => Value::Null,
        [] => "".into(),
        [only] if only["type"] == "text" => only["text"].take(),
        _ => parts.into(),
    }
}

fn tool(tool: Tool) -> Result<Value, Failure> {
    let mut function = Map::from_iter([("name".to_owned(), tool.name.into())]);
    if let Some(description) = tool.description {
        function.insert("description".into(), description.into());
    }
    if let Some(parameters) = tool.parameters {
        function.insert("parameters".into(), json_of(&parameters, "tools")?);
    }
    Ok(json!({"type": "function", "function": function}))
}

fn json_of(text: &str, param: &str) -> Result<Value, Failure> {
    serde_json::from_str(text)
        .map_err(|e| Failure::invalid(format!("{param} is no JSON: {e}")).with_param(param))
}
