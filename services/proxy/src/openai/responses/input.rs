//! The input of a response, as a conversation: messages, calls of tools with their results, and reasoning of earlier
//! answers. The items that an answer has may be sent back as they are.

use super::super::lists::IsWanted;
use super::super::part::RawPart;
use super::super::text_or_list::TextOrList;
use crate::request::Item;
use serde::Deserialize;
use std::collections::HashMap;
use triptych_core::Failure;
use triptych_core::prompt::{CallReference, Message, MessagePart, Role, ToolCall};

/// A text of the user, or a list of items.
pub(super) type Input = TextOrList<InputItem>;

/// An item, as parsed. Ids and statuses of items are passed over.
#[derive(Debug, Deserialize)]
pub(super) struct InputItem {
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Of a message.
    role: Option<String>,
    /// Of a message, or of reasoning.
    content: Option<TextOrList<RawPart>>,
    /// Of reasoning without its text.
    summary: Option<Vec<RawPart>>,
    encrypted_content: Option<IsWanted>,
    /// Of a call, or of its result.
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<TextOrList<RawPart>>,
}

const KINDS: &str = "message, function_call, function_call_output and reasoning";
const ROLES: &str = "system, developer, user and assistant";

/// The conversation; its images and audio clips join `items`.
///
/// # Errors
/// [`Failure`] that names the item at fault.
pub(super) fn messages(
    instructions: Option<String>,
    input: Option<Input>,
    items: &mut Vec<Item>,
) -> Result<Vec<Message>, Failure> {
    let mut conversation = Conversation { messages: Vec::new(), calls: HashMap::new() };
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        conversation.say(Role::System, vec![MessagePart::Text(text)]);
    }
    match input {
        None => return Err(Failure::invalid("input is missing: a text, or a list").with_param("input")),
        Some(TextOrList::Text(text)) => conversation.say(Role::User, vec![MessagePart::Text(text)]),
        Some(TextOrList::List(list)) => {
            for (i, item) in list.into_iter().enumerate() {
                conversation.add(item, &format!("input[{i}]"), items)?;
            }
        }
    }
    Ok(conversation.messages)
}

struct Conversation {
    messages: Vec<Message>,
    /// Names of the tools that were called, by the id of the call.
    calls: HashMap<String, String>,
}

impl Conversation {
    fn say(&mut self, role: Role, parts: Vec<MessagePart>) {
        self.messages.push(Message { role, parts });
    }

    fn add(&mut self, item: InputItem, at: &str, items: &mut Vec<Item>) -> Result<(), Failure> {
        match item.kind.as_deref() {
            None | Some("message") => self.add_message(item, at, items),
            Some("function_call") => self.add_call(item, at),
            Some("function_call_output") => self.add_result(item, at, items),
            Some("reasoning") => self.add_reasoning(item, at),
            Some("item_reference") => {
                let message = "an item_reference names a stored item, and nothing is stored: send the item";
                Err(Failure::invalid(message).with_param(format!("{at}.type")))
            }
            Some(other) => Err(Failure::invalid(format!("type is {other:?}, allowed are {KINDS}"))
                .with_param(format!("{at}.type"))),
        }
    }

    fn add_message(&mut self, item: InputItem, at: &str, items: &mut Vec<Item>) -> Result<(), Failure> {
        let role = match item.role.as_deref() {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            other => {
                let is = other.map_or("missing".to_owned(), |role| format!("{role:?}"));
                return Err(Failure::invalid(format!("role is {is}, allowed are {ROLES}"))
                    .with_param(format!("{at}.role")));
            }
        };
        let parts = parts(item.content, &format!("{at}.content"), items)?;
        match self.messages.last_mut() {
            // Reasoning belongs to the message that came of it.
            Some(last) if role == Role::Assistant && last.is_reasoning() => last.parts.extend(parts),
            _ => self.say(role, parts),
        }
        Ok(())
    }

    fn add_call(&mut self, item: InputItem, at: &str) -> Result<(), Failure> {
        let missing = |field: &str| {
            let param = format!("{at}.{field}");
            Failure::invalid(format!("{param} is missing")).with_param(param)
        };
        let call = ToolCall {
            id: item.call_id.ok_or_else(|| missing("call_id"))?,
            name: item.name.ok_or_else(|| missing("name"))?,
            arguments: item.arguments.unwrap_or_default(),
        };
        self.calls.insert(call.id.clone(), call.name.clone());
        let part = MessagePart::ToolCall(call);
        // Calls of one answer, and the text before them, are one message.
        match self.messages.last_mut() {
            Some(last) if last.role == Role::Assistant => last.parts.push(part),
            _ => self.say(Role::Assistant, vec![part]),
        }
        Ok(())
    }

