//! Bodies of HTTP requests: chat, completion, transcription.

use super::Kit;
use crate::offered::{ItemShape, Offered, OfferedItem};
use crate::prompt::{Message, messages};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};

/// Between the fields of a form; longer than any run of the file's bytes would be by chance.
const BOUNDARY: &str = "triptych-bench-7d1f0c95b2e84a63";

/// A body and its type.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) content_type: String,
    pub(super) bytes: Bytes,
}

impl Body {
    fn json(value: &Value) -> Self {
        Self { content_type: "application/json".to_owned(), bytes: value.to_string().into() }
    }
}

/// What every request asks for: so many tokens, neither more nor less, streamed and counted.
fn asked(model: &str, offered: &Offered) -> Value {
    json!({
        "model": model,
        "stream": true,
        "stream_options": {"include_usage": true},
        "temperature": 0,
        "max_tokens": offered.output_tokens,
        "min_tokens": offered.output_tokens,
        "ignore_eos": true,
    })
}

/// `POST /v1/chat/completions`.
pub(super) fn chat(model: &str, offered: &Offered, kit: &Kit) -> Body {
    let message = |message: &Message| {
        let role = if message.is_answer { "assistant" } else { "user" };
        let items = offered.items.get(message.items.clone()).unwrap_or_default();
        if items.is_empty() {
            return json!({"role": role, "content": message.text});
        }
        let mut parts: Vec<Value> = items.iter().map(|item| part(item, kit)).collect();
        if !message.text.is_empty() {
            parts.push(json!({"type": "text", "text": message.text}));
        }
        json!({"role": role, "content": parts})
    };
    let mut body = asked(model, offered);
    body["messages"] = messages(offered, &kit.wording, kit.seed).iter().map(message).collect();
    Body::json(&body)
}

/// `POST /v1/completions`; items are an extension of ours.
pub(super) fn completion(model: &str, offered: &Offered, kit: &Kit) -> Body {
    let mut body = asked(model, offered);
    let texts = messages(offered, &kit.wording, kit.seed).into_iter().map(|m| m.text);
    body["prompt"] = texts.collect::<String>().into();
    if !offered.items.is_empty() {
        body["items"] = offered.items.iter().map(|item| part(item, kit)).collect();
    }
    Body::json(&body)
}

/// `POST /v1/audio/transcriptions`: the first sound; the answer is as long as the model makes it.
pub(super) fn transcription(model: &str, offered: &Offered, kit: &Kit) -> Body {
    let mut bytes = Vec::new();
    for (name, value) in [("model", model), ("stream", "true"), ("temperature", "0")] {
        let field =
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        bytes.extend_from_slice(field.as_bytes());
    }
    let sounds = offered.items.iter().filter(|i| matches!(i.shape, ItemShape::Audio { .. }));
    for item in sounds.take(1) {
        let field = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"sound.wav\"\r\n\
             Content-Type: audio/wav\r\n\r\n"
        );
        bytes.extend_from_slice(field.as_bytes());
        bytes.extend_from_slice(&kit.media.file(item));
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    Body { content_type: format!("multipart/form-data; boundary={BOUNDARY}"), bytes: bytes.into() }
}

fn part(item: &OfferedItem, kit: &Kit) -> Value {
    let data = STANDARD.encode(kit.media.file(item));
    match item.shape {
        ItemShape::Image { .. } => {
            json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}})
        }
        ItemShape::Audio { .. } => {
            json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        }
    }
}
