//! Messages of a chat request.

use super::super::lists::ShortList;
use super::super::part::RawPart;
use super::super::text_or_list::TextOrList;
use super::tools::RawCall;
use crate::request::Item;
use serde::Deserialize;
use triptych_core::Failure;
use triptych_core::prompt::{CallReference, Message, MessagePart, Role};

/// A message, as parsed.
#[derive(Debug, Deserialize)]
pub(super) struct RawMessage {
    role: Option<String>,
    content: Option<TextOrList<RawPart>>,
    /// Calls of the assistant.
    tool_calls: Option<ShortList<RawCall>>,
    /// The call whose result a tool gives.
    tool_call_id: Option<String>,
    /// The tool whose result it is.
    name: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
}

impl RawMessage {
    /// The message; its items join `items`.
    pub(super) fn into_message(self, i: usize, items: &mut Vec<Item>) -> Result<Message, Failure> {
        let role = role(self.role.as_deref(), i)?;
        let mut parts = Vec::new();
        if role == Role::Tool {
            let (id, name) = (self.tool_call_id.unwrap_or_default(), self.name.unwrap_or_default());
            parts.push(MessagePart::ResultOf(CallReference { id, name }));
        }
        let reasoning = self.reasoning_content.or(self.reasoning);
        parts.extend(reasoning.filter(|text| !text.is_empty()).map(MessagePart::Reasoning));
        match self.content {
            None => {}
            Some(TextOrList::Text(text)) => parts.push(MessagePart::Text(text)),
            Some(TextOrList::List(content)) => {
                for (p, part) in content.into_iter().enumerate() {
                    parts.push(part.into_part(&format!("messages[{i}].content[{p}]"), items)?);
                }
            }
        }
        for (c, call) in self.tool_calls.map(|list| list.0).unwrap_or_default().into_iter().enumerate() {
            let call = call.into_call(&format!("messages[{i}].tool_calls[{c}]"))?;
            parts.push(MessagePart::ToolCall(call));
        }
        Ok(Message { role, parts })
    }
}

const ROLES: &str = "system, developer, user, assistant and tool";