    fn add_result(&mut self, item: InputItem, at: &str, items: &mut Vec<Item>) -> Result<(), Failure> {
        let param = format!("{at}.call_id");
        let missing = || Failure::invalid(format!("{param} is missing")).with_param(&*param);
        let id = item.call_id.ok_or_else(missing)?;
        let Some(name) = self.calls.get(&id).cloned() else {
            let message = format!("call_id is {id:?}, which no function_call before it has");
            return Err(Failure::invalid(message).with_param(param));
        };
        let mut all = vec![MessagePart::ResultOf(CallReference { id, name })];
        all.extend(parts(item.output, &format!("{at}.output"), items)?);
        self.say(Role::Tool, all);
        Ok(())
    }

    fn add_reasoning(&mut self, item: InputItem, at: &str) -> Result<(), Failure> {
        if item.encrypted_content.is_some_and(|content| content.0) {
            let message = "encrypted_content is of another server: send content, which has the text";
            return Err(Failure::invalid(message).with_param(format!("{at}.encrypted_content")));
        }
        let texts = match item.content {
            Some(TextOrList::Text(text)) => vec![text],
            Some(TextOrList::List(parts)) if !parts.is_empty() => texts(parts),
            _ => texts(item.summary.unwrap_or_default()),
        };
        let text = texts.join("\n");
        if !text.is_empty() {
            self.say(Role::Assistant, vec![MessagePart::Reasoning(text)]);
        }
        Ok(())
    }
}

fn texts(parts: Vec<RawPart>) -> Vec<String> {
    parts.into_iter().filter_map(RawPart::into_text).collect()
}

fn parts(
    content: Option<TextOrList<RawPart>>,
    at: &str,
    items: &mut Vec<Item>,
) -> Result<Vec<MessagePart>, Failure> {
    match content {
        None => Ok(Vec::new()),
        Some(TextOrList::Text(text)) => Ok(vec![MessagePart::Text(text)]),
        Some(TextOrList::List(list)) => {
            let part = |(p, part): (usize, RawPart)| part.into_part(&format!("{at}[{p}]"), items);
            list.into_iter().enumerate().map(part).collect()
        }
    }
}

/// Readings of a message that is being put together.
trait Begun {
    /// True of an assistant's message that has reasoning and nothing else.
    fn is_reasoning(&self) -> bool;
}

impl Begun for Message {
    fn is_reasoning(&self) -> bool {
        let is_reasoning = |part: &MessagePart| matches!(part, MessagePart::Reasoning(_));
        self.role == Role::Assistant && self.parts.iter().all(is_reasoning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(input: Value) -> Result<Vec<Message>, Failure> {
        messages(Some("Be brief.".into()), serde_json::from_value(input).unwrap(), &mut Vec::new())
    }

    #[test]
    fn the_items_of_an_answer_are_one_message_when_they_are_sent_back() {
        let found = read(json!([
            {"role": "user", "content": "cold?"},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "let me see"}], "encrypted_content": null},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{\"x\":1}"},
            {"type": "function_call_output", "call_id": "b", "output": "7"},
            {"type": "function_call_output", "call_id": "a",
             "output": [{"type": "input_text", "text": "8"}]},
        ]))
        .unwrap();
        let roles: Vec<Role> = found.iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Tool]);
        let call = |id: &str, name: &str, arguments: &str| {
            let (id, name, arguments) = (id.to_owned(), name.to_owned(), arguments.to_owned());
            MessagePart::ToolCall(ToolCall { id, name, arguments })
        };
        assert_eq!(
            found[2].parts,
            [
                MessagePart::Reasoning("let me see".into()),
                MessagePart::Text("I look.".into()),
                call("a", "f", "{}"),
                call("b", "g", "{\"x\":1}"),
            ]
        );
        let result = MessagePart::ResultOf(CallReference { id: "b".into(), name: "g".into() });
        assert_eq!(found[3].parts, [result, MessagePart::Text("7".into())]);
    }

    #[test]
    fn an_error_names_the_item() {
        for (input, param, expect) in [
            (json!(null), "input", "missing"),
            (json!([{"role": "tool", "content": "x"}]), "input[0].role", "\"tool\""),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type", "nothing is stored"),
            (json!([{"type": "computer_call"}]), "input[0].type", "allowed are message"),
            (json!([{"type": "function_call", "name": "f"}]), "input[0].call_id", "missing"),
            (
                json!([{"type": "function_call_output", "call_id": "x", "output": "1"}]),
                "input[0].call_id",
                "no function_call before",
            ),
            (
                json!([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]),
                "input[0].encrypted_content",
                "another server",
            ),
            (
                json!([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]),
                "input[0].content[0].type",
                "\"input_file\"",
            ),
        ] {
            let failure = read(input).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(param));
            assert!(failure.message.contains(expect), "{failure}");
        }
    }
}
