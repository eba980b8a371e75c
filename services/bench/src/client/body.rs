//! Bodies of HTTP requests: chat, completion, transcription.

use super::ContentSource;
use crate::offered::{ItemShape, Offered, OfferedItem};
use crate::prompt::{Message, messages};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};

/// Boundary of the fields of a form; too long to occur in a file by chance.
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

/// Fields of every request: the exact number of tokens, streamed, with usage.
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
pub(super) fn chat(model: &str, offered: &Offered, content: &ContentSource) -> Body {
    let message = |message: &Message| {
        let role = if message.is_answer { "assistant" } else { "user" };
        let items = offered.items.get(message.items.clone()).unwrap_or_default();
        if items.is_empty() {
            return json!({"role": role, "content": message.text});
        }
        let mut parts: Vec<Value> = items.iter().map(|item| part(item, content)).collect();
        if !message.text.is_empty() {
            parts.push(json!({"type": "text", "text": message.text}));
        }
        json!({"role": role, "content": parts})
    };
    let mut body = asked(model, offered);
    body["messages"] = messages(offered, &content.wording, content.seed).iter().map(message).collect();
    Body::json(&body)
}

/// `POST /v1/completions`; items are an extension of ours.
pub(super) fn completion(model: &str, offered: &Offered, content: &ContentSource) -> Body {
    let mut body = asked(model, offered);
    let texts = messages(offered, &content.wording, content.seed).into_iter().map(|m| m.text);
    body["prompt"] = texts.collect::<String>().into();
    if !offered.items.is_empty() {
        body["items"] = offered.items.iter().map(|item| part(item, content)).collect();
    }
    Body::json(&body)
}

/// `POST /v1/audio/transcriptions` with the first audio clip; the model decides the length of the answer.
pub(super) fn transcription(model: &str, offered: &Offered, content: &ContentSource) -> Body {
    let mut bytes = Vec::new();
    for (name, value) in [("model", model), ("stream", "true"), ("temperature", "0")] {
        let field =
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        bytes.extend_from_slice(field.as_bytes());
    }
    let clips = offered.items.iter().filter(|i| matches!(i.shape, ItemShape::Audio { .. }));
    for item in clips.take(1) {
        let field = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"audio.wav\"\r\n\
             Content-Type: audio/wav\r\n\r\n"
        );
        bytes.extend_from_slice(field.as_bytes());
        bytes.extend_from_slice(&content.media.file(item));
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    Body { content_type: format!("multipart/form-data; boundary={BOUNDARY}"), bytes: bytes.into() }
}

fn part(item: &OfferedItem, content: &ContentSource) -> Value {
    let data = STANDARD.encode(content.media.file(item));
    match item.shape {
        ItemShape::Image { .. } => {
            json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}})
        }
        ItemShape::Audio { .. } => {
            json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        }
    }
}
