//! Messages and their parts.

use crate::request::{Item, Source};
use bytes::Bytes;
use serde::Deserialize;
use triptych_core::prompt::{Message, MessagePart, Role};
use triptych_core::{Failure, ItemIdx, ItemOptions, Modality};

/// Sounds that clients name; the encoder looks at the bytes.
const AUDIO_FORMATS: [&str; 9] = ["wav", "mp3", "flac", "ogg", "oga", "m4a", "mp4", "aac", "webm"];

/// A message as it arrives.
#[derive(Debug, Deserialize)]
pub(super) struct RawMessage {
    role: Option<String>,
    content: Option<Content>,
}

/// Words, or parts.
#[derive(Debug)]
enum Content {
    Text(String),
    Parts(Vec<RawPart>),
}

/// By hand, so that an error inside a part says where it is; `untagged` would only say that no variant fits.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Content;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string or a list of parts")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: serde::de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
                Vec::deserialize(serde::de::value::SeqAccessDeserializer::new(parts)).map(Content::Parts)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

/// A part as it arrives.
#[derive(Debug, Deserialize)]
pub(in crate::openai) struct RawPart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    image_url: Option<ImageUrl>,
    input_audio: Option<InputAudio>,
}

/// An object with a URL; some clients send the URL alone.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "an object with a url")]
enum ImageUrl {
    Object { url: String },
    Bare(String),
}

#[derive(Debug, Deserialize)]
struct InputAudio {
    data: Option<String>,
    format: Option<String>,
}

impl RawMessage {
    /// The message; its items join `items`.
    pub(super) fn into_message(self, i: usize, items: &mut Vec<Item>) -> Result<Message, Failure> {
        let role = role(self.role.as_deref(), i)?;
        let parts = match self.content {
            None => Vec::new(),
            Some(Content::Text(text)) => vec![MessagePart::Text(text)],
            Some(Content::Parts(parts)) => {
                let part = |(p, part): (usize, RawPart)| {
                    part.into_part(&format!("messages[{i}].content[{p}]"), items)
                };
                parts.into_iter().enumerate().map(part).collect::<Result<_, _>>()?
            }
        };
        Ok(Message { role, parts })
    }
}

/// The items of a request that has no messages.
pub(in crate::openai) fn items_of(parts: Vec<RawPart>) -> Result<Vec<Item>, Failure> {
    let mut items = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("items[{i}]");
        if let MessagePart::Text(_) = part.into_part(&at, &mut items)? {
            let message = "type is text, allowed are image_url and input_audio; text goes into the prompts";
            return Err(Failure::invalid(message).with_param(format!("{at}.type")));
        }
    }
    Ok(items)
}

fn role(role: Option<&str>, i: usize) -> Result<Role, Failure> {
    let wrong = |message: String| Err(Failure::invalid(message).with_param(format!("messages[{i}].role")));
    match role {
        Some("system" | "developer") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool" | "function") => wrong("messages of tools are not supported by this server".into()),
        Some(other) => wrong(format!("role is {other:?}, allowed are system, developer, user and assistant")),
        None => wrong("role is missing, allowed are system, developer, user and assistant".into()),
    }
}

impl RawPart {
    fn into_part(self, at: &str, items: &mut Vec<Item>) -> Result<MessagePart, Failure> {
        let missing = |field: &str| {
            Failure::invalid(format!("a part of this type needs {field}")).with_param(format!("{at}.{field}"))
        };
        let (modality, source, param) = match self.kind.as_deref() {
            Some("text" | "input_text") => {
                return Ok(MessagePart::Text(self.text.ok_or_else(|| missing("text"))?));
            }
            Some("image_url") => {
                let (ImageUrl::Object { url } | ImageUrl::Bare(url)) =
                    self.image_url.ok_or_else(|| missing("image_url"))?;
                let param = format!("{at}.image_url");
                let source = image(url).map_err(|f| f.with_param(&*param))?;
                (Modality::Image, source, param)
            }
            Some("input_audio") => {
                let param = format!("{at}.input_audio");
                let audio = self.input_audio.ok_or_else(|| missing("input_audio"))?;
                let source = sound(audio).map_err(|f| f.with_param(&*param))?;
                (Modality::Audio, source, param)
            }
            other => {
                let what = other.map_or("missing".to_owned(), |kind| format!("{kind:?}"));
                let message = format!("type is {what}, allowed are text, image_url and input_audio");
                return Err(Failure::invalid(message).with_param(format!("{at}.type")));
            }
        };
        let idx = ItemIdx(u32::try_from(items.len()).unwrap_or(u32::MAX));
        items.push(Item { modality, source, options: ItemOptions::default(), param });
        Ok(MessagePart::Item(idx))
    }
}