fn role(role: Option<&str>, i: usize) -> Result<Role, Failure> {
    let wrong = |message: String| Err(Failure::invalid(message).with_param(format!("messages[{i}].role")));
    match role {
        Some("system" | "developer") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        // The second is OpenAI's older name.
        Some("tool" | "function") => Ok(Role::Tool),
        Some(other) => wrong(format!("role is {other:?}, allowed are {ROLES}")),
        None => wrong(format!("role is missing, allowed are {ROLES}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Source;
    use serde_json::json;
    use triptych_core::prompt::ToolCall;
    use triptych_core::{ItemIdx, Modality};

    fn read(message: serde_json::Value) -> Result<(Message, Vec<Item>), Failure> {
        let raw: RawMessage = serde_json::from_value(message).unwrap();
        let mut items = Vec::new();
        raw.into_message(3, &mut items).map(|message| (message, items))
    }

    #[test]
    fn content_is_a_string_or_parts_or_nothing() {
        let (message, items) = read(json!({"role": "developer", "content": "hi"})).unwrap();
        assert_eq!(
            (message.role, message.parts, items.len()),
            (Role::System, vec![MessagePart::Text("hi".into())], 0)
        );
        let (message, _) = read(json!({"role": "assistant", "content": null, "refusal": null})).unwrap();
        assert!(message.parts.is_empty());
        let content = json!([
            {"type": "text", "text": "what?", "image_url": null},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "high"}},
            {"type": "image_url", "image_url": "https://example.com/a.png"},
            {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aGk="}},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}},
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,aGk=,aGk="}},
        ]);
        let (message, items) = read(json!({"role": "user", "content": content})).unwrap();
        assert_eq!(message.parts[1..], [0, 1, 2, 3, 4, 5].map(|i| MessagePart::Item(ItemIdx(i))));
        assert!(matches!(&items[0].source, Source::Base64(b) if b == "aGk="));
        assert!(matches!(&items[1].source, Source::Url(u) if u == "https://example.com/a.png"));
        assert_eq!(items[2].param, "messages[3].content[3].input_audio");
        assert_eq!([items[2].modality, items[3].modality], [Modality::Audio; 2]);
        assert_eq!(items[3].param, "messages[3].content[4].audio_url");
        assert!(matches!(&items[3].source, Source::Base64(b) if b == "aGk="));
        assert_eq!([items[4].modality, items[5].modality], [Modality::Video; 2]);
        assert!(matches!(&items[4].source, Source::Base64(b) if b == "aGk="));
        assert!(matches!(&items[5].source, Source::Base64Frames(b) if b == "aGk=,aGk="));
    }

    #[test]
    fn calls_and_their_results_are_parts() {
        let call =
            json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}});
        let (message, _) = read(
            json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]}),
        )
        .unwrap();
        let call = ToolCall { id: "a".into(), name: "f".into(), arguments: "{\"x\": 1}".into() };
        assert_eq!(message.parts, [MessagePart::Reasoning("hm".into()), MessagePart::ToolCall(call)]);
        let (message, _) = read(json!({"role": "tool", "tool_call_id": "a", "content": "3"})).unwrap();
        let result = CallReference { id: "a".into(), name: String::new() };
        assert_eq!(message.role, Role::Tool);
        assert_eq!(message.parts, [MessagePart::ResultOf(result), MessagePart::Text("3".into())]);
    }

    #[test]
    fn an_error_names_the_field() {
        let part = |part: serde_json::Value| json!({"role": "user", "content": [part]});
        let image = |url: &str| part(json!({"type": "image_url", "image_url": {"url": url}}));
        let at = |field: &str| format!("messages[3].content[0].{field}");
        let cases = [
            (json!({"role": "x", "content": "x"}), "messages[3].role".to_owned(), "role is \"x\""),
            (
                json!({"role": "assistant", "tool_calls": [{"type": "custom"}]}),
                "messages[3].tool_calls[0].type".to_owned(),
                "allowed is function",
            ),
            (json!({"content": "x"}), "messages[3].role".to_owned(), "role is missing"),
            (part(json!({"type": "file"})), at("type"), "type is \"file\", allowed are text"),
            (part(json!({"type": "video_url"})), at("video_url"), "needs video_url"),
            (
                part(json!({"type": "video_url", "video_url": "data:image/png;base64,aGk="})),
                at("video_url"),
                "has type \"image/png\", expected is video/*, image/gif*, image/webp*",
            ),
            (part(json!({"text": "x"})), at("type"), "type is missing"),
            (part(json!({"type": "text"})), at("text"), "needs text"),
            (part(json!({"type": "image_url"})), at("image_url"), "needs image_url"),
            (
                part(json!({"type": "image_url", "image_url": {"url": "http://a", "detail": "low"}})),
                at("image_url"),
                "detail is \"low\", allowed are auto and high",
            ),
            (image("data:image/png"), at("image_url"), "no comma"),
            (image("data:image/png,abc"), at("image_url"), "not base64"),
            (
                image("DATA:text/plain;base64,aGk="),
                at("image_url"),
                "has type \"text/plain\", expected is image/*",
            ),
            (
                part(json!({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "pcm16"}})),
                at("input_audio"),
                "format is \"pcm16\"",
            ),
            (part(json!({"type": "input_audio", "input_audio": {}})), at("input_audio"), "needs data"),
            (part(json!({"type": "audio_url"})), at("audio_url"), "needs audio_url"),
            (
                part(json!({"type": "audio_url", "audio_url": "data:image/png;base64,aGk="})),
                at("audio_url"),
                "has type \"image/png\", expected is audio/*",
            ),
        ];
        for (message, param, expect) in cases {
            let failure = read(message).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(&*param));
            assert!(failure.message.contains(expect), "{failure}");
        }
    }
}
