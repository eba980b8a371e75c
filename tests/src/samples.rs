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

/// The directory of the real Whisper tiny.en.
pub fn whisper_tiny_en() -> PathBuf {
    let repository = models_dir().join("../..");
    let model = repository.join(".cache/whisper-tiny.en");
    let model = model.canonicalize().unwrap_or(model);
    assert!(model.is_dir(), "{} is missing: run `cargo xtask whisper`", model.display());
    model
}

/// Clips for [`whisper_tiny_en`], and the answers that are expected of it.
pub struct Clips {
    folder: PathBuf,
    pub rows: Vec<Value>,
}

impl Clips {
    pub fn read() -> Self {
        let folder = models_dir().join("../golden/tiny_en");
        let expected = std::fs::read_to_string(folder.join("expected.json")).expect("the expected texts");
        let rows: Vec<Value> = serde_json::from_str(&expected).expect("JSON");
        assert!(rows.len() >= 20, "{} clips", rows.len());
        Self { folder, rows }
    }

    /// The file of a row.
    pub fn audio(&self, row: &Value) -> Vec<u8> {
        std::fs::read(self.folder.join(row["file"].as_str().expect("a file"))).expect("a clip")
    }
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

/// Samples of a held-out clip, 16 kHz mono.
pub fn decode_16k(file: &str) -> Vec<i16> {
    let limits = triptych_core::limits::Limits::default();
    let samples = triptych_models::speech::audio::decode(&heldout(file), 16_000, &limits).expect("audio");
    samples.iter().map(|s| (s * 32_767.0) as i16).collect()
}

/// A WAV file of 16 kHz mono samples.
pub fn wav_16k(samples: &[i16]) -> Vec<u8> {
    let data_len = u32::try_from(samples.len() * 2).expect("a short clip");
    let mut wav = Vec::with_capacity(44 + samples.len() * 2);
    wav.extend_from_slice(b"RIFF");
    wav.extend_from_slice(&(36 + data_len).to_le_bytes());
    wav.extend_from_slice(b"WAVEfmt ");
    wav.extend_from_slice(&16u32.to_le_bytes());
    for field in [1u16, 1] {
        wav.extend_from_slice(&field.to_le_bytes());
    }
    wav.extend_from_slice(&16_000u32.to_le_bytes());
    wav.extend_from_slice(&32_000u32.to_le_bytes());
    for field in [2u16, 16] {
        wav.extend_from_slice(&field.to_le_bytes());
    }
    wav.extend_from_slice(b"data");
    wav.extend_from_slice(&data_len.to_le_bytes());
    wav.extend(samples.iter().flat_map(|s| s.to_le_bytes()));
    wav
}