fn image(url: String) -> Result<Source, Failure> {
    if is_data_url(&url) { data_url(url, "image/") } else { Ok(Source::Url(url)) }
}

fn sound(audio: InputAudio) -> Result<Source, Failure> {
    let data = audio.data.ok_or_else(|| Failure::invalid("input_audio needs data"))?;
    if let Some(format) = audio.format.map(|f| f.to_ascii_lowercase())
        && !AUDIO_FORMATS.contains(&&*format)
    {
        let allowed = AUDIO_FORMATS.join(", ");
        return Err(Failure::invalid(format!("format is {format:?}, allowed are {allowed}")));
    }
    if is_data_url(&data) { data_url(data, "audio/") } else { Ok(Source::Base64(data.into())) }
}

fn is_data_url(text: &str) -> bool {
    text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}

/// The base64 of `data:[type][;parameters];base64,…` (RFC 2397), still encoded.
fn data_url(url: String, expected: &str) -> Result<Source, Failure> {
    let Some((head, _)) = url.split_once(',') else {
        return Err(Failure::invalid("the data URL has no comma before its data"));
    };
    let at = head.len() + 1;
    let head = head[5..].to_ascii_lowercase();
    let Some(media_type) = head.strip_suffix(";base64") else {
        return Err(Failure::invalid("the data URL is not base64: it must read `data:TYPE;base64,DATA`"));
    };
    let essence = media_type.split(';').next().unwrap_or_default();
    if !(essence.is_empty() || essence == "application/octet-stream" || essence.starts_with(expected)) {
        return Err(Failure::invalid(format!("the data URL has type {essence:?}, expected is {expected}*")));
    }
    Ok(Source::Base64(Bytes::from(url).slice(at..)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        ]);
        let (message, items) = read(json!({"role": "user", "content": content})).unwrap();
        assert_eq!(message.parts[1..], [0, 1, 2].map(|i| MessagePart::Item(ItemIdx(i))));
        assert!(matches!(&items[0].source, Source::Base64(b) if b == "aGk="));
        assert!(matches!(&items[1].source, Source::Url(u) if u == "https://example.com/a.png"));
        assert_eq!(items[2].param, "messages[3].content[3].input_audio");
        assert_eq!(items[2].modality, Modality::Audio);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let part = |part: serde_json::Value| json!({"role": "user", "content": [part]});
        let image = |url: &str| part(json!({"type": "image_url", "image_url": {"url": url}}));
        let at = |field: &str| format!("messages[3].content[0].{field}");
        let cases = [
            (
                json!({"role": "tool", "content": "x"}),
                "messages[3].role".to_owned(),
                "tools are not supported",
            ),
            (json!({"role": "x", "content": "x"}), "messages[3].role".to_owned(), "role is \"x\""),
            (json!({"content": "x"}), "messages[3].role".to_owned(), "role is missing"),
            (part(json!({"type": "video_url"})), at("type"), "type is \"video_url\", allowed are text"),
            (part(json!({"text": "x"})), at("type"), "type is missing"),
            (part(json!({"type": "text"})), at("text"), "needs text"),
            (part(json!({"type": "image_url"})), at("image_url"), "needs image_url"),
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
        ];
        for (message, param, expect) in cases {
            let failure = read(message).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(&*param));
            assert!(failure.message.contains(expect), "{failure}");
        }
    }
}
