//! The golden files: a missing one fails the test that asks for it.
#![allow(dead_code)]

use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// A path among the golden files.
pub fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(relative)
}

/// Bytes of a golden file.
pub fn bytes(relative: &str) -> Vec<u8> {
    let path = path(relative);
    std::fs::read(&path).unwrap_or_else(|e| panic!("golden file {}: {e}", path.display()))
}

/// A golden JSON file.
pub fn json(relative: &str) -> serde_json::Value {
    serde_json::from_slice(&bytes(relative)).expect("golden JSON")
}

/// A file of `tests/media`.
pub fn media(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/media").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("media file {}: {e}", path.display()))
}

/// Golden tensors.
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn read(relative: &str) -> Self {
        Self(bytes(relative))
    }

    fn view(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let all = SafeTensors::deserialize(&self.0).expect("golden safetensors");
        let tensor = all.tensor(name).unwrap_or_else(|e| panic!("golden tensor {name}: {e}"));
        (tensor.shape().to_vec(), tensor.data().to_vec())
    }

    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).expect("golden safetensors").tensor(name).is_ok()
    }

    pub fn f32(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let (shape, data) = self.view(name);
        (shape, data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    pub fn u8(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        self.view(name)
    }

    pub fn i64(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let (shape, data) = self.view(name);
        (shape, data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
    }
}

/// A JSON list of numbers as token ids.
pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}
