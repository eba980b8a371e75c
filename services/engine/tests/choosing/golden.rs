//! The golden files, and their settings as ours.

use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use triptych_core::sampling::SamplingParams;
use triptych_engine::logits_processors::{GivenTokens, LogitsProcessors};

pub struct Golden {
    pub json: Value,
    tensors: Vec<u8>,
}

impl Golden {
    pub fn open() -> Self {
        let dir = repo("tests/golden/logits");
        let read = |file: &str| std::fs::read(dir.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        let json = serde_json::from_slice(&read("expected.json")).expect("expected.json is JSON");
        Self { json, tensors: read("expected.safetensors") }
    }

    /// The cases of a kind; there are some.
    pub fn cases(&self, kind: &str) -> &[Value] {
        let cases = self.json[kind].as_array().expect("a list of cases");
        assert!(!cases.is_empty(), "{kind}");
        cases
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).expect("expected.safetensors is whole");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn end_tokens(&self) -> Vec<u32> {
        ids(&self.json["end_tokens"])
    }
}

/// A path from the root of the repository.
pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

fn or<T: serde::de::DeserializeOwned>(value: &Value, default: T) -> T {
    if value.is_null() { default } else { serde_json::from_value(value.clone()).expect("a setting") }
}

/// The sampling settings of a case, which are named as ours.
pub fn params(setting: &Value) -> SamplingParams {
    SamplingParams {
        temperature: or(&setting["temperature"], 1.0),
        top_k: or(&setting["top_k"], None),
        top_p: or(&setting["top_p"], 1.0),
        min_p: or(&setting["min_p"], 0.0),
        repetition_penalty: or(&setting["repetition_penalty"], 1.0),
        presence_penalty: or(&setting["presence_penalty"], 0.0),
        frequency_penalty: or(&setting["frequency_penalty"], 0.0),
        logit_bias: or(&setting["logit_bias"], Vec::new()),
        no_repeat_ngram_size: or(&setting["no_repeat_ngram_size"], 0),
        min_tokens: or(&setting["min_tokens"], 0),
        ..SamplingParams::default()
    }
}

pub fn processors(setting: &Value, prompt: &[u32], end_tokens: &[u32]) -> LogitsProcessors {
    let given = GivenTokens { prompt, encoder: &[] };
    LogitsProcessors::new(&params(setting), or(&setting["bad_words"], Vec::new()), end_tokens.to_vec(), given)
}
