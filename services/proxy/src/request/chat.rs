//! Checks of a conversation, for any model: its messages, its items, its tools.

use super::item::{Item, param_of_item};
use serde_json::Value;
use std::collections::HashSet;
use triptych_core::prompt::{Chat, ChatEnding, MessagePart, Role, Tool, ToolChoice};
use triptych_core::{Failure, ItemIdx};

/// Most tools of a request, as OpenAI's.
const MAX_TOOLS: usize = 128;
/// Longest name of a tool, in bytes.
const MAX_NAME: usize = 64;
/// Variables of a template that have fields of their own.
const RESERVED: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];

pub(super) fn check(chat: &Chat, items: &[Item]) -> Result<(), Failure> {
    check_messages(chat, items)?;
    check_tools(chat)?;
    if let Some(text) = &chat.documents {
        json_of(text, "documents", "a list", Value::is_array)?;
    }
    if let Some(text) = &chat.template_kwargs {
        let variables = json_of(text, "chat_template_kwargs", "an object", Value::is_object)?;
        if let Some(name) = RESERVED.iter().find(|name| variables.get(**name).is_some()) {
            let message = format!("chat_template_kwargs sets {name}, which has a field of its own");
            return Err(Failure::invalid(message).with_param("chat_template_kwargs"));
        }
    }
    Ok(())
}

fn check_messages(chat: &Chat, items: &[Item]) -> Result<(), Failure> {
    if chat.messages.is_empty() {
        return Err(
            Failure::invalid("messages is empty, at least one message is needed").with_param("messages")
        );
    }
    let mut named = 0;
    let mut has_text = false;
    for (m, message) in chat.messages.iter().enumerate() {
        for (p, part) in message.parts.iter().enumerate() {
            let at = |f: Failure| f.with_param(format!("messages[{m}].parts[{p}]"));
            match part {
                MessagePart::Text(text) | MessagePart::Reasoning(text) => has_text |= !text.trim().is_empty(),
                MessagePart::Item(idx) => {
                    check_next(*idx, named, items).map_err(at)?;
                    named += 1;
                }
                MessagePart::ToolCall(call) => {
                    has_text = true;
                    check_author(message.role, Role::Assistant, "a call").map_err(at)?;
                    let param = format!("messages[{m}].tool_calls");
                    check_name(&call.name).map_err(|f| f.with_param(&*param))?;
                    let text = if call.arguments.is_empty() { "{}" } else { &call.arguments };
                    json_of(text, &param, "an object as the arguments of a call", Value::is_object)?;
                }
                MessagePart::ResultOf(_) => {
                    check_author(message.role, Role::Tool, "the result of a call").map_err(at)?;
                }
            }
        }
    }
    if let Some(unused) = items.get(named) {
        let message =
            format!("{} is not named by any part of a message", param_of_item(ItemIdx(named as u32)));
        return Err(Failure::invalid(message).with_param(&*unused.param));
    }
    if !has_text && items.is_empty() {
        return Err(
            Failure::invalid("the prompt is empty: no message has text or an item").with_param("messages")
        );
    }
    let goes_on = chat.ending == ChatEnding::OpenMessage;
    let last_role = chat.messages.last().map(|message| message.role);
    if goes_on && last_role != Some(Role::Assistant) {
        let message = "continue_final_message needs a last message of role assistant";
        return Err(Failure::invalid(message).with_param("continue_final_message"));
    }
    Ok(())
}

/// Parts name the items in order, each once: what comes first in the list comes first in the prompt.
fn check_next(idx: ItemIdx, next: usize, items: &[Item]) -> Result<(), Failure> {
    if idx.0 as usize >= items.len() {
        return Err(Failure::invalid(format!(
            "the part names {}, the request has {} items",
            param_of_item(idx),
            items.len()
        )));
    }
    if idx.0 as usize != next {
        return Err(Failure::invalid(format!(
            "the part names {}, expected is {}: parts name items in order, each once",
            param_of_item(idx),
            param_of_item(ItemIdx(next as u32))
        )));
    }
    Ok(())
}

fn check_author(role: Role, right: Role, what: &str) -> Result<(), Failure> {
    if role == right {
        return Ok(());
    }
    let message = format!("{what} is in a message of role {}, allowed is {}", role.as_str(), right.as_str());
    Err(Failure::invalid(message))
}

fn check_tools(chat: &Chat) -> Result<(), Failure> {
    if chat.tools.len() > MAX_TOOLS {
        let message = format!("the request has {} tools, the limit is {MAX_TOOLS}", chat.tools.len());
        return Err(Failure::invalid(message).with_param("tools"));
    }
    let mut names = HashSet::new();
    for (i, tool) in chat.tools.iter().enumerate() {
        check_tool(tool, &format!("tools[{i}].function"))?;
        if !names.insert(tool.name.as_str()) {
            let message = format!("two tools are named {:?}", tool.name);
            return Err(Failure::invalid(message).with_param(format!("tools[{i}].function.name")));
        }
    }
    let wrong = |message: String| Err(Failure::invalid(message).with_param("tool_choice"));
    match &chat.tool_choice {
        ToolChoice::Required | ToolChoice::Named(_) if chat.tools.is_empty() => {
            wrong("tool_choice asks for a call, the request has no tools".into())
        }
        ToolChoice::Named(name) if !names.contains(name.as_str()) => {
            wrong(format!("tool_choice names {name:?}, which is none of the request's tools"))
        }
        _ => Ok(()),
    }
}

fn check_tool(tool: &Tool, at: &str) -> Result<(), Failure> {
    check_name(&tool.name).map_err(|f| f.with_param(format!("{at}.name")))?;
    if let Some(text) = &tool.parameters {
        json_of(text, &format!("{at}.parameters"), "an object", Value::is_object)?;
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), Failure> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_allowed) {
        return Ok(());
    }
    let message =
        format!("the name of a tool is {name:?}, allowed are 1 to {MAX_NAME} letters, digits, _, - and .");
    Err(Failure::invalid(message))
}

fn json_of(text: &str, param: &str, expected: &str, is_right: fn(&Value) -> bool) -> Result<Value, Failure> {
    let value: Option<Value> = serde_json::from_str(text).ok().filter(is_right);
    value.ok_or_else(|| {
        Failure::invalid(format!("{param} is another text, expected is JSON: {expected}")).with_param(param)
    })
}
