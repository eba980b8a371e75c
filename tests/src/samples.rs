//! The held-out samples that come with the sample models.

use base64::Engine as _;
use serde_json::{Value, json};
use std::path::PathBuf;

/// `tests/models`.
pub fn models_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models")
}

/// A file among the held-out samples.
pub fn heldout(file: &str) -> Vec<u8> {
    let path = models_dir().join("heldout").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The lines of a held-out list.
pub fn list(file: &str) -> Vec<Value> {
    let text = String::from_utf8(heldout(file)).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// `data:` URL of a PNG.
pub fn data_url(png: &[u8]) -> String {
    format!("data:image/png;base64,{}", base64::engine::general_purpose::STANDARD.encode(png))
}

/// A greedy chat request about images.
pub fn ask_images(model: &str, question: &str, images: &[&[u8]]) -> Value {
    let mut parts: Vec<Value> =
        images.iter().map(|png| json!({"type": "image_url", "image_url": {"url": data_url(png)}})).collect();
    parts.push(json!({"type": "text", "text": question}));
    json!({"model": model, "temperature": 0, "messages": [{"role": "user", "content": parts}]})
}

/// The text of a chat answer.
pub fn text_of(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no content in {answer}"))
}
